"""The floors of the code base: imports go strictly down, and each library stays on its floor."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS: tuple[tuple[str, ...], ...] = (
    (
        "cluster.config",
        "cluster.errors",
        "cluster.request",
        "cluster.tenant",
        "cluster.messages",
        "cluster.prefixes",
        "cluster.garbage",
        "cluster.interfaces",
        "cluster.jit",
        "cluster.metrics",
        "cluster.logs",
    ),
    ("cluster.control", "cluster.models", "cluster.sampling", "cluster.text"),
    ("cluster.grammar",),
    ("cluster.engine", "cluster.processor", "cluster.self_check"),
    ("cluster.drafters", "cluster.worker"),
    ("cluster.memory", "cluster.profiling"),
    ("cluster.local_drafter", "cluster.local_policy"),
    ("cluster.local",),
    ("cluster.rank",),
    ("cluster.actors",),
    ("cluster.tools",),
    ("cluster.cli_serve", "cluster.cli_bench"),
    (
        "cluster.cli_train",
        "cluster.cli_tune",
        "cluster.cli_choose",
        "cluster.cli_control",
        "cluster.cli_simulate",
        "cluster.cli_keys",
        "cluster.cli_drafts",
        "cluster.cli_drill",
    ),
    ("cluster.cli",),
    ("deployments",),
)
TORCH_FREE = (
    *FLOORS[0],
    "cluster.control",
    "cluster.engine",
    "cluster.drafters.choice",
    "cluster.drafters.grades",
    "cluster.drafters.guesses",
    "cluster.drafters.members",
    "cluster.drafters.ngram",
    "cluster.drafters.suffixes",
    "cluster.drafters.table",
    "cluster.drafters.tenants",
    "cluster.drafters.ahead",
    "cluster.drafters.assignment",
    "cluster.drafters.exchange",
    "cluster.drafters.patience",
    "cluster.drafters.survival",
    "cluster.drafters.contexts",
    "cluster.drafters.silent",
    "cluster.drafters.versions",
    "cluster.drafters.vocabulary",
    "cluster.drafters.heads.kinds",
    "cluster.drafters.thread",
    "cluster.grammar.compiler",
    "cluster.grammar.trial",
    "cluster.text",
    "cluster.tools.choosing.advice",
    "cluster.tools.choosing.canary",
    "cluster.tools.choosing.drafted",
    "cluster.tools.choosing.facts",
    "cluster.tools.choosing.findings",
    "cluster.tools.choosing.obstacles",
    "cluster.tools.choosing.gains",
    "cluster.tools.choosing.prediction",
    "cluster.tools.choosing.resampling",
    "cluster.tools.choosing.telemetry",
)
ONLY_IN = {
    "ray": ("cluster.actors", "cluster.cli", "cluster.cli_serve", "deployments"),
    "pydantic": ("cluster.config", "deployments"),
    "opentelemetry": ("deployments.tracing",),
    "torch": (
        "cluster.models",
        "cluster.sampling",
        "cluster.grammar.states",
        "cluster.drafters.model",
        "cluster.drafters.heads",
        "cluster.drafters.skipping",
        "cluster.processor",
        "cluster.rank",
        "cluster.self_check",
        "cluster.worker",
        "cluster.memory",
        "cluster.profiling",
        "cluster.local",
        "cluster.tools",
    ),
}


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Every module of both packages with its syntax tree."""
    for package in ("cluster", "deployments"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield name.removesuffix(".__init__"), ast.parse(path.read_text())


MODULES = dict(modules())


def imports(tree: ast.Module) -> set[str]:
    """Absolute names a module imports, at its top or inside a function."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the floor"
            module = node.module or ""
            names = {f"{module}.{alias.name}" for alias in node.names}
            found.update(names & MODULES.keys() or {module})
    return found


def within(module: str, packages: tuple[str, ...]) -> bool:
    """Whether a module is one of the packages or inside one."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def floor_of(module: str) -> int | None:
    """The floor a module stands on, None for the bare package names."""
    for floor, packages in enumerate(FLOORS):
        if within(module, packages):
            return floor
    return None


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_module_stands_on_a_floor(module: str) -> None:
    """A new module must be given its place before it can be imported by anyone."""
    assert module == "cluster" or floor_of(module) is not None


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_strictly_down(module: str) -> None:
    """A module imports from lower floors, or from its own package."""
    own = floor_of(module)
    for imported in imports(MODULES[module]):
        theirs = floor_of(imported)
        if own is None or theirs is None or theirs < own:
            continue
        same_package = imported.split(".")[:2] == module.split(".")[:2]
        on_floor_zero = own == theirs == 0
        together = imported.startswith("deployments") and module.startswith("deployments")
        assert same_package or on_floor_zero or together, f"{module} imports {imported}"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_libraries_stay_on_their_floor(module: str) -> None:
    """Ray, pydantic and torch are imported only where the architecture lets them in."""
    for imported in imports(MODULES[module]):
        library = imported.split(".")[0]
        if library in ONLY_IN:
            assert within(module, ONLY_IN[library]), f"{module} imports {library}"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_only_config_reads_the_environment(module: str) -> None:
    """os.environ is read in one place."""
    if module == "cluster.config.environment":
        return
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Attribute):
            assert node.attr not in {"environ", "getenv", "putenv"}, f"{module}:{node.lineno}"


@pytest.mark.parametrize(
    ("packages", "without"),
    [
        pytest.param(TORCH_FREE, {"torch", "ray"}, id="control"),
        pytest.param(("deployments",), {"torch", "transformers"}, id="supervisors"),
    ],
)
def test_what_computes_nothing_loads_no_torch(packages: tuple[str, ...], without: set[str]) -> None:
    """Importing the control side, or what supervises, leaves those libraries out of the process."""
    targets = [name for name in MODULES if within(name, packages)]
    assert len(targets) > 10
    code = (
        f"import importlib, sys\n"
        f"for name in {targets!r}: importlib.import_module(name)\n"
        f"print(sorted({without!r} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
