"""Rows of numbers by address, for the CPU twin: into the order of the vectors, and back.

Row order. A row of D elements is ceil(D / 32) chunks of two vectors of 16 floats, zero-padded at
the end, in the order that widening gives (`_formats`). `widen` brings q into the order of K once,
and `natural_order` brings o back from that of V. A tail is loaded in pieces: no byte outside a row
is touched.

The sizes that shape the code are literal arguments: module-level intrinsics that take their sizes
so stay in the on-disk cache.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ._formats import BFLOAT16, CHUNK, FORMATS, load_chunk, reorder, widen_chunk
from ._vector import (
    FLOAT,
    INT32,
    INT64,
    LANES,
    V16F,
    V16I,
    all_pairs_exact,
    constant,
    load,
    splat,
    store,
)


def padded(size):
    """Return the floats of a row of `size` in row order: whole chunks."""
    return -(-size // CHUNK) * CHUNK


def row_chunks(size):
    """Return (first element, number of elements) of each chunk of a row."""
    return [(c, min(CHUNK, size - c)) for c in range(0, size, CHUNK)]


@intrinsic(prefer_literal=True)
def widen(typing_context, row, out, size, source, order):
    """Widen a row [size] of format `source` into floats in the row order of format `order`.

    Zero-padded to whole chunks; both formats are places in `_formats.FORMATS`.
    """
    count = size.literal_value
    found, wanted = FORMATS[source.literal_value], FORMATS[order.literal_value]

    def codegen(context, builder, signature, args):
        for first, length in row_chunks(count):
            chunk = load_chunk(builder, args[0], first, length, found)
            halves = widen_chunk(builder, chunk, found)
            halves = reorder(builder, *halves, found.paired, wanted.paired)
            for half, vector in enumerate(halves):
                store(builder, vector, args[1], 4 * (first + LANES * half))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, size, source, order), codegen


@intrinsic(prefer_literal=True)
def pack(typing_context, row, out, size):
    """Copy a bfloat16 row [size], zero-padded to whole chunks; tell (1 or 0) whether it is tame.

    Tame: every element is 0 or of magnitude 2^-126 to 2^60. With such a q, a dot product that
    counts subnormals as 0 is off by less than D * 2^-65. Times a scale of at most 2^16 that is
    nothing that a weight exp(s - m) could show.
    """
    count = size.literal_value

    def codegen(context, builder, signature, args):
        tame = ir.Constant(ir.IntType(1), 1)
        for first, length in row_chunks(count):
            words = load_chunk(builder, args[0], first, length, FORMATS[BFLOAT16])
            words = builder.bitcast(words, V16I)
            store(builder, words, args[1], 2 * first)
            tame = builder.and_(tame, all_pairs_exact(builder, words))
        return builder.zext(tame, INT64)

    return types.intp(types.intp, types.intp, size), codegen


@intrinsic(prefer_literal=True)
def natural_order(typing_context, row, factor, out, size, order):
    """Copy floats times a factor from the row order of format `order` into a plain row [size]."""
    count, paired = size.literal_value, FORMATS[order.literal_value].paired

    def codegen(context, builder, signature, args):
        row, factor, out = args[:3]
        factor = splat(builder, factor)
        for first, length in row_chunks(count):
            halves = [load(builder, row, V16F, 4 * (first + LANES * half)) for half in range(2)]
            for half, vector in enumerate(reorder(builder, *halves, paired, False)):
                vector = builder.fmul(vector, factor)
                begin, left = first + LANES * half, length - LANES * half
                if left >= LANES:
                    store(builder, vector, out, 4 * begin)
                    continue
                for lane in range(max(left, 0)):
                    element = builder.extract_element(vector, constant(lane))
                    store(builder, element, out, 4 * (begin + lane))
        return context.get_dummy_value()

    return types.void(types.intp, types.float32, types.intp, size, order), codegen


@intrinsic
def load_int32(typing_context, address):
    """Load an int32 from an address."""

    def codegen(context, builder, signature, args):
        return load(builder, args[0], INT32)

    return types.int32(types.intp), codegen


@intrinsic
def load_int64(typing_context, address):
    """Load an int64 from an address."""

    def codegen(context, builder, signature, args):
        return load(builder, args[0], INT64)

    return types.int64(types.intp), codegen


@intrinsic
def load_float32(typing_context, address):
    """Load a float32 from an address."""

    def codegen(context, builder, signature, args):
        return load(builder, args[0], FLOAT)

    return types.float32(types.intp), codegen


@intrinsic
def float_bits(typing_context, x):
    """Return the bits of a float32 as uint32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], INT32)

    return types.uint32(types.float32), codegen


@intrinsic
def fetch_add(typing_context, address, step):
    """Add to an int64 in memory, atomically; return what it was."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], INT64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "monotonic")

    return types.intp(types.intp, types.intp), codegen
