"""Attention, at once or tile by tile: validate -> plan -> backend."""

from __future__ import annotations

from typing import Any

from . import (
    _arrays,
    _device,
    _frameworks,
    _run,
    _validate,
    _validate_options,
    _validate_state,
)
from ._call import Tile
from ._types import Array
from .state import AttentionState


@_frameworks.taking_arrays("q")
@_device.streamed
def paged_attention(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    block_tables: Any,
    seq_lens: Any,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    causal: bool = True,
    query_start_loc: Any = None,
    seq_starts: Any = None,
    return_lse: bool = False,
    out: Array | None = None,
    device: str = "auto",
    state: AttentionState | None = None,
    kernel: str = "auto",
    stream: Any = None,
) -> Any:
    """Decode attention over a paged KV cache: one or a few query tokens per sequence.

    Computes ``softmax(scale * q k^T) v`` over the first ``seq_lens[s]`` tokens of each sequence,
    with the FlashAttention-2 online-softmax recurrence in float32. Query head h reads kv head
    ``h // (Hq // Hkv)``. Nothing is copied, and no key is read that no query attends to.

    Parameters
    ----------
    q : [S, Hq, D], [S, Q, Hq, D] or [tokens, Hq, D]
        Queries in bfloat16, float16 or float32: one per sequence, Q per sequence, or with
        `query_start_loc` any number; any strides with a contiguous last axis. uint16 is taken as
        bfloat16 bits. The last query of a sequence stands at its last key.
    k_pool, v_pool : [N, B, Hkv, D], [N, B, Hkv, Dv]
        Pools of N blocks of B tokens, each in bfloat16, float16, float32, float8_e4m3fn,
        float8_e5m2 or int8; any strides with a contiguous last axis, K and V apart. A head-major
        pool is passed as a transposed view, a combined one is sliced.
    block_tables : int32 [S, max_blocks] or None
        Block ids of each sequence, in order; only entries of blocks that are attended to are read.
        None: contiguous caches, one block per sequence (N = S).
    seq_lens : int32 [S]
        Tokens in the cache, the current ones included; 0 is legal.
    scale : float, optional
        Factor of the logits, ``1 / sqrt(D)`` by default.
    softcap : float, optional
        Bounds a logit s to ``softcap * tanh(s / softcap)``.
    sliding_window : int, optional
        Keys that a query attends to, its own included: the last ones.
    alibi_slopes : float [Hq], optional
        Adds ``slope * (key position - query position)`` to the logits.
    sinks : float [Hq], optional
        One more logit per head, with value 0; -inf is none.
    k_scale, v_scale : float, [Hkv] or [N, B, Hkv], optional
        Factors of what the pools hold, for all, by kv head, or by token and kv head.
    causal : bool
        Whether a query attends to no later position than its own.
    query_start_loc : int32 [S + 1], optional
        Where the rows of each sequence begin in q, and their number in all.
    seq_starts : int32 [S], optional
        The first position that each sequence attends to, by default 0; positions are unchanged.
    return_lse : bool
        Return also the log-sum-exp of each row's logits, a sink included (do not merge that one).
    out : array, optional
        Array to write the result into.
    device : {"auto", "cpu", "cuda"}
        "auto" runs where the arrays are; the others copy the arrays over and the result back.
    state : AttentionState, optional
        To work in: what is in it is lost, and it holds the result before the division. With this
        and `out`, a CUDA call on device arrays allocates nothing from the second time on, waits for
        nothing, and can be captured in a CUDA graph.
    kernel : {"auto", "simple", "split"}
        Which CUDA kernel runs; the bits are the same. "simple" has a block for each query token and
        head, "split" for each 256 tokens and kv head; "auto" is "simple" up to 256 tokens of table.
    stream : optional
        Where to launch on CUDA: a stream of Numba, cuda.core, torch or CuPy, or its pointer; the
        default stream where it is None. Whoever names one has put the arrays in order with it.

    Returns
    -------
    out : [S, Hq, Dv], [S, Q, Hq, Dv] or [tokens, Hq, Dv]
        In q's dtype and kind of array; 0 where a query attends to nothing.
    lse : float32 [S, Hq], [S, Q, Hq] or [tokens, Hq]
        Only with ``return_lse``: natural logarithm; the sink, else -inf, where there is no key.

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
    A logit is scaled, capped, biased, then masked. A NaN or +inf logit makes its head's row NaN. A
    logit of -inf has weight 0, and so has one more than 87 below the largest of its split (the
    weight is below 2^-126). NaN or inf in a value shows in its column; where the value's weight is
    0, it may or may not.

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
    given = _run.given_arrays(
        q=q,
        k_pool=k_pool,
        v_pool=v_pool,
        block_tables=block_tables,
        seq_lens=seq_lens,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        query_start_loc=query_start_loc,
        seq_starts=seq_starts,
    )
    home = _device.home(**given, out=out)
    kind = _device.resolve(device, home)
    _validate_options.launch(kind, kernel, stream)
    _validate.flag("return_lse", return_lse)
    inputs = _run.inputs(q, k_pool, v_pool, query_start_loc)
    sizes = inputs.sizes
    options = _validate_options.options(
        sizes,
        scale=scale,
        softcap=softcap,
        sliding_window=sliding_window,
        causal=causal,
        alibi_slopes=alibi_slopes,
        k_scale=k_scale,
        v_scale=v_scale,
        kernel=kernel,
    )
    sinks = _validate_options.per_head("sinks", sinks, sizes.num_q_heads)
    tile = _run.whole(home, inputs, options, block_tables, seq_lens, seq_starts)
    shape = (*q.shape[:-1], sizes.v_head_dim)
    if out is not None:
        apart = _run.given_arrays(**given, state=getattr(state, "buffer", None))
        _validate.out(out, shape, inputs.dtype, apart)
    state = _run.empty_state(state, sizes, kind)
    _run.absorb(state, inputs, tile, options)
    return _run.finish(state, home, shape, inputs.dtype, sinks, return_lse, out)


@_frameworks.taking_arrays("state")
@_device.streamed
def step_tile(
    state: AttentionState,
    q: Array,
    k_pool: Array,
    v_pool: Array,
    tile_blocks: Any,
    tile_block_counts: Any,
    *,
    tile_token_counts: Any = None,
    tile_starts: Any = None,
    seq_lens: Any = None,
    seq_starts: Any = None,
    query_start_loc: Any = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    alibi_slopes: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kernel: str = "auto",
    stream: Any = None,
) -> None:
    """Absorb one tile of K/V blocks per sequence into a state, which is modified.

    Any cut of a cache into tiles gives the result of one call; bit for bit, where the tiles hold
    multiples of 512 tokens. Runs on the state's device: arrays elsewhere are copied over.

    Parameters
    ----------
    state : AttentionState
        Modified in place.
    q : [S, Hq, D], [S, Q, Hq, D] or [tokens, Hq, D]
        The same queries for every tile; a row of the state for each query token.
    k_pool, v_pool : [N, B, Hkv, D], [N, B, Hkv, Dv]
        The blocks that are resident now, as in `paged_attention`.
    tile_blocks : int32 [S, T]
        Block ids of each sequence's tile; entries past the count are never read.
    tile_block_counts : int32 [S]
        Blocks of each row in use; a row with 0 keeps its state, bit for bit.
    tile_token_counts : int32 [S], optional
        Valid tokens of each row's tile, ``tile_block_counts * B`` by default.
    tile_starts : int32 [S], optional
        Position of each tile's first token in its sequence, by default 0.
    seq_lens : int32 [S], optional
        Tokens of each whole sequence, by default those up to the end of this tile. A window, ALiBi
        and several causal queries need both positions; `seq_starts` needs `tile_starts`.
    seq_starts, query_start_loc, causal, scale : optional
        As in `paged_attention`, the same for every tile.
    softcap, sliding_window, alibi_slopes, k_scale, v_scale : optional
        As in `paged_attention`, the same for every tile.
    kernel, stream : optional
        As in `paged_attention`.

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
    _validate_state.is_state("state", state, AttentionState)
    positions = {"tile_starts": tile_starts, "seq_lens": seq_lens, "seq_starts": seq_starts}
    given = _run.given_arrays(
        q=q,
        k_pool=k_pool,
        v_pool=v_pool,
        tile_blocks=tile_blocks,
        tile_block_counts=tile_block_counts,
        tile_token_counts=tile_token_counts,
        query_start_loc=query_start_loc,
        alibi_slopes=alibi_slopes,
        k_scale=k_scale,
        v_scale=v_scale,
        **positions,
    )
    home = _device.home(**given)
    _validate_options.launch(state.device, kernel, stream)
    inputs = _run.inputs(q, k_pool, v_pool, query_start_loc)
    sizes = inputs.sizes
    options = _validate_options.options(
        sizes,
        scale=scale,
        softcap=softcap,
        sliding_window=sliding_window,
        causal=causal,
        alibi_slopes=alibi_slopes,
        k_scale=k_scale,
        v_scale=v_scale,
        kernel=kernel,
    )
    _validate_state.state_fits(state, sizes)
    tables = _arrays.integers("tile_blocks", tile_blocks)
    counts = _arrays.integers("tile_block_counts", tile_block_counts)
    tokens = None
    if tile_token_counts is not None:
        tokens = _arrays.integers("tile_token_counts", tile_token_counts)
    _validate.tile(sizes, tables, counts, tokens)
    if tokens is None:
        tokens = _arrays.times(counts, sizes.block_size)
    starts, lens, first = _validate_options.tile_positions(options, sizes, tokens, positions)
    tile = Tile(
        tables,
        _arrays.as_int32(tokens),
        starts=starts,
        seq_lens=lens,
        seq_starts=first,
        query_starts=inputs.query_starts,
        num_queries=sizes.num_queries,
    )
    if home == "cpu":
        _validate.block_ids("tile_blocks", tile, options, sizes)
    _run.absorb(state, inputs, tile, options)
