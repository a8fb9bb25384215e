"""A kernel that tries the scalar roundings on a device."""

from numba import cuda

from numba_attn.kernels import recurrence
from numba_attn.kernels._jit import cuda_kernel


@cuda_kernel
def round_all(bits, x, bfloat16, float16, e4m3fn, e5m2, int8):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < bits.size:
        bfloat16[i] = recurrence.round_to_bfloat16(bits[i])
        float16[i] = recurrence.round_to_float16(bits[i])
        e4m3fn[i] = recurrence.round_to_float8_e4m3fn(bits[i])
        e5m2[i] = recurrence.round_to_float8_e5m2(bits[i])
        int8[i] = recurrence.round_to_int8(x[i])
