"""The CPU twin's vector building blocks: score a tile, absorb its logits, accumulate its values.

Each is an intrinsic written as LLVM vectors of 16 floats, which LLVM legalises for any CPU. All
take addresses; sizes that shape the code are literals (module-level intrinsics whose sizes are
literal arguments stay in the on-disk cache).

Lane order. 32 bfloat16 are 16 words; the even elements are the words shifted left by 16, the odd
ones are their upper halves: no shuffle widens a row. So a row of D elements is ceil(D / 32) chunks
of [16 even, 16 odd] floats, zero-padded at the end. `widen` brings q into this order once, and
`narrow` brings o back. A tail is loaded in narrower pieces: no byte outside a row is touched.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ._vector import (
    FLOAT,
    INT64,
    LANES,
    V16F,
    constant,
    exp_nonpositive,
    fma,
    horizontal_max,
    lane_sums,
    load,
    load_chunk,
    maximum,
    prefetch,
    shuffle,
    splat,
    splat_constant,
    store,
    widen_chunk,
)

CHUNK = 2 * LANES  # elements of a row widened at a time
TILE_HEADS = 8  # query heads in registers at a time
LINE = 64  # bytes of a cache line


def padded(size):
    """Return the floats of a row of `size` in lane order: whole chunks."""
    return -(-size // CHUNK) * CHUNK


def tile_tokens(gqa):
    """Return the tokens of a score tile: at most 16 logits of at most 8 heads."""
    return 4 if gqa <= 4 else 2


def _chunks(size):
    """Return (first element, number of elements) of each chunk of a row."""
    return [(c, min(CHUNK, size - c)) for c in range(0, size, CHUNK)]


@intrinsic(prefer_literal=True)
def widen(typing_context, row, out, size):
    """Widen a bfloat16 row [size] into floats in lane order, zero-padded to whole chunks."""
    count = size.literal_value

    def codegen(context, builder, signature, args):
        for first, length in _chunks(count):
            halves = widen_chunk(builder, load_chunk(builder, args[0], 2 * first, length))
            for half, vector in enumerate(halves):
                store(builder, vector, args[1], 4 * (first + LANES * half))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, size), codegen


@intrinsic(prefer_literal=True)
def natural_order(typing_context, row, out, size):
    """Copy floats in lane order into a plain float32 row [size]."""
    count = size.literal_value

    def codegen(context, builder, signature, args):
        low = [i for pair in range(LANES // 2) for i in (pair, pair + LANES)]
        high = [i + LANES // 2 for i in low]
        for first, length in _chunks(count):
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


@intrinsic(prefer_literal=True)
def score(typing_context, q, rows, ahead, offset, logits, gqa, size):
    """Score a tile of tokens: q . k for all query heads of a kv head.

    Parameters
    ----------
    q : address of float32 [gqa, padded size], lane order
    rows : address of int64 [tile_tokens(gqa)], addresses of K rows
    ahead : address of as many int64, addresses of rows to prefetch meanwhile
    offset : bytes from a row's address to this kv head
    logits : address of float32 [head tiles, 16 / tokens, 16]; vector i of a head tile is for the
        i-th token tile, so the caller adds 64 bytes a tile. Lane g * tokens + t is head g, token t.
    gqa, size : literal; query heads, head_dim

    Notes
    -----
    Products and sums in float32 (fma), one accumulator per lane: each logit sums 2 * ceil(D / 32)
    terms in sequence, then 16 in a tree.
    """
    num_heads, columns = gqa.literal_value, size.literal_value
    tokens = tile_tokens(num_heads)

    def codegen(context, builder, signature, args):
        q, rows, ahead, offset, logits = args[:5]
        k_rows = _row_addresses(builder, rows, offset, tokens)
        lines = _line_addresses(builder, ahead, offset, tokens, 2 * columns)
        for tile, heads in _head_tiles(builder, num_heads):
            query = _element(builder, q, tile, 4 * TILE_HEADS * padded(columns))
            to = _element(builder, logits, tile, 64 * (LANES // tokens))
            _score_heads(builder, query, k_rows, lines, to, heads, columns)
            lines = []
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5, gqa, size), codegen


def _score_heads(builder, q, k_rows, lines, logits, heads, columns):
    """Score a tile of tokens for up to 8 heads, the sums in registers; prefetch in between."""
    chunks = _chunks(columns)
    per_chunk = -(-len(lines) // len(chunks))
    sums = [[None] * len(k_rows) for _ in range(heads)]
    for c, (first, length) in enumerate(chunks):
        for line in lines[c * per_chunk : (c + 1) * per_chunk]:
            prefetch(builder, *line)
        keys = [widen_chunk(builder, load_chunk(builder, row, 2 * first, length)) for row in k_rows]
        for head in range(heads):
            for half in range(2):
                at = 4 * (head * padded(columns) + first + LANES * half)
                query = load(builder, q, V16F, at)
                for token, key in enumerate(keys):
                    sums[head][token] = fma(builder, query, key[half], sums[head][token])
    store(builder, lane_sums(builder, [x for row in sums for x in row]), logits, 0)


@intrinsic(prefer_literal=True)
def absorb(typing_context, logits, scale, count, m, l, rescale, p, tokens):
    """Absorb the logits of one head's group of 16 tokens into its (m, l).

    Parameters
    ----------
    logits : address of float32 [16 / tokens] pieces of `tokens` floats, 64 bytes apart
    scale : float32, factor of the logits
    count : int32, valid tokens of the group, 1 to 16
    m : address of float32, running maximum; updated
    l : address of float32 [16], running sum by lane; updated
    rescale : address of float32; receives exp(m_old - m_new), the factor for o
    p : address of float32 [16]; receives exp(s - m_new), 0 in the invalid lanes
    tokens : literal, tokens of a score tile

    Notes
    -----
    exp is exp2((s - m) * log2(e)) by a polynomial: within 2 ulp, 0 below 2^-126.
    """
    num_tokens = tokens.literal_value

    def codegen(context, builder, signature, args):
        logits, scale, count, m, l, rescale, p = args[:7]
        pieces = [
            load(builder, logits, ir.VectorType(FLOAT, num_tokens), 64 * i)
            for i in range(LANES // num_tokens)
        ]
        while len(pieces) > 1:
            width = range(2 * pieces[0].type.count)
            pieces = [shuffle(builder, *pieces[i : i + 2], width) for i in range(0, len(pieces), 2)]
        s = builder.fmul(pieces[0], splat(builder, scale))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), list(range(LANES)))
        valid = builder.icmp_signed("<", lanes, splat(builder, count))
        minus_inf = splat_constant(float("-inf"))
        s = builder.select(valid, s, minus_inf)
        m_old = splat(builder, load(builder, m, FLOAT))
        m_new = horizontal_max(builder, maximum(builder, s, m_old))
        # While m is -inf subtract 0: -inf - -inf is NaN.
        unseen = builder.fcmp_ordered("==", m_new, minus_inf)
        offset = builder.select(unseen, splat_constant(0.0), m_new)
        factor = exp_nonpositive(builder, builder.fsub(m_old, offset))
        weights = exp_nonpositive(builder, builder.fsub(s, offset))
        store(builder, weights, p, 0)
        store(builder, fma(builder, load(builder, l, V16F), factor, weights), l, 0)
        store(builder, builder.extract_element(m_new, constant(0)), m, 0)
        store(builder, builder.extract_element(factor, constant(0)), rescale, 0)
        return context.get_dummy_value()

    inputs = (types.intp, types.float32, types.int32)
    return types.void(*inputs, *[types.intp] * 4, tokens), codegen


@intrinsic(prefer_literal=True)
def accumulate(typing_context, p, rows, ahead, offset, count, rescale, o, gqa, size, step):
    """Accumulate values: o = o * rescale + the sum over tokens of p * v, all heads of a kv head.

    Parameters
    ----------
    p : address of float32 [gqa, 16], the tokens' weights
    rows : address of int64 [count], addresses of V rows
    ahead : address of int64 [count], addresses of rows to prefetch meanwhile
    offset : bytes from a row's address to this kv head
    count : intp, number of tokens, a multiple of `step`
    rescale : address of float32 [gqa]
    o : address of float32 [gqa, padded size], lane order; updated
    gqa, size, step : literal; query heads, head_dim of v, tokens per turn of the loop

    Notes
    -----
    The columns are cut so that heads * columns fit 16 registers; each cut is a loop over tokens.
    """
    num_heads, columns, per_turn = (x.literal_value for x in (gqa, size, step))

    def codegen(context, builder, signature, args):
        p, rows, ahead, offset, count, rescale, o = args[:7]
        chunks = _chunks(columns)
        for tile, heads in _head_tiles(builder, num_heads):
            tile_args = (
                _element(builder, p, tile, 4 * TILE_HEADS * LANES),
                rows,
                ahead,
                offset,
                count,
                _element(builder, rescale, tile, 4 * TILE_HEADS),
                _element(builder, o, tile, 4 * TILE_HEADS * padded(columns)),
            )
            width = max(1, 8 // heads)
            for first in range(0, len(chunks), width):
                cut = chunks[first : first + width]
                _accumulate_columns(builder, tile_args, heads, padded(columns), cut, per_turn)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 7, gqa, size, step), codegen


def _accumulate_columns(builder, args, num_heads, padded, chunks, per_turn):
    """Loop over the tokens for a few chunks of columns, the sums of all heads in registers."""
    p, rows, ahead, offset, count, rescale, o = args
    places = [  # of each sum in o: head by head, chunk by chunk, even half then odd half
        4 * (head * padded + first + LANES * half)
        for head in range(num_heads)
        for first, _ in chunks
        for half in range(2)
    ]
    factors = [splat(builder, load(builder, rescale, FLOAT, 4 * g)) for g in range(num_heads)]
    start = [
        builder.fmul(load(builder, o, V16F, place), factors[i // (2 * len(chunks))])
        for i, place in enumerate(places)
    ]
    before = builder.block
    loop, after = (builder.append_basic_block(name) for name in ("tokens", "stored"))
    builder.branch(loop)
    builder.position_at_end(loop)
    token = builder.phi(INT64)
    token.add_incoming(constant(0, INT64), before)
    phis = [builder.phi(V16F) for _ in start]
    sums = list(phis)
    for turn in range(per_turn):
        here = builder.add(token, constant(turn, INT64))
        _accumulate_token(builder, (p, rows, ahead, offset), here, sums, num_heads, chunks)
    following = builder.add(token, constant(per_turn, INT64))
    token.add_incoming(following, builder.block)
    for phi, first, last in zip(phis, start, sums, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(last, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    builder.position_at_end(after)
    for place, value in zip(places, sums, strict=True):
        store(builder, value, o, place)


def _accumulate_token(builder, args, token, sums, num_heads, chunks):
    """Add p * v of one token to the sums, in place."""
    p, rows, ahead, offset = args
    row, row_ahead = (
        builder.add(load(builder, _element(builder, base, token, 8), INT64), offset)
        for base in (rows, ahead)
    )
    weights = _element(builder, p, token, 4)
    weights = [splat(builder, load(builder, weights, FLOAT, 64 * g)) for g in range(num_heads)]
    end = chunks[-1][0] + chunks[-1][1]
    for line in range(2 * chunks[0][0], 2 * end, LINE):
        prefetch(builder, row_ahead, line)
    for c, (first, length) in enumerate(chunks):
        values = widen_chunk(builder, load_chunk(builder, row, 2 * first, length))
        for half, value in enumerate(values):
            for head in range(num_heads):
                i = (head * len(chunks) + c) * 2 + half
                sums[i] = fma(builder, weights[head], value, sums[i])


@intrinsic
def lanes_total(typing_context, vector):
    """Sum the float32 [16] at an address, in a fixed tree."""

    def codegen(context, builder, signature, args):
        total = lane_sums(builder, [load(builder, args[0], V16F)])
        return builder.extract_element(total, constant(0))

    return types.float32(types.intp), codegen


@intrinsic
def load_int32(typing_context, address):
    """Load an int32 from an address."""

    def codegen(context, builder, signature, args):
        return load(builder, args[0], ir.IntType(32))

    return types.int32(types.intp), codegen


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
        pointer = builder.inttoptr(args[0], INT64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "monotonic")

    return types.intp(types.intp, types.intp), codegen


def _element(builder, base, index, itemsize):
    """Return base + index * itemsize."""
    return builder.add(base, builder.mul(index, constant(itemsize, INT64)))


def _head_tiles(builder, num_heads):
    """Yield (index, heads) of the head tiles; the full ones are one loop in the code."""
    full, rest = divmod(num_heads, TILE_HEADS)
    if full > 1:
        with cgutils.for_range(builder, constant(full, INT64)) as loop:
            yield loop.index, TILE_HEADS
    elif full:
        yield constant(0, INT64), TILE_HEADS
    if rest:
        yield constant(full, INT64), rest


def _row_addresses(builder, rows, offset, tokens):
    """Load the rows' addresses and step to one kv head."""
    return [builder.add(load(builder, rows, INT64, 8 * t), offset) for t in range(tokens)]


def _line_addresses(builder, rows, offset, tokens, row_bytes):
    """Return (address, offset) of every cache line of some rows."""
    return [
        (row, line)
        for row in _row_addresses(builder, rows, offset, tokens)
        for line in range(0, row_bytes, LINE)
    ]
