"""torch's scaled dot-product attention, for one query token of each sequence."""

from __future__ import annotations

import numpy as np

from .. import _validate
from .._types import Array
from ..api import paged_attention
from . import _common

_beneath = _common.naming(q="query", k_pool="key", v_pool="value")


def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Array:
    """Attend with one query of each sequence to all of its keys: torch's signature.

    Parameters
    ----------
    query : [b, hq, 1, d]
    key, value : [b, hkv, L, d], [b, hkv, L, dv]
        Nothing is copied, whatever the strides; the last axis must be contiguous.
    attn_mask : None
        Not taken: `numba_attn.paged_attention` has `seq_lens` and `seq_starts` of each sequence.
    dropout_p : float
        0.0 only.
    is_causal : bool
        As in torch, whose triangle begins at the upper left: the one query attends to the first key
        only. A decode step wants False.
    scale : float, optional
        Factor of the logits, ``1 / sqrt(d)`` by default.
    enable_gqa : bool
        Whether hkv may be a divisor of hq, other than hq.

    Returns
    -------
    [b, hq, 1, dv]
        In query's dtype.

    Raises
    ------
    ValueError, TypeError
        For what is not taken, and as `paged_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from numba_attn.compat import scaled_dot_product_attention
    >>> query, key = np.ones((2, 8, 1, 64), np.float16), np.ones((2, 2, 100, 64), np.float16)
    >>> scaled_dot_product_attention(query, key, key, enable_gqa=True).shape
    (2, 8, 1, 64)
    """
    advice = "call numba_attn.paged_attention with seq_lens and seq_starts"
    _common.refuse("attn_mask", attn_mask, "masks are not taken", advice)
    if dropout_p != 0.0:
        raise ValueError(
            f"dropout_p: only 0.0 is taken, got {dropout_p!r}; nothing is dropped in decoding"
        )
    _validate.flag("is_causal", is_causal)
    for name, array in (("query", query), ("key", key), ("value", value)):
        _validate.axes(name, array, "[b, h, L, d]", 4)
    if query.shape[2] != 1:
        raise ValueError(
            f"query: expected one token, [b, hq, 1, d], got {tuple(query.shape)}; several are for "
            "numba_attn.paged_attention, or for torch's own function"
        )
    for name, array in (("key", key), ("value", value)):
        if array.shape[0] != query.shape[0]:
            raise ValueError(
                f"{name}: must have the b = {query.shape[0]} sequences of query, got "
                f"{array.shape[0]}; expand it"
            )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"key: must have the hq = {query.shape[1]} heads of query, got {key.shape[1]}; pass "
            "enable_gqa=True where query heads share them"
        )
    num_keys = min(1, key.shape[2]) if is_causal else key.shape[2]
    lens = _common.beside(query, np.full(query.shape[0], num_keys, np.int32))
    k, v = key.swapaxes(1, 2), value.swapaxes(1, 2)
    return _beneath(paged_attention, query[:, :, 0], k, v, None, lens, scale=scale)[:, :, None]
