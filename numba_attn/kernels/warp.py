"""The CUDA twin's building blocks, each with a version for Numba's simulator.

Kernels call these names and plain ``cuda.*`` only, so that one source compiles for a GPU and runs
in the simulator, which has no warp shuffles, no intrinsics and no aligned shared memory.

LOADERS has one function per number format: it returns element i of an array of the format's bits
as float32, exactly, and NaN for a NaN.
"""

from numba import cuda

from .. import _arrays, _device
from . import recurrence
from ._jit import cuda_function

WARP = 32
SIMULATOR = _device.is_simulator()

if SIMULATOR:
    import ctypes

    import numpy as np

    from ._simulator import exchange

    def _loader(name):
        carrier = _arrays.CARRIERS[name]
        if carrier.kind != "u":
            return lambda numbers, i: float(numbers[i])
        codes = np.arange(1 << 8 * carrier.itemsize).astype(carrier)
        dtype = np.float16 if name == "float16" else _arrays.ml_dtype(name)
        with np.errstate(invalid="ignore"):  # signalling NaN
            widened = codes.view(dtype).astype(np.float32).tolist()
        return lambda bits, i: widened[bits[i]]

    LOADERS = {name: _loader(name) for name in _arrays.CARRIERS}

    def load_int32(address, default):
        """Return the int32 at an address in global memory, or the default where that is 0."""
        return ctypes.c_int32.from_address(int(address)).value if address else default

    def load_float32(address, default):
        """Return the float32 at an address in global memory, or the default where that is 0."""
        return ctypes.c_float.from_address(int(address)).value if address else default

    def float_bits(x):
        """Return the bits of a float32 as uint32."""
        return np.float32(x).view(np.uint32)

    def divide(a, b):
        """Return a // b for a in 0..2^31 - 1 and b in 1..2^31 - 1, without a 64-bit division."""
        return a // b

    def copy_16_bytes(tile, to, rows, start):
        """Copy 16 bytes of elements from global to shared memory, both aligned to 16 bytes."""
        elements = 16 // tile.itemsize
        assert to % elements == 0
        for i in range(elements):
            tile[to + i] = rows[start + i]

    def copy_element(tile, to, rows, start):
        """Copy one element from global to shared memory."""
        tile[to] = rows[start]

    def warp_sum(x):
        """Return the sum over the lanes of the warp, the same in every lane."""
        return sum(exchange(x))

else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    _I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
    _F16, _F32 = ir.HalfType(), ir.FloatType()
    _16_BYTES = ir.VectorType(_I32, 4)
    _GLOBAL, _SHARED = 1, 3  # address spaces
    _ALL_LANES = 0xFFFFFFFF

    def _element(context, builder, signature, args, position):
        """Return a pointer to element args[position + 1] of array args[position]."""
        array = context.make_array(signature.args[position])(context, builder, args[position])
        return builder.gep(array.data, [args[position + 1]])

    def _from_bfloat16(builder, bits):
        wide = builder.shl(builder.zext(bits, _I32), ir.Constant(_I32, 16))
        return builder.bitcast(wide, _F32)

    def _from_float16(builder, bits):
        return builder.fpext(builder.bitcast(bits, _F16), _F32)

    def _from_float32(builder, x):
        return x

    def _from_float8_e4m3fn(builder, bits):
        """Give the bits to a float16, whose exponents begin 8 lower; 0x7F and 0xFF are NaN."""
        wide = builder.shl(builder.sext(bits, _I16), ir.Constant(_I16, 7))
        half = builder.and_(wide, ir.Constant(_I16, 0xBFFF))
        x = builder.fmul(_from_float16(builder, half), ir.Constant(_F32, 256.0))
        magnitude = builder.and_(bits, ir.Constant(_I8, 0x7F))
        is_nan = builder.icmp_unsigned("==", magnitude, ir.Constant(_I8, 0x7F))
        return builder.select(is_nan, ir.Constant(_F32, float("nan")), x)

    def _from_float8_e5m2(builder, bits):
        half = builder.shl(builder.zext(bits, _I16), ir.Constant(_I16, 8))
        return _from_float16(builder, half)

    def _from_int8(builder, bits):
        return builder.sitofp(bits, _F32)

    def _loader(widen):
        @intrinsic
        def load(typing_context, bits, i):
            def codegen(context, builder, signature, args):
                return widen(builder, builder.load(_element(context, builder, signature, args, 0)))

            return types.float32(bits, types.int64), codegen

        return load

    LOADERS = {
        "bfloat16": _loader(_from_bfloat16),
        "float16": _loader(_from_float16),
        "float32": _loader(_from_float32),
        "float8_e4m3fn": _loader(_from_float8_e4m3fn),
        "float8_e5m2": _loader(_from_float8_e5m2),
        "int8": _loader(_from_int8),
    }

    def _load_at(builder, address, type, default):
        """Load from an address in global memory; give the default where the address is 0."""
        before = builder.block
        is_there = builder.icmp_unsigned("!=", address, ir.Constant(_I64, 0))
        with builder.if_then(is_there):
            pointer = builder.inttoptr(address, ir.PointerType(type, _GLOBAL))
            x = builder.load(pointer, align=4)
            x = x if type == default.type else builder.sext(x, default.type)
            inside = builder.block
        found = builder.phi(default.type)
        found.add_incoming(default, before)
        found.add_incoming(x, inside)
        return found

    @intrinsic
    def load_int32(typing_context, address, default):
        """Return the int32 at an address in global memory, or the default where that is 0."""

        def codegen(context, builder, signature, args):
            return _load_at(builder, args[0], _I32, args[1])

        return types.int64(types.int64, types.int64), codegen

    @intrinsic
    def load_float32(typing_context, address, default):
        """Return the float32 at an address in global memory, or the default where that is 0."""

        def codegen(context, builder, signature, args):
            return _load_at(builder, args[0], _F32, args[1])

        return types.float32(types.int64, types.float32), codegen

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
            return builder.zext(builder.udiv(a, b), _I64)

        return types.int64(types.int64, types.int64), codegen

    @intrinsic
    def copy_16_bytes(typing_context, tile, to, rows, start):
        """Copy 16 bytes of elements from global to shared memory, both aligned to 16 bytes."""

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
    def copy_element(typing_context, tile, to, rows, start):
        """Copy one element from global to shared memory."""

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


def narrow(name):
    """Return the function that rounds a float32 to the bits of a number format."""
    if name == "float32":
        return cuda_function(lambda x: x)
    if name == "int8":
        return recurrence.round_to_int8
    rounding = getattr(recurrence, f"round_to_{name}")
    return cuda_function(lambda x: rounding(float_bits(x)))
