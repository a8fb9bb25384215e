"""Rows of bfloat16 by address, for the CPU twin: into the order of the vectors, and back.

Row order. 32 bfloat16 are 16 words; the even elements are the words shifted left by 16, the odd
ones are their upper halves: no shuffle widens a row. So a row of D elements is ceil(D / 32) chunks
of [16 even, 16 odd] floats, zero-padded at the end. `widen` brings q into this order once, and
`natural_order` brings o back. A tail is loaded in pieces: no byte outside a row is touched.

The sizes that shape the code are literal arguments: module-level intrinsics that take their sizes
so stay in the on-disk cache.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ._vector import (
    INT32,
    INT64,
    LANES,
    V16F,
    all_pairs_exact,
    constant,
    load,
    load_chunk,
    shuffle,
    store,
    widen_chunk,
)

CHUNK = 2 * LANES  # elements of a row widened at a time


def padded(size):
    """Return the floats of a row of `size` in row order: whole chunks."""
    return -(-size // CHUNK) * CHUNK


def row_chunks(size):
    """Return (first element, number of elements) of each chunk of a row."""
    return [(c, min(CHUNK, size - c)) for c in range(0, size, CHUNK)]


@intrinsic(prefer_literal=True)
def widen(typing_context, row, out, size):
    """Widen a bfloat16 row [size] into floats in row order, zero-padded to whole chunks."""
    count = size.literal_value

    def codegen(context, builder, signature, args):
        for first, length in row_chunks(count):
            halves = widen_chunk(builder, load_chunk(builder, args[0], 2 * first, length))
            for half, vector in enumerate(halves):
                store(builder, vector, args[1], 4 * (first + LANES * half))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, size), codegen


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
            words = load_chunk(builder, args[0], 2 * first, length)
            store(builder, words, args[1], 2 * first)
            tame = builder.and_(tame, all_pairs_exact(builder, words))
        return builder.zext(tame, INT64)

    return types.intp(types.intp, types.intp, size), codegen


@intrinsic(prefer_literal=True)
def natural_order(typing_context, row, out, size):
    """Copy floats in row order into a plain float32 row [size]."""
    count = size.literal_value

    def codegen(context, builder, signature, args):
        low = [i for pair in range(LANES // 2) for i in (pair, pair + LANES)]
        high = [i + LANES // 2 for i in low]
        for first, length in row_chunks(count):
            even = load(builder, args[0], V16F, 4 * first)
            odd = load(builder, args[0], V16F, 4 * (first + LANES))
            for half, lanes in enumerate((low, high)):
                vector = shuffle(builder, even, odd, lanes)
                begin, left = first + LANES * half, length - LANES * half
                if left >= LANES:
                    store(builder, vector, args[1], 4 * begin)
                    continue
                for lane in range(max(left, 0)):
                    element = builder.extract_element(vector, constant(lane))
                    store(builder, element, args[1], 4 * (begin + lane))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, size), codegen


@intrinsic
def load_int32(typing_context, address):
    """Load an int32 from an address."""

    def codegen(context, builder, signature, args):
        return load(builder, args[0], INT32)

    return types.int32(types.intp), codegen


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
