"""The CPU twin's memory building blocks (scalar for now): loads by address."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def _load(builder, address, element, align):
    value = builder.load(builder.inttoptr(address, element.as_pointer()))
    value.align = align
    return value


@intrinsic
def load_int32(typing_context, address):
    """Load an int32 from an address."""

    def codegen(context, builder, signature, args):
        return _load(builder, args[0], ir.IntType(32), 4)

    return types.int32(types.intp), codegen


@intrinsic
def load_bfloat16(typing_context, address):
    """Load a bfloat16 from an address and widen it."""

    def codegen(context, builder, signature, args):
        wide = builder.zext(_load(builder, args[0], ir.IntType(16), 2), ir.IntType(32))
        shifted = builder.shl(wide, ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(shifted, ir.FloatType())

    return types.float32(types.intp), codegen


@intrinsic
def float_bits(typing_context, x):
    """Return the bits of a float32 as uint32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def fetch_add(typing_context, address, step):
    """Add to an int64 in memory, atomically; return what it was."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "monotonic")

    return types.intp(types.intp, types.intp), codegen
