"""The CPU twin's vector building blocks: score a tile, absorb its logits, accumulate its values.

Each is an intrinsic written as LLVM vectors of 16 floats, which LLVM legalises for any CPU. All
take addresses; sizes that shape the code are literals. Rows are in the order that `rows` explains.

Logit order. The query heads of a kv head are cut into head tiles of up to 8, a group of 16 tokens
into token tiles of 2 or 4. With the heads padded to H, a power of two, and T tokens a tile, the
logits of a group are [16 / T, H, T]: vectors of 16 lanes, in each of which a head has the same
lanes. So m, l and the rescale are vectors too, and one exponential serves 8 heads.
"""

from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .. import _plan
from ._formats import FORMATS, Format, load_chunk, widen_chunk
from ._vector import (
    FLOAT,
    INT64,
    LANES,
    V16F,
    V16I,
    constant,
    exp_nonpositive,
    fma,
    lane_sums,
    load,
    maximum,
    pair_dot,
    prefetch,
    shuffle,
    splat,
    splat_constant,
    store,
    tanh,
)
from .rows import padded, row_chunks

GROUP = _plan.GROUP_TOKENS  # as many as a vector has lanes
TILE_HEADS = 8  # query heads in registers at a time
LINE = 64  # bytes of a cache line


def tile_tokens(gqa):
    """Return T, the tokens of a token tile: at most 16 logits of at most 8 heads."""
    return 4 if gqa <= 4 else 2


def head_tiles(gqa):
    """Return the number of head tiles."""
    return -(-gqa // TILE_HEADS)


def padded_heads(heads):
    """Return H, the heads of a tile padded to a power of two."""
    return 1 << (heads - 1).bit_length()


def head_of_lanes(gqa):
    """Return the query head of every lane of m, as [head tiles * 16] ints; padding is head 0."""
    tokens, heads = tile_tokens(gqa), []
    for first in range(0, gqa, TILE_HEADS):
        padded = padded_heads(min(TILE_HEADS, gqa - first))
        heads += [first + lane // tokens % padded for lane in range(LANES)]
    return [head if head < gqa else 0 for head in heads]


def logits_size(gqa):
    """Return the floats of a kv head's logits of one group."""
    return head_tiles(gqa) * padded_heads(min(gqa, TILE_HEADS)) * GROUP


@intrinsic(prefer_literal=True)
def score(typing_context, q, pairs, rows, ahead, offset, tile, logits, gqa, size, format, dot):
    """Score a token tile: q . k for all query heads of a kv head.

    Parameters
    ----------
    q : address of float32 [gqa, padded size], row order
    pairs : address of bfloat16 [gqa, padded size]: q for `pair_dot`, or 0 to multiply in float32
    rows : address of int64 [T], addresses of K rows
    ahead : address of int64 [T], addresses of rows to prefetch meanwhile
    offset : bytes from a row's address to this kv head
    tile : index of the token tile in its group
    logits : address of the group's logits, float32 [head tiles, 16 / T, H, T]
    gqa, size, format, dot : literal; query heads, head_dim, that of K, whether to use `pair_dot`

    Notes
    -----
    Products and sums in float32, one accumulator per lane: each logit sums 2 * ceil(D / 32) terms
    in sequence, then 16 in a tree.
    """
    num_heads, columns = gqa.literal_value, size.literal_value
    row_size, stored = padded(columns), FORMATS[format.literal_value]

    def emit(builder, args, base, itemsize, multiply):
        rows, ahead, offset, tile, logits = args[2:7]
        tokens = tile_tokens(num_heads)
        k_rows = [_row_address(builder, rows, offset, t) for t in range(tokens)]
        lines = _line_addresses(builder, ahead, offset, tokens, stored.itemsize * columns)
        if num_heads > TILE_HEADS:  # the code of a head tile runs several times
            while lines:
                prefetch(builder, *lines.pop())
        for head_tile, heads in _head_tiles(builder, num_heads):
            lanes = padded_heads(heads) * tokens
            to = _element(builder, logits, head_tile, 4 * TILE_HEADS * GROUP)
            to = _element(builder, to, tile, 4 * lanes)
            query = _element(builder, base, head_tile, itemsize * TILE_HEADS * row_size)
            heads_at = [
                builder.add(query, constant(itemsize * row_size * h, INT64)) for h in range(heads)
            ]
            sums = _score_heads(builder, heads_at, k_rows, lines, (columns, stored), multiply)
            store(builder, shuffle(builder, sums, sums, range(lanes)), to, 0)

    def codegen(context, builder, signature, args):
        q, pairs = args[:2]
        if dot.literal_value:
            packed = builder.icmp_unsigned("!=", pairs, constant(0, INT64))
            with builder.if_else(packed) as (then, otherwise):
                with then:
                    emit(builder, args, pairs, 2, _multiply_pairs)
                with otherwise:
                    emit(builder, args, q, 4, _multiply_floats)
        else:
            emit(builder, args, q, 4, _multiply_floats)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 7, gqa, size, format, dot), codegen


def _score_heads(builder, heads, k_rows, lines, row, multiply):
    """Score a token tile for up to 8 heads, the sums in registers; prefetch in between."""
    columns, stored = row
    chunks = row_chunks(columns)
    per_chunk = -(-len(lines) // len(chunks))
    sums = [[None] * len(k_rows) for _ in heads]
    for c, (first, length) in enumerate(chunks):
        for line in lines[c * per_chunk : (c + 1) * per_chunk]:
            prefetch(builder, *line)
        keys = [load_chunk(builder, row, first, length, stored) for row in k_rows]
        multiply(builder, heads, first, keys, stored, sums)
    return lane_sums(builder, [x for row in sums for x in row])


def _multiply_floats(builder, heads, first, keys, stored, sums):
    """Add a chunk's products in float32; the heads' rows are in row order."""
    keys = [widen_chunk(builder, chunk, stored) for chunk in keys]
    for head, q in enumerate(heads):
        for half in range(2):
            query = load(builder, q, V16F, 4 * (first + LANES * half))
            for token, key in enumerate(keys):
                sums[head][token] = fma(builder, query, key[half], sums[head][token])


def _multiply_pairs(builder, heads, first, keys, stored, sums):
    """Add a chunk's products of bfloat16 pairs; the heads' rows are bfloat16."""
    keys = [builder.bitcast(chunk, V16I) for chunk in keys]
    for head, q in enumerate(heads):
        query = load(builder, q, V16I, 2 * first)
        for token, key in enumerate(keys):
            sums[head][token] = pair_dot(builder, query, key, sums[head][token])


CAPPED, BIASED, SCALED = 1, 2, 4  # options of `absorb`: softcap, ALiBi, scales by token


@intrinsic(prefer_literal=True)
def absorb(
    typing_context, logits, count, m, l, rescale, scale, cap, slopes, distance, scales, gqa, options
):
    """Absorb the logits of a group of 16 tokens into (m, l), all query heads of a kv head.

    Parameters
    ----------
    logits : address of float32 [head tiles, 16 / T, H, T]; becomes the weights exp(s - m_new)
    count : int32, valid tokens of the group, 1 to 16; the others get weight 0
    m : address of float32 [head tiles, 16], running maximum, in every lane of a head; updated
    l : address of float32 [head tiles, 16], running sum, by lane; updated
    rescale : address of float32 [head tiles, 16]; receives exp(m_old - m_new), the factor for o
    scale : float32, factor of the logits
    cap : float32, the softcap
    slopes : address of float32 [head tiles, 16], ALiBi's slope in every lane of a head
    distance : int32, position of the group's first token less the query's
    scales : address of float32 [2, 16], factors of the tokens' keys and values
    gqa, options : literal; query heads, which of the four above are used

    Notes
    -----
    exp is a polynomial after an exact reduction: within 2 ulp, 0 below 2^-126.
    """
    num_heads, used = gqa.literal_value, options.literal_value
    tokens = tile_tokens(num_heads)

    def codegen(context, builder, signature, args):
        logits, count, m, l, rescale, scale, cap, slopes, distance, scales = args[:10]
        scale, cap, count, distance = (splat(builder, x) for x in (scale, cap, count, distance))
        for head_tile, heads in _head_tiles(builder, num_heads):
            at = _element(builder, logits, head_tile, 4 * TILE_HEADS * GROUP)
            state = [_element(builder, x, head_tile, 64) for x in (m, l, rescale)]
            shape = _Shape(scale, cap, distance, scales, used)
            if used & BIASED:
                slope = load(builder, _element(builder, slopes, head_tile, 64), V16F)
                shape = shape._replace(slope=slope)
            _absorb_heads(builder, at, count, state, heads, tokens, shape)
        return context.get_dummy_value()

    inputs = (types.intp, types.int32, *[types.intp] * 3, types.float32, types.float32)
    inputs += (types.intp, types.int32, types.intp)
    return types.void(*inputs, gqa, options), codegen


class _Shape(NamedTuple):
    """What makes a logit of a product q . k."""

    scale: ir.Value  # 16 floats, as are cap and slope
    cap: ir.Value
    distance: ir.Value  # 16 ints
    scales: ir.Value  # address of [2, 16]
    used: int
    slope: ir.Value | None = None

    def logit(self, builder, product, position):
        """Scale, cap and bias the products of 16 tokens."""
        scale = self.scale
        if self.used & SCALED:
            scale = builder.fmul(scale, self.token_scale(builder, 0, position))
        s = builder.fmul(product, scale)
        if self.used & CAPPED:
            s = builder.fmul(tanh(builder, builder.fdiv(s, self.cap)), self.cap)
        if self.used & BIASED:
            distance = builder.add(ir.Constant(V16I, position), self.distance)
            s = fma(builder, self.slope, builder.sitofp(distance, V16F), s)
        return s

    def token_scale(self, builder, which, position):
        """Pick the scales of tokens' keys (0) or values (1) by lane."""
        scales = load(builder, self.scales, V16F, 64 * which)
        return shuffle(builder, scales, scales, position)


def _absorb_heads(builder, logits, count, state, heads, tokens, shape):
    """Absorb a group's logits for one head tile."""
    at_m, at_l, at_r = state
    minus_inf = splat_constant(float("-inf"))
    width = padded_heads(heads) * tokens  # lanes of one token tile
    m_old = load(builder, at_m, V16F)
    m_new, scores, positions = m_old, [], []
    for vector in range(padded_heads(heads)):
        first = vector * GROUP // padded_heads(heads)
        position = [first + lane // width * tokens + lane % tokens for lane in range(LANES)]
        positions.append(position)
        valid = builder.icmp_signed("<", ir.Constant(V16I, position), count)
        s = shape.logit(builder, load(builder, logits, V16F, 64 * vector), position)
        scores.append(builder.select(valid, s, minus_inf))
        m_new = maximum(builder, scores[-1], m_new)
    for step in _head_steps(width, tokens):
        m_new = maximum(builder, m_new, _rotate(builder, m_new, step))
    # While m is -inf subtract 0: -inf - -inf is NaN.
    unseen = builder.fcmp_ordered("==", m_new, minus_inf)
    offset = builder.select(unseen, splat_constant(0.0), m_new)
    factor = exp_nonpositive(builder, builder.fsub(m_old, offset))
    weights = [exp_nonpositive(builder, builder.fsub(s, offset)) for s in scores]
    for vector, (weight, position) in enumerate(zip(weights, positions, strict=True)):
        if shape.used & SCALED:
            weight = builder.fmul(weight, shape.token_scale(builder, 1, position))
        store(builder, weight, logits, 64 * vector)
    while len(weights) > 1:
        weights = [builder.fadd(x, y) for x, y in zip(weights[::2], weights[1::2], strict=True)]
    store(builder, fma(builder, load(builder, at_l, V16F), factor, weights[0]), at_l, 0)
    store(builder, m_new, at_m, 0)
    store(builder, factor, at_r, 0)


@intrinsic(prefer_literal=True)
def accumulate(typing_context, p, first, rows, ahead, offset, rescale, o, gqa, size, format, count):
    """Accumulate values: o = o * rescale + the sum over tokens of p * v, all heads of a kv head.

    Parameters
    ----------
    p : address of the group's weights, float32 [head tiles, 16 / T, H, T]
    first : the first token in the group, a multiple of T unless count is 1
    rows : address of int64 [count], addresses of V rows
    ahead : address of int64 [count], addresses of rows to prefetch meanwhile
    offset : bytes from a row's address to this kv head
    rescale : address of float32 [head tiles, 16]
    o : address of float32 [gqa, padded size], row order; updated
    gqa, size, format, count : literal; query heads, head_dim and format of v, tokens (1, or a
        multiple of T)

    Notes
    -----
    The columns are cut so that heads * columns fit 16 registers.
    """
    num_heads, columns, num_rows = (x.literal_value for x in (gqa, size, count))
    tokens, stored = tile_tokens(num_heads), FORMATS[format.literal_value]

    def codegen(context, builder, signature, args):
        p, first, rows, ahead, offset, rescale, o = args[:7]
        tile = builder.udiv(first, constant(tokens, INT64))
        p = _element(builder, p, builder.urem(first, constant(tokens, INT64)), 4)
        chunks = row_chunks(columns)
        for head_tile, heads in _head_tiles(builder, num_heads):
            at_p = _element(builder, p, head_tile, 4 * TILE_HEADS * GROUP)
            at_p = _element(builder, at_p, tile, 4 * padded_heads(heads) * tokens)
            at_r = _element(builder, rescale, head_tile, 64)
            at_o = _element(builder, o, head_tile, 4 * TILE_HEADS * padded(columns))
            width = max(1, 8 // heads)
            for c in range(0, len(chunks), width):
                cut = _Cut(heads, tokens, chunks[c : c + width], padded(columns), stored)
                sums = _load_sums(builder, at_o, at_r, cut)
                with cgutils.for_range(builder, constant(-(-num_rows // tokens), INT64)) as turn:
                    weights = _element(builder, at_p, turn.index, 4 * cut.heads_padded * tokens)
                    here, there = (
                        _element(builder, x, turn.index, 8 * tokens) for x in (rows, ahead)
                    )
                    for t in range(min(tokens, num_rows)):
                        row, next_row = (_row_address(builder, x, offset, t) for x in (here, there))
                        _accumulate_token(builder, weights, t, row, next_row, sums, cut)
                for place, total in sums.items():
                    store(builder, builder.load(total), at_o, place)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 7, gqa, size, format, count), codegen


class _Cut(NamedTuple):
    """A few chunks of columns whose sums, for all heads of a tile, fit the registers."""

    heads: int
    tokens: int  # of a token tile
    chunks: list[tuple[int, int]]
    row_size: int  # of o, padded
    stored: Format

    @property
    def heads_padded(self):
        return padded_heads(self.heads)

    def place(self, head, first, half):
        """Return the byte offset in o of 16 sums."""
        return 4 * (head * self.row_size + first + LANES * half)


def _load_sums(builder, o, rescale, cut):
    """Load and rescale the sums of a cut; LLVM turns the slots into registers."""
    sums = {}
    for head in range(cut.heads):
        factor = splat(builder, load(builder, rescale, FLOAT, 4 * cut.tokens * head))
        for first, _ in cut.chunks:
            for half in range(2):
                place = cut.place(head, first, half)
                sums[place] = cgutils.alloca_once(builder, V16F)
                builder.store(builder.fmul(load(builder, o, V16F, place), factor), sums[place])
    return sums


def _accumulate_token(builder, p, token, row, next_row, sums, cut):
    """Add p * v of one token to the sums of a cut."""
    weights = [
        splat(builder, load(builder, p, FLOAT, 4 * (cut.tokens * head + token)))
        for head in range(cut.heads)
    ]
    begin, end = (cut.stored.itemsize * x for x in (cut.chunks[0][0], sum(cut.chunks[-1])))
    for line in range(-(-begin // LINE) * LINE, end, LINE):
        prefetch(builder, next_row, line)
    for first, length in cut.chunks:
        chunk = load_chunk(builder, row, first, length, cut.stored)
        values = widen_chunk(builder, chunk, cut.stored)
        for half, value in enumerate(values):
            for head, weight in enumerate(weights):
                slot = sums[cut.place(head, first, half)]
                builder.store(fma(builder, weight, value, builder.load(slot)), slot)


@intrinsic(prefer_literal=True)
def store_state(typing_context, m, l, out_m, out_l, gqa):
    """Reduce (m, l) over the lanes of each head, in a fixed tree, into plain float32 [gqa]."""
    num_heads = gqa.literal_value
    tokens = tile_tokens(num_heads)

    def codegen(context, builder, signature, args):
        for head_tile, heads in _head_tiles(builder, num_heads):
            at_m, at_l = (_element(builder, x, head_tile, 64) for x in args[:2])
            to_m, to_l = (_element(builder, x, head_tile, 4 * TILE_HEADS) for x in args[2:4])
            largest, total = load(builder, at_m, V16F), load(builder, at_l, V16F)
            for step in _head_steps(padded_heads(heads) * tokens, tokens):
                total = builder.fadd(total, _rotate(builder, total, step))
            for head in range(heads):
                for vector, to in ((largest, to_m), (total, to_l)):
                    element = builder.extract_element(vector, constant(head * tokens))
                    store(builder, element, to, 4 * head)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4, gqa), codegen


def _element(builder, base, index, itemsize):
    """Return base + index * itemsize."""
    return builder.add(base, builder.mul(index, constant(itemsize, INT64)))


def _rotate(builder, x, step):
    """Exchange lanes that differ in one bit of their number."""
    return shuffle(builder, x, x, [lane ^ step for lane in range(LANES)])


def _head_steps(width, tokens):
    """Return the lane bits that a head's lanes differ in, for token tiles of `width` lanes."""
    return [step for step in (1, 2, 4, 8) if step < tokens or step >= width]


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


def _row_address(builder, rows, offset, token):
    """Load a row's address and step to one kv head."""
    return builder.add(load(builder, rows, INT64, 8 * token), offset)


def _line_addresses(builder, rows, offset, tokens, row_bytes):
    """Return (address, offset) of every cache line of some rows."""
    addresses = [_row_address(builder, rows, offset, t) for t in range(tokens)]
    return [(row, line) for row in addresses for line in range(0, row_bytes, LINE)]
