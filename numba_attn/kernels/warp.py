"""The CUDA twin's building blocks, each with a version for Numba's simulator.

Kernels call these names and plain ``cuda.*`` only, so that one source compiles for a GPU and runs
in the simulator, which has no warp shuffles, no intrinsics and no aligned shared memory.

LOADERS has one function per number format: it returns element i of an array of the format's bits
as float32, exactly, and NaN for a NaN.
"""

import functools

from .. import _arrays, _device
from .._plan_cuda import WIDE
from . import recurrence
from ._jit import cuda_function

WARP = 32
SIMULATOR = _device.is_simulator()

if SIMULATOR:
    import ctypes

    import numpy as np

    from ._simulator import begun_copies
    from ._simulator import function_cuda as cuda

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

    def blend(x, a, y, b):
        """Return x * a + y * b."""
        return x * a + y * b

    def copy_16_bytes(tile, to, rows, start):
        """Copy 16 bytes of elements from global to shared memory, both aligned to 16 bytes."""
        elements = WIDE // tile.itemsize
        assert to % elements == 0
        for i in range(elements):
            tile[to + i] = rows[start + i]

    def copy_element(tile, to, rows, start):
        """Copy one element from global to shared memory."""
        tile[to] = rows[start]

    def start_copy(tile, to, rows, start):
        """Begin `copy_16_bytes`; it is done when a `waiter` says so, here not before."""
        rows[start + WIDE // tile.itemsize - 1]  # is there
        begun_copies()[-1].append((tile, to, rows, start))

    def end_copies():
        """End a group of copies."""
        begun_copies().append([])

    def waiter(groups):
        """Return the function that waits until at most so many last groups are under way."""

        def wait_for_copies():
            begun = begun_copies()
            while len(begun) - 1 > groups:
                for copy in begun.pop(0):
                    copy_16_bytes(*copy)

        return wait_for_copies

else:
    from llvmlite import ir
    from numba import cuda
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
    F16, F32 = ir.HalfType(), ir.FloatType()
    _16_BYTES = ir.VectorType(I32, 4)
    GLOBAL, SHARED = 1, 3  # address spaces
    ALL_LANES = 0xFFFFFFFF

    def element(context, builder, signature, args, position):
        """Return a pointer to element args[position + 1] of array args[position]."""
        array = context.make_array(signature.args[position])(context, builder, args[position])
        return builder.gep(array.data, [args[position + 1]])

    def _from_bfloat16(builder, bits):
        wide = builder.shl(builder.zext(bits, I32), ir.Constant(I32, 16))
        return builder.bitcast(wide, F32)

    def _from_float16(builder, bits):
        return builder.fpext(builder.bitcast(bits, F16), F32)

    def _from_float32(builder, x):
        return x

    def _from_float8_e4m3fn(builder, bits):
        """Give the bits to a float16, whose exponents begin 8 lower; 0x7F and 0xFF are NaN."""
        wide = builder.shl(builder.sext(bits, I16), ir.Constant(I16, 7))
        half = builder.and_(wide, ir.Constant(I16, 0xBFFF))
        x = builder.fmul(_from_float16(builder, half), ir.Constant(F32, 256.0))
        magnitude = builder.and_(bits, ir.Constant(I8, 0x7F))
        is_nan = builder.icmp_unsigned("==", magnitude, ir.Constant(I8, 0x7F))
        return builder.select(is_nan, ir.Constant(F32, float("nan")), x)

    def _from_float8_e5m2(builder, bits):
        half = builder.shl(builder.zext(bits, I16), ir.Constant(I16, 8))
        return _from_float16(builder, half)

    def _from_int8(builder, bits):
        return builder.sitofp(bits, F32)

    def _loader(widen):
        @intrinsic
        def load(typing_context, bits, i):
            def codegen(context, builder, signature, args):
                return widen(builder, builder.load(element(context, builder, signature, args, 0)))

            return types.float32(bits, types.int64), codegen

        return load

    WIDENERS = {
        "bfloat16": _from_bfloat16,
        "float16": _from_float16,
        "float32": _from_float32,
        "float8_e4m3fn": _from_float8_e4m3fn,
        "float8_e5m2": _from_float8_e5m2,
        "int8": _from_int8,
    }
    LOADERS = {name: _loader(widen) for name, widen in WIDENERS.items()}

    def _load_at(builder, address, type, default):
        """Load from an address in global memory; give the default where the address is 0."""
        before = builder.block
        is_there = builder.icmp_unsigned("!=", address, ir.Constant(I64, 0))
        with builder.if_then(is_there):
            pointer = builder.inttoptr(address, ir.PointerType(type, GLOBAL))
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
            return _load_at(builder, args[0], I32, args[1])

        return types.int64(types.int64, types.int64), codegen

    @intrinsic
    def load_float32(typing_context, address, default):
        """Return the float32 at an address in global memory, or the default where that is 0."""

        def codegen(context, builder, signature, args):
            return _load_at(builder, args[0], F32, args[1])

        return types.float32(types.int64, types.float32), codegen

    @intrinsic
    def float_bits(typing_context, x):
        """Return the bits of a float32 as uint32."""

        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], I32)

        return types.uint32(types.float32), codegen

    @intrinsic
    def divide(typing_context, a, b):
        """Return a // b for a in 0..2^31 - 1 and b in 1..2^31 - 1, without a 64-bit division."""

        def codegen(context, builder, signature, args):
            a, b = (builder.trunc(x, I32) for x in args)
            return builder.zext(builder.udiv(a, b), I64)

        return types.int64(types.int64, types.int64), codegen

    def blended(builder, x, a, y, b):
        """Emit x * a + y * b in two roundings, always the same two."""
        return builder.fma(x, a, builder.fmul(y, b))

    @intrinsic
    def blend(typing_context, x, a, y, b):
        """Return x * a + y * b in two roundings, always the same two."""

        def codegen(context, builder, signature, args):
            return blended(builder, *args)

        return types.float32(*(types.float32,) * 4), codegen

    def copy_at_once(builder, target, source, inside, size):
        """Emit a copy of `size` bytes from a global to a shared address, where `inside`."""
        kind = _16_BYTES if size == WIDE else ir.IntType(8 * size)
        with builder.if_then(inside):
            source = builder.inttoptr(source, ir.PointerType(kind, GLOBAL))
            target = builder.inttoptr(target, ir.PointerType(kind, SHARED))
            builder.store(builder.load(source, align=size), target, align=size)

    def copy_in_time(builder, target, source, inside, size):
        """Emit the begin of such a copy of 16 bytes; a `waiter` waits for it (sm_80 and later)."""
        text = (
            "{ .reg .pred inside; setp.ne.u32 inside, $2, 0; "
            "@inside cp.async.cg.shared.global [$0], [$1], 16; }"
        )
        _emit(builder, text, "r,l,r,", target, source, builder.zext(inside, I32))

    def _emit(builder, text, constraints, *args):
        """Emit one statement of PTX that touches memory."""
        kind = ir.FunctionType(ir.VoidType(), [x.type for x in args])
        statement = ir.InlineAsm(kind, text, f"{constraints}~{{memory}}", side_effect=True)
        builder.call(statement, args)

    def _statement(text):
        """Return the function that is one statement of PTX."""

        @intrinsic
        def run(typing_context):
            def codegen(context, builder, signature, args):
                _emit(builder, text, "")
                return context.get_dummy_value()

            return types.void(), codegen

        return run

    end_copies = _statement("cp.async.commit_group;")  # of a group

    def waiter(groups):
        """Return the function that waits until at most so many last groups are under way."""
        return _statement(f"cp.async.wait_group {groups};")


@functools.cache
def copies_are_asynchronous():
    """Tell whether the device has `start_copy`: from compute capability 8.0 on."""
    return SIMULATOR or cuda.get_current_device().compute_capability >= (8, 0)


def narrow(name):
    """Return the function that rounds a float32 to the bits of a number format."""
    if name == "float32":
        return cuda_function(lambda x: x)
    if name == "int8":
        return recurrence.round_to_int8
    rounding = getattr(recurrence, f"round_to_{name}")
    return cuda_function(lambda x: rounding(float_bits(x)))
