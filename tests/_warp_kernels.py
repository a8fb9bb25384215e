"""Small kernels that try one building block of the CUDA twin each."""

import functools

import numpy as np
from numba import cuda

from numba_attn.kernels import rows_cuda, shares, warp
from numba_attn.kernels._jit import cuda_kernel


@functools.cache
def widen_all(name):
    """Return the kernel that widens an array of a format, with the threads of one block."""
    load = warp.LOADERS[name]

    @cuda_kernel
    def widen(bits, floats):
        for i in range(cuda.threadIdx.x, floats.size, cuda.blockDim.x):
            floats[i] = load(bits, i)

    return widen


@cuda_kernel
def primitives(floats, places, found_integers, found_floats, bits, quotients):
    """Load what is at places, (address, stride), or else i and floats[i]; divide."""
    i = cuda.threadIdx.x
    if i < found_integers.size:
        found_integers[i] = warp.load_int32(places[0][0] + i * places[0][1], i)
        found_floats[i] = warp.load_float32(places[1][0] + i * places[1][1], floats[i])
        bits[i] = warp.float_bits(floats[i])
        quotients[i] = warp.divide(2147483647 - i, 7)


@cuda_kernel
def blend_all(x, a, y, b, blended):
    for i in range(cuda.threadIdx.x, blended.size, cuda.blockDim.x):
        blended[i] = warp.blend(x[i], a[i], y[i], b[i])


@cuda_kernel
def find_rows(lists, sizes, found):
    row = cuda.blockIdx.x
    where = rows_cuda.find(row, lists, sizes)
    for i in range(5):
        found[row, i] = where[i]


@cuda_kernel
def unwritten(floats, bits):
    some_floats = cuda.shared.array(4, np.float32)
    some_bits = cuda.shared.array((2, 2), np.uint16)
    for i in range(4):
        floats[i] = some_floats[i]
        bits[i] = some_bits[i // 2, i % 2]


largest = shares.lanes_max(32)


@cuda_kernel
def failing(in_warp, culprit):
    if cuda.threadIdx.x == culprit:
        1 / 0  # noqa: B018 (the failure)
    if in_warp:
        largest(1.0)
    else:
        cuda.syncthreads()


@cuda_kernel
def some_return(order):
    arrived = cuda.shared.array(1, np.int32)
    i = cuda.threadIdx.x
    if i == 0:
        arrived[0] = 0
    if i < 4:
        return
    cuda.syncthreads()
    arrived[0] = 1
    cuda.syncthreads()
    order[i] = arrived[0]
