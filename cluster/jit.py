"""How code is compiled: by numba, none with `fastmath`, since nothing may be reordered.

The first process on a machine compiles, in half a minute; others take its code from a folder.
"""

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir

import numba

__all__ = ["inner", "kernel", "numba"]

SOURCES = (
    "control/kernels.py",
    "jit.py",
    "models/attention_kernels.py",
    "models/emit.py",
    "models/kernels.py",
    "models/tiles.py",
)


def _code_folder() -> Path:
    """A folder for this code: among temporary files where no home can be written to."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    folder = Path.home() / ".cache" / "drafthouse" / "kernels"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        folder = Path(gettempdir()) / "drafthouse-kernels"
    return folder / digest.hexdigest()[:16]


numba.config.THREADING_LAYER = "threadsafe"
if not numba.config.CACHE_DIR:  # numba's own looks for changes in one of the files alone
    numba.config.CACHE_DIR = str(_code_folder())

inner = numba.njit(cache=True, error_model="numpy")


def kernel(signature, *, parallel=False):
    """Compile it now, or take what was compiled before."""
    return numba.njit(signature, cache=True, error_model="numpy", nogil=True, parallel=parallel)
