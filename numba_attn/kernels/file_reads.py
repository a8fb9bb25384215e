"""Many reads of a file in one call, which other threads of Python do not wait for."""

from numba import types

from ._jit import kernel

_pread = types.ExternalFunction(
    "pread", types.intp(types.int32, types.intp, types.uintp, types.int64)
)


@kernel
def read_pieces(fd, places, addresses, sizes):
    """Read pieces of a file, int64 [n] each; return how many were read before one that was not."""
    for i in range(len(sizes)):
        done = 0
        while done < sizes[i]:
            count = _pread(fd, addresses[i] + done, sizes[i] - done, places[i] + done)
            if count <= 0:
                return i
            done += count
    return len(sizes)
