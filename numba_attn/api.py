"""The public functions: validate -> plan -> backend."""

from __future__ import annotations

from typing import Any, overload

import numpy as np

from . import _arrays, _device, _plan, _validate
from ._plan import Sizes
from ._types import Array
from .state import AttentionState


def paged_attention(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    block_tables: Any,
    seq_lens: Any,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    device: str = "auto",
) -> Any:
    """Decode attention over a paged KV cache: one query token per sequence.

    Computes ``softmax(scale * q k^T) v`` over the first ``seq_lens[s]`` tokens of each sequence,
    with the FlashAttention-2 online-softmax recurrence in float32. Query head h reads kv head
    ``h // (Hq // Hkv)``. Nothing is copied, and nothing past a sequence's length is read.

    Parameters
    ----------
    q : bfloat16 [S, Hq, D]
        Queries; any strides with a contiguous last axis. uint16 is taken as bfloat16 bits.
    k_pool, v_pool : bfloat16 [N, B, Hkv, D], [N, B, Hkv, Dv]
        Pools of N blocks of B tokens; any strides with a contiguous last axis, K and V apart. A
        head-major pool is passed as a transposed view, a combined one is sliced.
    block_tables : int32 [S, max_blocks] or None
        Block ids of each sequence, in order; only the first ``ceil(seq_lens[s] / B)`` entries of a
        row are read. None: contiguous caches, one block per sequence (N = S).
    seq_lens : int32 [S]
        Tokens in the cache, the current one included; 0 is legal.
    scale : float, optional
        Factor of the logits, ``1 / sqrt(D)`` by default.
    return_lse : bool
        Return also the log-sum-exp of each row's logits.
    out : bfloat16 [S, Hq, Dv], optional
        Array to write the result into.
    device : {"auto", "cpu", "cuda"}
        "auto" runs where the arrays are; the others copy the arrays over and the result back.

    Returns
    -------
    out : bfloat16 [S, Hq, Dv]
        In q's dtype and kind of array; 0 for an empty sequence.
    lse : float32 [S, Hq]
        Only with ``return_lse``: natural logarithm, -inf for an empty sequence.

    Raises
    ------
    ValueError
        For shapes and values outside the rules above; nothing has been written then.
    TypeError
        For wrong dtypes and kinds of arguments.
    RuntimeError
        If the requested device is not available.

    Notes
    -----
    A NaN or +inf logit makes its head's row NaN. A logit of -inf has weight 0, and so has one more
    than 87 below the largest of its split (the weight is below 2^-126). NaN or inf in a value shows
    in its column; where the value's weight is 0, it may or may not.

    References
    ----------
    Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023.
    Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", 2023.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, numba_attn
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((2, 8, 64)).astype(ml_dtypes.bfloat16)
    >>> k_pool, v_pool = rng.standard_normal((2, 10, 16, 2, 64)).astype(ml_dtypes.bfloat16)
    >>> block_tables = np.array([[7, 2, 5], [0, 9, -1]], np.int32)
    >>> out = numba_attn.paged_attention(q, k_pool, v_pool, block_tables, np.array([40, 17]))
    >>> out.shape, out.dtype.name
    ((2, 8, 64), 'bfloat16')
    """
    home = _device.home(
        q=q, k_pool=k_pool, v_pool=v_pool, block_tables=block_tables, seq_lens=seq_lens, out=out
    )
    kind = _device.resolve(device, home)
    _validate.flag("return_lse", return_lse)
    q_bits, k_bits, v_bits = _inputs(q, k_pool, v_pool)
    sizes = _validate.attention_sizes(q_bits, k_bits, v_bits)
    scale = _validate.softmax_scale(scale, sizes.head_dim)
    lens = _arrays.integers("seq_lens", seq_lens)
    if block_tables is None:
        _validate.contiguous(sizes, lens)
        tables = _arrays.bring(home, np.arange(sizes.num_seqs, dtype=np.int32)[:, None])
    else:
        tables = _arrays.integers("block_tables", block_tables)
        _validate.paged(sizes, tables, lens)
    if out is not None:
        given = {"q": q, "k_pool": k_pool, "v_pool": v_pool}
        given |= {"block_tables": tables, "seq_lens": lens}
        _validate.out(out, _out_shape(sizes), q.dtype, given)

    state = AttentionState(sizes.num_seqs, sizes.num_q_heads, sizes.v_head_dim, device=kind)
    _absorb(state, (q_bits, k_bits, v_bits), tables, lens, scale)
    return _finish(state, home, q.dtype, return_lse, out)


def step_tile(
    state: AttentionState,
    q: Array,
    k_pool: Array,
    v_pool: Array,
    tile_blocks: Any,
    tile_block_counts: Any,
    *,
    tile_token_counts: Any = None,
    scale: float | None = None,
) -> None:
    """Absorb one tile of K/V blocks per sequence into a state, which is modified.

    Any cut of a cache into tiles gives the result of one call; bit for bit, where the tiles hold
    multiples of 512 tokens. Runs on the state's device: arrays elsewhere are copied over.

    Parameters
    ----------
    state : AttentionState
        Modified in place.
    q : bfloat16 [S, Hq, D]
        The same queries for every tile.
    k_pool, v_pool : bfloat16 [N, B, Hkv, D], [N, B, Hkv, Dv]
        The blocks that are resident now, as in `paged_attention`.
    tile_blocks : int32 [S, T]
        Block ids of each sequence's tile; entries past the count are never read.
    tile_block_counts : int32 [S]
        Blocks of each row in use; a row with 0 keeps its state, bit for bit.
    tile_token_counts : int32 [S], optional
        Valid tokens of each row's tile, ``tile_block_counts * B`` by default.
    scale : float, optional
        Factor of the logits, ``1 / sqrt(D)`` by default.

    Raises
    ------
    ValueError, TypeError
        As `paged_attention`; the state is unchanged then.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, numba_attn
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((1, 8, 64)).astype(ml_dtypes.bfloat16)
    >>> k_pool, v_pool = rng.standard_normal((2, 10, 16, 2, 64)).astype(ml_dtypes.bfloat16)
    >>> state = numba_attn.AttentionState.like(q, v_pool)
    >>> for tile in ([3, 1], [4, 9]):
    ...     numba_attn.step_tile(state, q, k_pool, v_pool, np.array([tile]), np.array([2]))
    >>> numba_attn.finalize(state).shape
    (1, 8, 64)
    """
    _validate.is_state("state", state, AttentionState)
    given = {"q": q, "k_pool": k_pool, "v_pool": v_pool, "tile_blocks": tile_blocks}
    given |= {"tile_block_counts": tile_block_counts, "tile_token_counts": tile_token_counts}
    _device.home(**given)
    bits = _inputs(q, k_pool, v_pool)
    sizes = _validate.attention_sizes(*bits)
    scale = _validate.softmax_scale(scale, sizes.head_dim)
    _validate.state_fits(state, sizes)
    tables = _arrays.integers("tile_blocks", tile_blocks)
    counts = _arrays.integers("tile_block_counts", tile_block_counts)
    tokens = None
    if tile_token_counts is not None:
        tokens = _arrays.integers("tile_token_counts", tile_token_counts)
    _validate.tile(sizes, tables, counts, tokens)
    if tokens is None:
        tokens = _arrays.times(counts, sizes.block_size)
    _absorb(state, bits, tables, tokens, scale)


def merge(state: AttentionState, other: AttentionState) -> None:
    """Merge another state over disjoint keys into `state`, which is modified.

    An empty state is the identity: the other side survives bit for bit.

    Parameters
    ----------
    state : AttentionState
        Modified in place.
    other : AttentionState
        Same shape, same device; left as it is.

    Raises
    ------
    ValueError
        If the states have different shapes or devices, or are one and the same.
    TypeError
        If one is no `AttentionState`.

    References
    ----------
    Milakov & Gimelshein, "Online normalizer calculation for softmax", 2018.

    Examples
    --------
    >>> import numba_attn
    >>> a, b = (numba_attn.AttentionState(1, 2, 4) for _ in range(2))
    >>> b.m[:], b.l[:], b.o[:] = 0.5, 2.0, 1.0
    >>> numba_attn.merge(a, b)
    >>> a.m.tolist(), a.l.tolist()
    ([[0.5, 0.5]], [[2.0, 2.0]])
    """
    _validate.is_state("state", state, AttentionState)
    _validate.is_state("other", other, AttentionState)
    _validate.states_merge(state, other)
    starts = _arrays.bring(state.device, _plan.one_each(state.m.shape[0]))
    _device.backend(state.device).merge_splits(state, other, starts)


@overload
def finalize(state: AttentionState, *, dtype: Any = ..., out: Array | None = ...) -> Array: ...
@overload
def finalize(
    state: AttentionState, *, dtype: Any = ..., return_lse: bool, out: Array | None = ...
) -> Any: ...
def finalize(
    state: AttentionState,
    *,
    dtype: Any = "bfloat16",
    return_lse: bool = False,
    out: Array | None = None,
) -> Any:
    """Normalise a state into the attention output ``o / l``; the state is left as it is.

    Parameters
    ----------
    state : AttentionState
    dtype : dtype
        bfloat16, or uint16 for its bits. On a CUDA device the result carries bits either way.
    return_lse : bool
        Return also ``state.lse``.
    out : array [S, Hq, Dv], optional
        Array of `dtype`, on the state's device, to write the result into.

    Returns
    -------
    out : [S, Hq, Dv]
        Rounded to nearest even; 0 for an empty row.
    lse : float32 [S, Hq]
        Only with ``return_lse``.

    Raises
    ------
    ValueError, TypeError
        If `out` has another shape, dtype or device, or `dtype` is not supported.

    Examples
    --------
    >>> import numba_attn
    >>> state = numba_attn.AttentionState(1, 2, 4)
    >>> numba_attn.finalize(state).tolist()[0][0]
    [0.0, 0.0, 0.0, 0.0]
    """
    _validate.is_state("state", state, AttentionState)
    _validate.flag("return_lse", return_lse)
    dtype = _validate.output_dtype(dtype, (_arrays.bfloat16(), _arrays.UINT16))
    if out is not None:
        _validate.out_device(_device.home(out=out), state.device)
        expected = dtype if state.device == "cpu" else _arrays.UINT16
        _validate.out(out, tuple(state.o.shape), expected, {"state": state.buffer})
    return _finish(state, state.device, dtype, return_lse, out)


def warmup(
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    v_head_dim: int | None = None,
    device: str = "cpu",
) -> None:
    """Compile, or load from the cache, what a model's shape needs, so that no later call waits.

    One kernel is compiled per (Hq / Hkv, D, Dv) and a few for all; they stay on disk. Batch,
    lengths, block size and strides are run-time values: nothing compiles while a sequence grows.

    Parameters
    ----------
    num_q_heads, num_kv_heads, head_dim : int
        Hq, Hkv and D.
    v_head_dim : int, optional
        Dv, by default D.
    device : {"cpu", "cuda"}
        Where the calls will run.

    Raises
    ------
    ValueError, TypeError
        If a size is no integer or below 1, or Hq is no multiple of Hkv.
    RuntimeError
        If the device is not available.

    Examples
    --------
    >>> import numba_attn
    >>> numba_attn.warmup(num_q_heads=8, num_kv_heads=2, head_dim=64)
    """
    num_q_heads, num_kv_heads, head_dim, v_head_dim = _validate.positive_sizes(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim if v_head_dim is None else v_head_dim,
    )
    _validate.head_ratio("num_q_heads", num_q_heads, num_kv_heads)
    state = AttentionState(1, num_q_heads, v_head_dim, device=device)
    q = np.zeros((1, num_q_heads, head_dim), np.uint16)
    k_pool = np.zeros((1, 16, num_kv_heads, head_dim), np.uint16)
    v_pool = np.zeros((1, 16, num_kv_heads, v_head_dim), np.uint16)
    step_tile(state, q, k_pool, v_pool, [[0]], [1])
    finalize(state)


def _inputs(q: Array, k_pool: Array, v_pool: Array) -> tuple[Array, Array, Array]:
    """View q and the pools as bfloat16 bits."""
    named = {"q": q, "k_pool": k_pool, "v_pool": v_pool}
    q_bits, k_bits, v_bits = (_arrays.bits(name, array) for name, array in named.items())
    return q_bits, k_bits, v_bits


def _out_shape(sizes: Sizes) -> tuple[int, int, int]:
    return sizes.num_seqs, sizes.num_q_heads, sizes.v_head_dim


def _absorb(
    state: AttentionState,
    bits: tuple[Array, Array, Array],
    tables: Array,
    token_counts: Array,
    scale: float,
) -> None:
    """Run a validated step on the state's device."""
    if state.o.size == 0:
        return
    q, k_pool, v_pool = (_arrays.bring(state.device, array) for array in bits)
    tables, token_counts = (
        _arrays.bring(state.device, _arrays.as_int32(array)) for array in (tables, token_counts)
    )
    backend = _device.backend(state.device)
    backend.step_tile(state, q, k_pool, v_pool, tables, token_counts, np.float32(scale))


def _finish(
    state: AttentionState, home: str, dtype: Any, return_lse: bool, out: Array | None
) -> Any:
    """Run finalize on the state's device; give the result in `home`, in the caller's dtype."""
    in_place = out is not None and home == state.device
    target = out if in_place else _arrays.empty(state.device, tuple(state.o.shape), np.uint16)
    target_bits = _arrays.bits("out", target)
    lse = _arrays.empty(state.device, tuple(state.m.shape), np.float32)
    if state.o.size:
        _device.backend(state.device).finalize(state, target_bits, lse)
    if not in_place:
        result = _arrays.bring(home, target_bits)
        result = result.view(dtype) if home == "cpu" else result
        if out is None:
            out = result
        else:
            _arrays.overwrite(out, result)
    return (out, _arrays.bring(home, lse)) if return_lse else out
