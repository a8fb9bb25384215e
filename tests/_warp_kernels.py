"""Small kernels that try one building block of the CUDA twin each."""

import numpy as np
from numba import cuda

from numba_attn.kernels import warp
from numba_attn.kernels._jit import cuda_kernel


@cuda_kernel
def sums(x, out):
    out[cuda.threadIdx.x] = warp.warp_sum(x[cuda.threadIdx.x])


@cuda_kernel
def primitives(bits, floats, copies, back, quotients):
    tile = cuda.shared.array(16, np.uint16, alignment=16)
    i = cuda.threadIdx.x
    if i == 0:
        warp.copy_16_bytes(tile, 0, bits, 0)
    if i >= 8 and i < 16:
        warp.copy_2_bytes(tile, i, bits, i)
    cuda.syncthreads()
    if i < 16:
        copies[i] = tile[i]
        floats[i] = warp.load_bfloat16(tile, i)
        back[i] = warp.float_bits(warp.load_bfloat16(bits, i))
        quotients[i] = warp.divide(2147483647 - i, 7)


@cuda_kernel
def unwritten(floats, bits):
    some_floats = cuda.shared.array(4, np.float32)
    some_bits = cuda.shared.array((2, 2), np.uint16)
    for i in range(4):
        floats[i] = some_floats[i]
        bits[i] = some_bits[i // 2, i % 2]


@cuda_kernel
def failing(in_warp, culprit):
    if cuda.threadIdx.x == culprit:
        1 / 0  # noqa: B018 (the failure)
    if in_warp:
        warp.warp_sum(1.0)
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
