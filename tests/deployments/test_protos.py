"""The generated files are those of the committed inference.proto."""

from importlib.resources import files
from pathlib import Path

import pytest
from grpc_tools import protoc

ROOT = Path(__file__).parents[2]
GENERATED = ("inference_pb2.py", "inference_pb2.pyi", "inference_pb2_grpc.py")


def test_generated_files_are_up_to_date(tmp_path: Path) -> None:
    """Generating them again changes nothing but the version of the generator."""
    status = protoc.main(
        [
            "protoc",
            f"-I{ROOT}",
            f"-I{files('grpc_tools') / '_proto'}",
            f"--python_out={tmp_path}",
            f"--pyi_out={tmp_path}",
            f"--grpc_python_out={tmp_path}",
            "protos/inference.proto",
        ]
    )
    assert status == 0
    for name in GENERATED:
        assert significant(tmp_path / "protos" / name) == significant(ROOT / "protos" / name), name


def significant(path: Path) -> list[str]:
    """The lines that do not name the generator's own version."""
    lines = path.read_text().splitlines()
    return [
        line
        for line in lines
        if not line.startswith(("# Protobuf Python Version", "GRPC_GENERATED_VERSION"))
        and not line.strip().rstrip(",").isdigit()
    ]


@pytest.mark.parametrize("module", ["inference_pb2", "inference_pb2_grpc"])
def test_generated_modules_are_imported_as_a_package(module: str) -> None:
    """The grpc module finds the messages at `protos`, not beside itself on the path."""
    text = (ROOT / "protos" / f"{module}.py").read_text()
    assert "\nimport inference_pb2" not in text
