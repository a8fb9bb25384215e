"""The CPU twin's vector building blocks that read K and V: score a tile, accumulate its values.

Each is an intrinsic written as LLVM vectors of 16 floats, which LLVM legalises for any CPU. All
take addresses; sizes that shape the code are literals. Rows are in the order that `rows` explains,
logits in that of `logits`, which has what comes in between.
"""

from typing import NamedTuple

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ._formats import FORMATS, Format, load_chunk, pair_chunk, widen_chunk
from ._vector import (
    FLOAT,
    INT64,
    LANES,
    V16F,
    V16I,
    constant,
    fma,
    lane_sums,
    load,
    pair_dot,
    prefetch,
    shuffle,
    splat,
    store,
)
from .logits import GROUP, TILE_HEADS, each_head_tile, element_at, padded_heads, tile_tokens
from .rows import padded, row_chunks

LINE = 64  # bytes of a cache line


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
        for head_tile, heads in each_head_tile(builder, num_heads):
            lanes = padded_heads(heads) * tokens
            to = element_at(builder, logits, head_tile, 4 * TILE_HEADS * GROUP)
            to = element_at(builder, to, tile, 4 * lanes)
            query = element_at(builder, base, head_tile, itemsize * TILE_HEADS * row_size)
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
    keys = [pair_chunk(builder, chunk, stored) for chunk in keys]
    for head, q in enumerate(heads):
        query = load(builder, q, V16I, 2 * first)
        for token, key in enumerate(keys):
            sums[head][token] = pair_dot(builder, query, key, sums[head][token])


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
        p = element_at(builder, p, builder.urem(first, constant(tokens, INT64)), 4)
        chunks = row_chunks(columns)
        for head_tile, heads in each_head_tile(builder, num_heads):
            at_p = element_at(builder, p, head_tile, 4 * TILE_HEADS * GROUP)
            at_p = element_at(builder, at_p, tile, 4 * padded_heads(heads) * tokens)
            at_r = element_at(builder, rescale, head_tile, 64)
            at_o = element_at(builder, o, head_tile, 4 * TILE_HEADS * padded(columns))
            width = max(1, 8 // heads)
            for c in range(0, len(chunks), width):
                cut = _Cut(heads, tokens, chunks[c : c + width], padded(columns), stored)
                sums = _load_sums(builder, at_o, at_r, cut)
                with cgutils.for_range(builder, constant(-(-num_rows // tokens), INT64)) as turn:
                    weights = element_at(builder, at_p, turn.index, 4 * cut.heads_padded * tokens)
                    here, there = (
                        element_at(builder, x, turn.index, 8 * tokens) for x in (rows, ahead)
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


def _row_address(builder, rows, offset, token):
    """Load a row's address and step to one kv head."""
    return builder.add(load(builder, rows, INT64, 8 * token), offset)


def _line_addresses(builder, rows, offset, tokens, row_bytes):
    """Return (address, offset) of every cache line of some rows."""
    addresses = [_row_address(builder, rows, offset, t) for t in range(tokens)]
    return [(row, line) for row in addresses for line in range(0, row_bytes, LINE)]
