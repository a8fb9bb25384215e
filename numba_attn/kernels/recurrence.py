"""The scalar recurrence, called by both twins.

A state is ``(m, l, o)``: running maximum, sum of ``exp(s - m)`` and sum of ``exp(s - m) * v``, all
float32 and unnormalised (FlashAttention-2, Dao 2023; Milakov & Gimelshein 2018). The one operation
is *merge*: absorbing a token is merging with its one-token state ``(s, 1, v)``, and so is folding
in a group of tokens, a split or another machine's part. The identity is ``(-inf, 0, 0)``.

Here are its scalar pieces; the twins bring the loops over heads and columns:

    m' = max(m, m2)
    l' = l * exp(m - m') + l2 * exp(m2 - m')
    o' = o * exp(m - m') + o2 * exp(m2 - m')

and where one side is empty the other is copied, bit for bit. A sink is one more logit with value 0:
merging with ``(sink, 1, 0)``, at the very end.

Below are the roundings from float32, each to nearest even, by which outputs and pools are written,
and the scale of a token whose numbers are stored in 8 bits.
"""

import math

import numpy as np

from ._jit import shared

NEG_INF = np.float32(-np.inf)
ZERO = np.float32(0.0)
ONE = np.float32(1.0)
FLOAT32_MAX, FLOAT32_NORMAL = np.finfo(np.float32).max, np.finfo(np.float32).tiny
INT8_MIN, INT8_MAX = np.float32(-128.0), np.float32(127.0)
WHOLE = np.float32(1.5 * 2.0**23)  # added to a small number, it leaves no place for a fraction


@shared
def is_empty(m, l):
    """Tell whether a state has absorbed nothing (or only logits of -inf)."""
    return (m == NEG_INF) and (l == ZERO)


@shared
def larger(a, b):
    """Return the larger; `a` where `b` is NaN (`max` would differ between twins)."""
    return b if b > a else a


@shared
def offset(m):
    """Return what to subtract from the logits: `m`, or 0 while `m` is -inf (-inf - -inf is NaN)."""
    return ZERO if m == NEG_INF else m


@shared
def weight(m, m_new):
    """Return exp(m - m_new), the factor that brings a state from maximum `m` to `m_new`."""
    return math.exp(m - offset(m_new))


@shared
def normalise(o, l):
    """Return o / l, and 0 for an empty row."""
    return ZERO if l == ZERO else o / l


@shared
def log_sum_exp(m, l):
    """Return m + log(l), natural logarithm, and -inf for an empty row."""
    return NEG_INF if l == ZERO else m + math.log(l)


@shared
def with_sink(m, l, sink):
    """Merge with the one-token state (sink, 1, 0): return the new m and l, and the factor of o."""
    m_new = larger(m, sink)
    factor = weight(m, m_new)
    return m_new, l * factor + weight(sink, m_new), factor


@shared
def softcapped(s, cap):
    """Return a logit bounded by +-cap: nearly linear around 0."""
    return cap * math.tanh(s / cap)


@shared
def round_to_bfloat16(bits):
    """Round bits of a float32 to those of the nearest bfloat16, ties to even; NaN stays NaN."""
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x0040)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint16(quiet_nan if is_nan else rounded)


@shared
def round_to_float16(bits):
    """Round bits of a float32 to those of the nearest float16; what is too large becomes inf."""
    return np.uint16(
        _round(bits, np.uint32(5), np.uint32(10), np.uint32(0x7C00), np.uint32(0x7E00))
    )


@shared
def round_to_float8_e4m3fn(bits):
    """Round bits of a float32 to those of the nearest float8_e4m3fn; saturates at +-448."""
    return np.uint8(_round(bits, np.uint32(4), np.uint32(3), np.uint32(0x7E), np.uint32(0x7F)))


@shared
def round_to_float8_e5m2(bits):
    """Round bits of a float32 to those of the nearest float8_e5m2; saturates at +-57344."""
    return np.uint8(_round(bits, np.uint32(5), np.uint32(2), np.uint32(0x7B), np.uint32(0x7E)))


@shared
def round_to_int8(x):
    """Round a float32 to the nearest int8, ties to even; saturates, and NaN becomes 0."""
    bounded = np.float32(x)
    if bounded != bounded:
        bounded = ZERO
    elif bounded < INT8_MIN:
        bounded = INT8_MIN
    elif bounded > INT8_MAX:
        bounded = INT8_MAX
    return np.int8((bounded + WHOLE) - WHOLE)


@shared
def token_scale(largest, most):
    """Return the scale that brings numbers of magnitude `largest` to `most`; 1 if all are 0.

    It is a normal, finite float32, so that dividing by it turns no finite number into inf or NaN.
    """
    if largest == ZERO:
        return ONE
    scale = min(np.float32(largest), FLOAT32_MAX) / np.float32(most)
    return max(scale, FLOAT32_NORMAL)


@shared
def scaled_down(x, scale):
    """Return x / scale in float32."""
    return np.float32(x) / np.float32(scale)


@shared
def _round(bits, exponent_bits, mantissa_bits, most, nan):
    """Round bits of a float32 to a format of fewer exponent bits, subnormals included.

    The code `most` stands for all that is larger: that of inf, or of the largest finite number.
    """
    one, fraction_bits = np.uint32(1), np.uint32(23)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    exponent = magnitude >> fraction_bits
    lowest = np.uint32(129) - (one << (exponent_bits - one))  # exponent of the least normal number
    shift = fraction_bits - mantissa_bits
    if exponent >= lowest:
        kept = np.uint32(magnitude - ((lowest - one) << fraction_bits))
    else:
        kept = np.uint32((magnitude & np.uint32(0x007FFFFF)) | np.uint32(0x00800000))
        shift = min(shift + lowest - exponent, np.uint32(25))  # at 25 nothing remains
    half = (one << (shift - one)) - one + ((kept >> shift) & one)
    code = min((kept + half) >> shift, most)
    if magnitude > np.uint32(0x7F800000):
        code = nan
    return code | ((bits >> np.uint32(31)) << (exponent_bits + mantissa_bits))
