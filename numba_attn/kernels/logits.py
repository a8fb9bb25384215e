"""The logits of a group of 16 tokens, for the CPU twin: their order, and the softmax over them.

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
from ._vector import (
    INT64,
    LANES,
    V16F,
    V16I,
    constant,
    exp_nonpositive,
    fma,
    load,
    maximum,
    shuffle,
    splat,
    splat_constant,
    store,
    tanh,
)

GROUP = _plan.GROUP_TOKENS  # as many as a vector has lanes
TILE_HEADS = 8  # query heads in registers at a time
CAPPED, BIASED, SCALED = 1, 2, 4  # options of `absorb`: softcap, ALiBi, scales by token


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
        for head_tile, heads in each_head_tile(builder, num_heads):
            at = element_at(builder, logits, head_tile, 4 * TILE_HEADS * GROUP)
            state = [element_at(builder, x, head_tile, 64) for x in (m, l, rescale)]
            shape = _Shape(scale, cap, distance, scales, used)
            if used & BIASED:
                slope = load(builder, element_at(builder, slopes, head_tile, 64), V16F)
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
def store_state(typing_context, m, l, out_m, out_l, gqa):
    """Reduce (m, l) over the lanes of each head, in a fixed tree, into plain float32 [gqa]."""
    num_heads = gqa.literal_value
    tokens = tile_tokens(num_heads)

    def codegen(context, builder, signature, args):
        for head_tile, heads in each_head_tile(builder, num_heads):
            at_m, at_l = (element_at(builder, x, head_tile, 64) for x in args[:2])
            to_m, to_l = (element_at(builder, x, head_tile, 4 * TILE_HEADS) for x in args[2:4])
            largest, total = load(builder, at_m, V16F), load(builder, at_l, V16F)
            for step in _head_steps(padded_heads(heads) * tokens, tokens):
                total = builder.fadd(total, _rotate(builder, total, step))
            for head in range(heads):
                for vector, to in ((largest, to_m), (total, to_l)):
                    element = builder.extract_element(vector, constant(head * tokens))
                    store(builder, element, to, 4 * head)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4, gqa), codegen


def element_at(builder, base, index, itemsize):
    """Return base + index * itemsize."""
    return builder.add(base, builder.mul(index, constant(itemsize, INT64)))


def _rotate(builder, x, step):
    """Exchange lanes that differ in one bit of their number."""
    return shuffle(builder, x, x, [lane ^ step for lane in range(LANES)])


def _head_steps(width, tokens):
    """Return the lane bits that a head's lanes differ in, for token tiles of `width` lanes."""
    return [step for step in (1, 2, 4, 8) if step < tokens or step >= width]


def each_head_tile(builder, num_heads):
    """Yield (index, heads) of the head tiles; the full ones are one loop in the code."""
    full, rest = divmod(num_heads, TILE_HEADS)
    if full > 1:
        with cgutils.for_range(builder, constant(full, INT64)) as loop:
            yield loop.index, TILE_HEADS
    elif full:
        yield constant(0, INT64), TILE_HEADS
    if rest:
        yield constant(full, INT64), rest
