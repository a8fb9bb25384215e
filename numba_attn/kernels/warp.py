"""The CUDA twin's building blocks, each with a version for Numba's simulator.

Kernels call these names and plain ``cuda.*`` only, so that one source compiles for a GPU and runs
in the simulator, which has no warp shuffles, no intrinsics and no aligned shared memory.
"""

import numpy as np
from numba import cuda

from .. import _device
from ._jit import cuda_function

WARP = 32
SIMULATOR = _device.is_simulator()

if SIMULATOR:
    from ._simulator import exchange

    _WIDENED = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32).tolist()

    def load_bfloat16(bits, i):
        """Return element i of an array of bfloat16 bits as float32."""
        return _WIDENED[bits[i]]

    def float_bits(x):
        """Return the bits of a float32 as uint32."""
        return np.float32(x).view(np.uint32)

    def divide(a, b):
        """Return a // b for a in 0..2^31 - 1 and b in 1..2^31 - 1, without a 64-bit division."""
        return a // b

    def copy_16_bytes(tile, to, rows, start):
        """Copy 8 elements of 2 bytes from global to shared memory, both aligned to 16 bytes."""
        assert to % 8 == 0
        for i in range(8):
            tile[to + i] = rows[start + i]

    def copy_2_bytes(tile, to, rows, start):
        """Copy one element of 2 bytes from global to shared memory."""
        tile[to] = rows[start]

    def warp_sum(x):
        """Return the sum over the lanes of the warp, the same in every lane."""
        return sum(exchange(x))

else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    _I32, _F32 = ir.IntType(32), ir.FloatType()
    _16_BYTES = ir.VectorType(_I32, 4)
    _GLOBAL, _SHARED = 1, 3  # address spaces
    _ALL_LANES = 0xFFFFFFFF

    def _element(context, builder, signature, args, position):
        """Return a pointer to element args[position + 1] of array args[position]."""
        array = context.make_array(signature.args[position])(context, builder, args[position])
        return builder.gep(array.data, [args[position + 1]])

    @intrinsic
    def load_bfloat16(typing_context, bits, i):
        """Return element i of an array of bfloat16 bits as float32."""

        def codegen(context, builder, signature, args):
            narrow = builder.load(_element(context, builder, signature, args, 0))
            wide = builder.shl(builder.zext(narrow, _I32), ir.Constant(_I32, 16))
            return builder.bitcast(wide, _F32)

        return types.float32(bits, types.int64), codegen

    @intrinsic
    def float_bits(typing_context, x):
        """Return the bits of a float32 as uint32."""

        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], _I32)

        return types.uint32(types.float32), codegen

    @intrinsic
    def divide(typing_context, a, b):
        """Return a // b for a in 0..2^31 - 1 and b in 1..2^31 - 1, without a 64-bit division."""

        def codegen(context, builder, signature, args):
            a, b = (builder.trunc(x, _I32) for x in args)
            return builder.zext(builder.udiv(a, b), ir.IntType(64))

        return types.int64(types.int64, types.int64), codegen

    @intrinsic
    def copy_16_bytes(typing_context, tile, to, rows, start):
        """Copy 8 elements of 2 bytes from global to shared memory, both aligned to 16 bytes."""

        def codegen(context, builder, signature, args):
            target, source = (
                builder.addrspacecast(
                    builder.bitcast(
                        _element(context, builder, signature, args, position),
                        _16_BYTES.as_pointer(),
                    ),
                    _16_BYTES.as_pointer(space),
                )
                for position, space in ((0, _SHARED), (2, _GLOBAL))
            )
            builder.store(builder.load(source, align=16), target, align=16)
            return context.get_dummy_value()

        return types.void(tile, types.int64, rows, types.int64), codegen

    @intrinsic
    def copy_2_bytes(typing_context, tile, to, rows, start):
        """Copy one element of 2 bytes from global to shared memory."""

        def codegen(context, builder, signature, args):
            target, source = (_element(context, builder, signature, args, i) for i in (0, 2))
            builder.store(builder.load(source), target)
            return context.get_dummy_value()

        return types.void(tile, types.int64, rows, types.int64), codegen

    @cuda_function
    def warp_sum(x):
        """Return the sum over the lanes of the warp, the same in every lane."""
        x += cuda.shfl_xor_sync(_ALL_LANES, x, 16)
        x += cuda.shfl_xor_sync(_ALL_LANES, x, 8)
        x += cuda.shfl_xor_sync(_ALL_LANES, x, 4)
        x += cuda.shfl_xor_sync(_ALL_LANES, x, 2)
        x += cuda.shfl_xor_sync(_ALL_LANES, x, 1)
        return x
