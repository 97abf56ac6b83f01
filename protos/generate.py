"""Generates the Python side of inference.proto: `python -m protos.generate [FOLDER]`.

Needs grpcio-tools. A test generates into a temporary folder and compares with what is committed.
"""

import sys
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = "protos/inference.proto"


def generate(folder: Path) -> None:
    """Write protos/inference_pb2.py, .pyi and inference_pb2_grpc.py under `folder`.

    Raises RuntimeError when the compiler refuses the file; it has then said why.
    """
    from grpc_tools import protoc  # noqa: PLC0415 - a development tool, absent where we serve

    well_known = str(files("grpc_tools") / "_proto")
    outputs = (f"--{kind}={folder}" for kind in ("python_out", "pyi_out", "grpc_python_out"))
    status = protoc.main(["protoc", f"-I{ROOT}", f"-I{well_known}", *outputs, PROTO])
    if status != 0:
        message = f"protoc ended with {status}"
        raise RuntimeError(message)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
