"""FlashInfer's functions for one sequence, its merges of partial results, and its page tables."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from .. import _arrays, _device, _frameworks, _validate
from .._types import Array, HostArray
from ..api import paged_attention
from ..folding import finalize, merge
from ..state import AttentionState
from . import _common

_beneath = _common.naming(
    k_pool="k",
    v_pool="v",
    scale="sm_scale",
    softcap="logits_soft_cap",
    sliding_window="window_left",
)
_LOG2_E = math.log2(math.e)


def single_decode_with_kv_cache(
    q: Array,
    k: Array,
    v: Array,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Attend with one query to the keys of one sequence: FlashInfer's signature.

    Parameters
    ----------
    q : [num_qo_heads, head_dim]
        The query, which stands at the last key.
    k, v : [kv_len, num_kv_heads, head_dim] or [num_kv_heads, kv_len, head_dim]
        Keys and values, as `kv_layout` says.
    kv_layout : {"NHD", "HND"}
        Whether tokens or heads come first.
    pos_encoding_mode : {"NONE", "ALIBI"}
        "ROPE_LLAMA" is not taken: rotate q and k before the call.
    use_tensor_cores : bool
        Ignored: it changes speed only.
    q_scale, k_scale, v_scale : float, optional
        Factors of what q, k and v hold.
    window_left : int
        Keys before its own that the query attends to; negative: all.
    logits_soft_cap : float, optional
        Bounds a logit s to ``cap * tanh(s / cap)``; None, 0 and below: none. Not with "ALIBI",
        whose bias FlashInfer bounds, too.
    sm_scale : float, optional
        Factor of the logits, ``1 / sqrt(head_dim)`` by default.
    rope_scale, rope_theta : float, optional
        Ignored: they are about the rotation, which is not taken.
    return_lse : bool
        Return also the log-sum-exp of the logits.

    Returns
    -------
    out : [num_qo_heads, head_dim]
        In q's dtype.
    lse : float32 [num_qo_heads]
        Only with `return_lse`: logarithm to base 2. The bias of "ALIBI" is ``slope * key position``
        in it, as FlashInfer's.

    Raises
    ------
    ValueError, TypeError
        For what is not taken, and as `paged_attention`.

    References
    ----------
    Ye et al., "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving",
    2025.

    Examples
    --------
    >>> import numpy as np
    >>> from numba_attn.compat import single_decode_with_kv_cache
    >>> q, k = np.ones((8, 64), np.float16), np.ones((2, 100, 64), np.float16)
    >>> out, lse = single_decode_with_kv_cache(q, k, k, kv_layout="HND", return_lse=True)
    >>> out.shape, lse.shape, round(float(lse[0]), 3)  # 8 log2(e) + log2(100)
    ((8, 64), (8,), 18.185)
    """
    if pos_encoding_mode not in ("NONE", "ALIBI"):
        raise ValueError(
            f"pos_encoding_mode: expected 'NONE' or 'ALIBI', got {pos_encoding_mode!r}; rotate q "
            "and k before the call"
        )
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(
            f"kv_layout: expected 'NHD' or 'HND', got {kv_layout!r}; transpose k and v to one"
        )
    with_alibi = pos_encoding_mode == "ALIBI"
    softcap = _common.cap("logits_soft_cap", logits_soft_cap)
    if with_alibi and softcap is not None:
        raise ValueError(
            f"logits_soft_cap: not taken with pos_encoding_mode='ALIBI', got {logits_soft_cap}; "
            "pass 0.0, or add no bias"
        )
    _validate.axes("q", q, "[num_qo_heads, head_dim]", 2)
    for name, array in (("k", k), ("v", v)):
        _validate.axes(name, array, "[kv_len, num_kv_heads, head_dim], as kv_layout says", 3)
    if kv_layout == "HND":
        k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
    scale = 1 / math.sqrt(max(1, q.shape[1])) if sm_scale is None else sm_scale
    result = _beneath(
        paged_attention,
        q[None],
        k[None],
        v[None],
        None,
        _common.beside(k, np.array([k.shape[0]], np.int32)),
        scale=scale if q_scale is None else scale * q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        softcap=softcap,
        sliding_window=_common.window("window_left", window_left),
        alibi_slopes=_common.beside(q, alibi_slopes(q.shape[0])) if with_alibi else None,
        return_lse=return_lse,
    )
    if not return_lse:
        return result[0]
    out, lse = result
    lse = lse[0] * _LOG2_E
    if with_alibi:  # the query's own position, which its bias here counts from
        lse = _raised(lse, _LOG2_E * (k.shape[0] - 1) * alibi_slopes(q.shape[0]))
    return out[0], lse


@_frameworks.taking_arrays("lse")
def _raised(lse: Array, by: HostArray) -> Array:
    """Add numbers to an array, wherever it is."""
    return _common.beside(lse, _arrays.to_host(lse) + by)


@functools.cache
def alibi_slopes(num_heads: int) -> HostArray:
    """Return the slopes of ALiBi [num_heads]: a geometric series, and where it must, one between.

    Examples
    --------
    >>> alibi_slopes(3).tolist()
    [0.0625, 0.00390625, 0.25]
    """
    series = 1 << max(0, num_heads.bit_length() - 1)
    heads = np.arange(1, num_heads + 1)
    rest = 2 * (heads - series) - 1
    exponents = np.where(heads <= series, 8 * heads, 4 * rest)
    return np.exp2(-exponents / series).astype(np.float32)


def merge_state(v_a: Array, s_a: Array, v_b: Array, s_b: Array) -> tuple[Array, Array]:
    """Merge two partial results over disjoint keys: FlashInfer's signature.

    Parameters
    ----------
    v_a, v_b : [seq_len, num_heads, head_dim]
        Normalised outputs.
    s_a, s_b : float32 [seq_len, num_heads]
        Log-sum-exps of the logits, to base 2; -inf where there was no key.

    Returns
    -------
    v : [seq_len, num_heads, head_dim]
        In the dtype of `v_a`.
    s : float32 [seq_len, num_heads]
        To base 2.

    Raises
    ------
    ValueError, TypeError
        For other shapes and dtypes.

    Examples
    --------
    >>> import numpy as np
    >>> from numba_attn.compat import merge_state
    >>> v, s = np.ones((1, 1, 2), np.float32), np.array([[3.0]], np.float32)
    >>> v, s = merge_state(v, s, -v, s - 2)  # weights 8 and 2
    >>> round(float(v[0, 0, 0]), 3), round(float(s[0, 0]), 3)
    (0.6, 3.322)
    """
    _validate.axes("v_a", v_a, "[seq_len, num_heads, head_dim]", 3)
    _validate.axes("v_b", v_b, "[seq_len, num_heads, head_dim]", 3)
    return _merged([("v_a", v_a, "s_a", s_a), ("v_b", v_b, "s_b", s_b)])


def merge_states(v: Array, s: Array) -> tuple[Array, Array]:
    """Merge partial results over disjoint keys, in order: FlashInfer's signature.

    Parameters
    ----------
    v : [seq_len, num_states, num_heads, head_dim]
        Normalised outputs.
    s : float32 [seq_len, num_states, num_heads]
        Log-sum-exps of the logits, to base 2; -inf where there was no key.

    Returns
    -------
    v : [seq_len, num_heads, head_dim]
        In the dtype of `v`.
    s : float32 [seq_len, num_heads]
        To base 2.

    Raises
    ------
    ValueError, TypeError
        For other shapes and dtypes.

    Examples
    --------
    >>> import numpy as np
    >>> from numba_attn.compat import merge_states
    >>> v, s = merge_states(np.ones((2, 5, 8, 64), np.float32), np.zeros((2, 5, 8), np.float32))
    >>> v.shape, s.shape
    ((2, 8, 64), (2, 8))
    """
    _validate.axes("v", v, "[seq_len, num_states, num_heads, head_dim]", 4)
    _validate.axes("s", s, "[seq_len, num_states, num_heads]", 3)
    if v.shape[1] != s.shape[1] or not v.shape[1]:
        raise ValueError(
            f"s: must have num_states = {v.shape[1]} states as v, at least one, got {s.shape[1]}; "
            "pass one for each"
        )
    return _merged([("v", v[:, i], "s", s[:, i]) for i in range(v.shape[1])])


def _merged(parts: list[tuple[str, Array, str, Array]]) -> tuple[Array, Array]:
    """Merge partial results v and s, each after its name."""
    states = [
        _common.naming(out=v_name, lse=s_name)(AttentionState.from_partial, v, s, base="2")
        for v_name, v, s_name, s in parts
    ]
    for (v_name, *_), other in zip(parts[1:], states[1:], strict=True):
        _common.naming(state=parts[0][0], other=v_name)(merge, states[0], other)
    v, s = finalize(states[0], dtype=parts[0][1].dtype, return_lse=True)
    return v, s * _LOG2_E


def block_tables_from_csr(
    kv_indptr: Any, kv_indices: Any, kv_last_page_len: Any, page_size: int
) -> tuple[Array, Array]:
    """Turn FlashInfer's page table, which is rows of a sparse matrix, into block tables.

    Parameters
    ----------
    kv_indptr : int32 [S + 1]
        Where the pages of each sequence begin in `kv_indices`, and their number in all.
    kv_indices : int32 [pages]
        Pages of all sequences, one after another.
    kv_last_page_len : int32 [S]
        Tokens in the last page of each sequence, from 1 to `page_size`; any, where it has no page.
    page_size : int
        Tokens of a page: B.

    Returns
    -------
    block_tables : int32 [S, max_blocks]
        Padded with -1.
    seq_lens : int32 [S]
        On the device of `kv_indptr`.

    Raises
    ------
    ValueError, TypeError
        For other shapes, values and dtypes.

    Examples
    --------
    >>> from numba_attn.compat import block_tables_from_csr
    >>> block_tables, seq_lens = block_tables_from_csr([0, 2, 2, 3], [7, 4, 9], [5, 0, 16], 16)
    >>> block_tables.tolist(), seq_lens.tolist()
    ([[7, 4], [-1, -1], [9, -1]], [21, 0, 16])
    """
    page_size = _common.whole("page_size", page_size, 1, None, "pass the tokens of a page")
    indptr = _common.on_host("kv_indptr", kv_indptr).astype(np.int64)
    indices = _common.on_host("kv_indices", kv_indices)
    last = _common.on_host("kv_last_page_len", kv_last_page_len).astype(np.int64)
    for name, array in (
        ("kv_indptr", indptr),
        ("kv_indices", indices),
        ("kv_last_page_len", last),
    ):
        _validate.axes(name, array, "one axis", 1)
    counts = np.diff(indptr)
    if len(indptr) == 0 or indptr[0] != 0 or (counts < 0).any() or indptr[-1] > len(indices):
        raise ValueError(
            f"kv_indptr: must go up from 0 to at most len(kv_indices) = {len(indices)}, got "
            f"{indptr.tolist()}"
        )
    if last.shape != counts.shape:
        raise ValueError(
            f"kv_last_page_len: must have S = {len(counts)} entries, as kv_indptr says, got "
            f"{len(last)}"
        )
    if ((counts > 0) & ((last < 1) | (last > page_size))).any():
        raise ValueError(
            f"kv_last_page_len: must be from 1 to page_size = {page_size}, got {last.tolist()}"
        )
    tables = np.full((len(counts), counts.max(initial=0)), -1, np.int32)
    tables[np.arange(tables.shape[1]) < counts[:, None]] = indices[: indptr[-1]]
    lens = np.where(counts > 0, (counts - 1) * page_size + last, 0).astype(np.int32)
    if _device.is_device_array(kv_indptr):
        return _common.beside(kv_indptr, tables), _common.beside(kv_indptr, lens)
    return tables, lens
