"""FlashAttention's function over a KV cache, as in its versions 2.7 and 2.8."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import _device, _validate
from .._types import Array, HostArray
from ..api import paged_attention
from ..append import append_kv
from . import _common

_beneath = _common.naming(
    k_pool="k_cache",
    v_pool="v_cache",
    block_tables="block_table",
    seq_lens="cache_seqlens",
    seq_starts="cache_leftpad",
    scale="softmax_scale",
)


def flash_attn_with_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    k: Array | None = None,
    v: Array | None = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attend to a KV cache, new tokens appended first: FlashAttention's signature.

    Parameters
    ----------
    q : [b, sq, hq, d]
        Queries. The last one of a sequence stands at its last key.
    k_cache, v_cache : [b_cache, S, hkv, d] or [N, B, hkv, d]
        Contiguous caches of capacity S, or with `block_table` N blocks of B tokens, any B. In any
        format that `paged_attention` takes; with `k`, modified.
    k, v : [b, sn, hkv, d], optional
        New tokens, written into the caches behind the first `cache_seqlens` ones and attended to.
    rotary_cos, rotary_sin : None
        Not taken: rotate q and k before the call.
    cache_seqlens : int or int32 [b], optional
        Tokens in the cache, without the new ones; by default it is full.
    cache_batch_idx : int32 [b], optional
        Row of the caches of each sequence, by default 0, 1, 2, ...; without `block_table` only.
    cache_leftpad : int32 [b], optional
        The first token of each sequence that is attended to; with `block_table`, too.
    block_table : int32 [b, max_blocks], optional
        Block ids of each sequence.
    softmax_scale : float, optional
        Factor of the logits, positive; ``1 / sqrt(d)`` by default.
    causal : bool
        Whether a query attends to no later position than its own.
    window_size : (int, int)
        Keys to the left and to the right of its own that a query attends to; -1: all of them. To
        the right, 0, -1, or at least ``sq - 1``.
    softcap : float
        Bounds a logit s to ``softcap * tanh(s / softcap)``; 0.0 is none.
    rotary_interleaved : bool
        Ignored: it is about the rotation, which is not taken.
    alibi_slopes : float32 [hq] or [1, hq], optional
        Subtracts ``slope * |distance|`` from the logits. One set of slopes for each sequence is not
        taken, nor slopes for several queries that attend to later keys.
    num_splits : int
        Ignored: it changes speed only.
    return_softmax_lse : bool
        Return also the log-sum-exp of the logits.

    Returns
    -------
    out : [b, sq, hq, d]
        In q's dtype; 0 where a query attends to nothing.
    softmax_lse : float32 [b, hq, sq]
        Only with `return_softmax_lse`: natural logarithm; -inf where a query attends to nothing
        (FlashAttention has +inf there). The bias of ALiBi is in it as documented; FlashAttention's
        causal kernel leaves out the query's position, so that its is larger by slope * position.

    Raises
    ------
    ValueError, TypeError
        For what is not taken, and as `paged_attention` and `append_kv`; the caches are unchanged
        then (those on a GPU may hold the new tokens). In particular where there is no room.

    Notes
    -----
    With arrays on a GPU and `k`, lengths and table are copied to the host, which waits for them.

    References
    ----------
    Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023.

    Examples
    --------
    >>> import ml_dtypes, numpy as np
    >>> from numba_attn.compat import flash_attn_with_kvcache
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((2, 1, 8, 64)).astype(ml_dtypes.bfloat16)
    >>> k, v = rng.standard_normal((2, 2, 1, 4, 64)).astype(ml_dtypes.bfloat16)
    >>> k_cache, v_cache = np.zeros((2, 9, 16, 4, 64), ml_dtypes.bfloat16)
    >>> block_table = np.array([[7, 2], [0, 8]], np.int32)
    >>> cache_seqlens = np.array([30, 16], np.int32)
    >>> out, lse = flash_attn_with_kvcache(
    ...     q,
    ...     k_cache,
    ...     v_cache,
    ...     k,
    ...     v,
    ...     cache_seqlens=cache_seqlens,
    ...     block_table=block_table,
    ...     causal=True,
    ...     return_softmax_lse=True,
    ... )
    >>> out.shape, lse.shape, bool((k_cache[2, 14] == k[0, 0]).all())
    ((2, 1, 8, 64), (2, 8, 1), True)
    """
    for name, given in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        _common.refuse(name, given, "no rotation is applied here", "rotate q and k before the call")
    _validate.axes("q", q, "[b, sq, hq, d]", 4)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _validate.axes(name, cache, "[b_cache, S, hkv, d] or [N, B, hkv, d]", 4)
    _validate.flag("causal", causal)
    _validate.flag("return_softmax_lse", return_softmax_lse)
    options = _mask(window_size, causal, q.shape[1])
    options |= {
        "scale": softmax_scale,
        "softcap": _common.cap("softcap", softcap),
        "alibi_slopes": _slopes(alibi_slopes, q.shape, options["causal"]),
        "seq_starts": cache_leftpad,
        "return_lse": return_softmax_lse,
    }
    cache = _cache(q, k_cache, v_cache, block_table, cache_batch_idx)
    if k is None and v is None:
        lens = _lengths(cache, cache_seqlens)
        result = _beneath(paged_attention, q, *cache[:3], lens, **options)
    else:
        result = _append_and_attend(q, cache, k, v, cache_seqlens, options)
    if not return_softmax_lse:
        return result
    out, lse = result
    return out, lse.swapaxes(1, 2)


class _Cache(NamedTuple):
    k_cache: Array  # [N, B, hkv, d]
    v_cache: Array
    tables: Array | None  # [b, max_blocks]; None: a row for each sequence
    num_seqs: int
    capacity: int  # tokens of a sequence


def _mask(window_size: Any, causal: bool, num_queries: int) -> dict[str, Any]:
    """Return the options that say which keys a query attends to."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(
            f"window_size: expected (left, right), got {window_size!r}; pass (-1, -1) for none"
        )
    keys, right = (_common.window("window_size", side) for side in window_size)
    if causal:
        right = 1  # of its own key and what follows, as `keys` of its own and what precedes
    if right is not None and 1 < right < num_queries:
        raise ValueError(
            f"window_size: to the right it must be 0, -1 or at least sq - 1 = {num_queries - 1}, "
            f"got {right - 1}; pass one query for each sequence"
        )
    return {"sliding_window": keys, "causal": right == 1}


def _slopes(slopes: Any, q_shape: tuple[int, ...], causal: bool) -> Any:
    """Return ALiBi slopes [hq]."""
    if slopes is None:
        return None
    if np.ndim(slopes) == 2:
        if tuple(slopes.shape) != (1, q_shape[2]) or q_shape[0] != 1:
            raise ValueError(
                "alibi_slopes: one set of slopes for each sequence is not taken, got "
                f"{tuple(slopes.shape)} for b = {q_shape[0]}; pass [hq], or one sequence at a time"
            )
        slopes = slopes[0]
    if not causal and q_shape[1] > 1:
        raise ValueError(
            f"alibi_slopes: sq = {q_shape[1]} queries may not attend to later keys, which would "
            "be nearer than none, got causal=False; pass causal=True, or one query"
        )
    return slopes


def _cache(
    q: Array, k_cache: Array, v_cache: Array, block_table: Any, cache_batch_idx: Any
) -> _Cache:
    """Say where the tokens of each sequence are."""
    num_seqs, (rows, size) = q.shape[0], tuple(k_cache.shape)[:2]
    if block_table is not None:
        why = "caches with block_table have no rows of sequences"
        _common.refuse("cache_batch_idx", cache_batch_idx, why, "leave one of the two None")
        _validate.table("block_table", block_table, num_seqs, "max_blocks")
        return _Cache(k_cache, v_cache, block_table, num_seqs, block_table.shape[1] * size)
    if cache_batch_idx is not None:
        _validate.axes("cache_batch_idx", cache_batch_idx, "[b]", 1)
        return _Cache(k_cache, v_cache, cache_batch_idx[:, None], num_seqs, size)
    if rows < num_seqs or v_cache.shape[0] < num_seqs:
        raise ValueError(
            f"k_cache: must have a row for each of the b = {num_seqs} sequences of q, got "
            f"{min(rows, v_cache.shape[0])}; pass cache_batch_idx or block_table to share rows"
        )
    return _Cache(k_cache[:num_seqs], v_cache[:num_seqs], None, num_seqs, size)


def _lengths(cache: _Cache, cache_seqlens: Any) -> Any:
    """Return the length of each sequence [b]."""
    if cache_seqlens is None:
        cache_seqlens = cache.capacity
    if hasattr(cache_seqlens, "shape") and cache_seqlens.shape != ():
        return cache_seqlens
    lens = np.asarray(cache_seqlens)
    return _common.beside(cache.k_cache, np.full(cache.num_seqs, lens) if lens.ndim == 0 else lens)


def _append_and_attend(
    q: Array, cache: _Cache, k: Any, v: Any, cache_seqlens: Any, options: dict[str, Any]
) -> Any:
    """Write new tokens and attend to them, too; where that fails, undo it."""
    for name, given in (("k", k), ("v", v), ("cache_seqlens", cache_seqlens)):
        if given is None:
            raise ValueError(
                f"{name}: new tokens need k, v and cache_seqlens, got None; pass all three"
            )
    for name, tokens in (("k", k), ("v", v)):
        _validate.axes(name, tokens, "[b, sn, hkv, d]", 4)
        if tuple(tokens.shape[:2]) != (cache.num_seqs, k.shape[1]):
            raise ValueError(
                f"{name}: its first two axes must be b = {cache.num_seqs} sequences and sn = "
                f"{k.shape[1]} new tokens, got {tuple(tokens.shape)}; pass as many for each"
            )
    lens = _common.on_host("cache_seqlens", _lengths(cache, cache_seqlens))
    _validate.per_sequence("cache_seqlens", lens, cache.num_seqs)
    places = _places(cache, lens, k.shape[1])
    on_host = not _device.is_device_array(cache.k_cache)
    before = (cache.k_cache[places], cache.v_cache[places]) if on_host else None
    slots = places[0] * cache.k_cache.shape[1] + places[1]
    k, v = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
    if len(np.unique(slots)) < slots.size:
        raise ValueError(
            "cache_batch_idx or block_table: two new tokens may not go to one place of the caches, "
            f"got blocks {places[0].tolist()}; give each sequence its own row, or last block"
        )
    slots = _common.beside(cache.k_cache, slots.reshape(-1))
    _beneath(append_kv, k, v, cache.k_cache, cache.v_cache, slots)
    try:
        lens = _common.beside(cache.k_cache, (lens + places[0].shape[1]).astype(np.int32))
        return _beneath(paged_attention, q, *cache[:3], lens, **options)
    except BaseException:
        if before is not None:
            cache.k_cache[places], cache.v_cache[places] = before
        raise


def _places(cache: _Cache, lens: HostArray, new: int) -> tuple[HostArray, HostArray]:
    """Return blocks, and places in them, of the new tokens [b, sn]."""
    if new and ((lens < 0) | (lens > cache.capacity - new)).any():
        raise ValueError(
            f"cache_seqlens: with sn = {new} new tokens they must be within 0 and the capacity "
            f"{cache.capacity}, got {lens.tolist()}; make the cache larger, or evict"
        )
    size = cache.k_cache.shape[1]
    positions = lens.astype(np.int64)[:, None] + np.arange(new)
    if cache.tables is None:
        return np.arange(cache.num_seqs)[:, None] + 0 * positions, positions
    tables = _common.on_host("block_table", cache.tables)
    blocks = np.take_along_axis(tables.astype(np.int64), positions // size, axis=1)
    if ((blocks < 0) | (blocks >= cache.k_cache.shape[0])).any():
        raise ValueError(
            f"block_table: the blocks of new tokens must be within 0 and the number of blocks "
            f"{cache.k_cache.shape[0]}, got {blocks.tolist()}; allocate them before the call"
        )
    return blocks, positions % size
