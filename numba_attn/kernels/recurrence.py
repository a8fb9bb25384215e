"""The scalar recurrence, called by both twins.

A state is ``(m, l, o)``: running maximum, sum of ``exp(s - m)`` and sum of ``exp(s - m) * v``, all
float32 and unnormalised (FlashAttention-2, Dao 2023; Milakov & Gimelshein 2018). The one operation
is *merge*: absorbing a token is merging with its one-token state ``(s, 1, v)``, and so is folding
in a group of tokens, a split or another machine's part. The identity is ``(-inf, 0, 0)``.

Here are its scalar pieces; the twins bring the loops over heads and columns:

    m' = max(m, m2)
    l' = l * exp(m - m') + l2 * exp(m2 - m')
    o' = o * exp(m - m') + o2 * exp(m2 - m')

and where one side is empty the other is copied, bit for bit.
"""

import math

import numpy as np

from ._jit import shared

NEG_INF = np.float32(-np.inf)
ZERO = np.float32(0.0)
ONE = np.float32(1.0)


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
def round_to_bfloat16(bits):
    """Round bits of a float32 to those of the nearest bfloat16, ties to even; NaN stays NaN."""
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x0040)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint16(quiet_nan if is_nan else rounded)
