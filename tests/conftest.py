"""Fixtures for all tests."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from prometheus_client import CollectorRegistry

from cluster.config import prepare_ray_environment
from cluster.metrics import EngineMetrics

# Before anything imports ray, which reads this once; tests of actors do so, too. No token file is
# written to the home folder of whoever runs tests, and a call that comes after its cluster's end
# fails: it would look for another one, for minutes where a head was killed.
os.environ["RAY_AUTH_MODE"] = "disabled"
prepare_ray_environment(joining=False)

# Before anything imports torch: its threads sleep while they wait. Spinning, those of one test
# process would keep another's (a server's, a draft worker's) from the core it needs to go on.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:  # there are as many test processes as cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples every time, and no limit on an example's time: neighbours share the machine.
settings.register_profile("project", derandomize=True, deadline=None)
settings.load_profile("project")


@pytest.fixture(scope="session", autouse=True)
def _own_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is timed in tests is neither kept for the user nor taken from another run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTHOUSE_PROFILES", str(tmp_path_factory.mktemp("profiles")))
        yield


@pytest.fixture
def registry() -> CollectorRegistry:
    """A registry of its own for each test."""
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> EngineMetrics:
    """An engine's metrics in `registry`."""
    return EngineMetrics(registry, model="fake", num_positions=16)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch computes with one thread: in models this small several only wait for each other."""
    import torch  # noqa: PLC0415 - control tests need no torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny llama checkpoints of one vocabulary.

    A `target`; a `sibling` of it, which mostly agrees; and a `random` one, which hardly does.
    """
    from tests.checkpoints import make_checkpoint  # noqa: PLC0415 - as above

    folder = tmp_path_factory.mktemp("checkpoints")
    target = make_checkpoint(
        folder / "target", seed=1, hidden_size=32, max_position_embeddings=2304
    )
    return {
        "target": target,
        "sibling": _disturbed(target, folder / "sibling", scale=0.05),
        "random": make_checkpoint(
            folder / "random", seed=2, hidden_size=32, max_position_embeddings=2304
        ),
    }


def _disturbed(source: Path, folder: Path, *, scale: float) -> Path:
    """A copy of a checkpoint with noise of `scale` times its spread on every weight."""
    import torch  # noqa: PLC0415 - as above
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 - as above

    shutil.copytree(source, folder)
    generator = torch.Generator().manual_seed(3)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        noise = torch.randn(weight.shape, generator=generator)
        weights[name] = weight + scale * weight.std() * noise
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
