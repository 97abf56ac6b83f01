"""How kernels are compiled: none with `fastmath`, since nothing may be reordered."""

from numba import njit

inner = njit(cache=True, error_model="numpy")


def kernel(signature, *, parallel=False):
    """Compile it now, or take what was compiled before."""
    return njit(signature, cache=True, error_model="numpy", nogil=True, parallel=parallel)
