"""Inputs of the suite.

A case is drawn as `Sequences` (the tokens themselves and the options of the call) and then laid out
as a `Paged` cache, so that one set of tokens can be put into pools of any block size and order.
Every slot, block and table entry that holds no token, or none that is attended to, is poisoned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from numba_attn import _device

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FORMATS = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")
INT8_SCALE = 1 / 32  # of what is drawn as int8
UNUSED_IDS = (2147480000, -1)
NUM_KV_HEADS = 1 if _device.is_simulator() else 2  # by default


@dataclasses.dataclass(frozen=True)
class Sequences:
    """The tokens of a batch, wherever they are stored, and how they are attended to.

    The options are named as those of `paged_attention`; None is off.
    """

    q: np.ndarray  # [S, Hq, D], [S, Q, Hq, D], or with query_counts [queries, Hq, D]
    keys: tuple[np.ndarray, ...]  # S x [tokens, Hkv, D]
    values: tuple[np.ndarray, ...]  # S x [tokens, Hkv, Dv]
    scale: float | None = None
    softcap: float | None = None
    sliding_window: int | None = None
    alibi_slopes: np.ndarray | None = None  # [Hq]
    sinks: np.ndarray | None = None  # [Hq]
    k_scale: Any = None  # a number or [Hkv]
    v_scale: Any = None
    causal: bool = True
    key_scales: tuple[np.ndarray, ...] | None = None  # S x [tokens, Hkv], in place of k_scale
    value_scales: tuple[np.ndarray, ...] | None = None
    query_counts: tuple[int, ...] | None = None  # S x queries
    starts: tuple[int, ...] | None = None  # S x the first position attended to

    @property
    def lens(self) -> np.ndarray:
        return np.array([len(keys) for keys in self.keys], np.int32)

    @property
    def queries(self) -> list[np.ndarray]:
        """The queries of each sequence, S x [Q, Hq, D]."""
        if self.query_counts is not None:
            return np.split(self.q, np.cumsum(self.query_counts)[:-1])
        return list(self.q if self.q.ndim == 4 else self.q[:, None])

    @property
    def positional(self) -> bool:
        """Whether a tile must say where it stands."""
        options = (self.sliding_window, self.alibi_slopes, self.starts, self.query_counts)
        return self.q.ndim == 4 or any(option is not None for option in options)

    def mask(self, s: int) -> np.ndarray:
        """Which keys each query of a sequence attends to, bool [Q, tokens]."""
        num_queries, tokens = len(self.queries[s]), len(self.keys[s])
        key = np.arange(tokens)[None, :]
        query = (tokens - num_queries + np.arange(num_queries))[:, None]
        seen = np.full((num_queries, tokens), True)
        if self.causal:
            seen &= key <= query
        if self.sliding_window is not None:
            seen &= query - key < self.sliding_window
        if self.starts is not None:
            seen &= key >= self.starts[s]
        return seen

    def but(self, **changes) -> Sequences:
        """Replace fields."""
        return dataclasses.replace(self, **changes)

    def rows(self, *rows: int) -> Sequences:
        """Pick sequences."""

        def pick(many):
            return None if many is None else tuple(many[row] for row in rows)

        ragged = self.query_counts is not None
        return self.but(
            q=np.concatenate(pick(self.queries)) if ragged else self.q[list(rows)],
            keys=pick(self.keys),
            values=pick(self.values),
            key_scales=pick(self.key_scales),
            value_scales=pick(self.value_scales),
            query_counts=pick(self.query_counts),
            starts=pick(self.starts),
        )

    def tokens(self, begin: int, end: int) -> Sequences:
        """Cut every sequence to tokens begin..end; their positions count anew."""

        def cut(many):
            return None if many is None else tuple(one[begin:end] for one in many)

        starts = self.starts
        if starts is not None:
            starts = tuple(np.clip(starts, begin, np.minimum(self.lens, end)) - begin)
        return self.but(
            keys=cut(self.keys),
            values=cut(self.values),
            key_scales=cut(self.key_scales),
            value_scales=cut(self.value_scales),
            starts=starts,
        )

    def map(self, change) -> Sequences:
        """Change copies of q, keys and values in place, then make them a case."""
        q, keys, values = (
            self.q.copy(),
            [k.copy() for k in self.keys],
            [v.copy() for v in self.values],
        )
        change(q, keys, values)
        return self.but(q=q, keys=tuple(keys), values=tuple(values))


class Paged(NamedTuple):
    """The arguments of `paged_attention` after q."""

    k_pool: np.ndarray  # [N, B, Hkv, D]
    v_pool: np.ndarray  # [N, B, Hkv, Dv]
    block_tables: np.ndarray  # [S, max_blocks]
    seq_lens: np.ndarray  # [S]


class Tile(NamedTuple):
    """The tables of `step_tile`."""

    tile_blocks: np.ndarray  # [S, T]
    tile_block_counts: np.ndarray  # [S]
    tile_token_counts: np.ndarray  # [S]
    tile_starts: np.ndarray | None = None  # [S]


class Answer(NamedTuple):
    out: np.ndarray  # [S, Hq, Dv], [S, Q, Hq, Dv] or [queries, Hq, Dv]
    lse: np.ndarray  # the same without Dv


def dtype_of(name) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, str(name), name))


def as_format(x, dtype):
    """Round numbers to a dtype; those of int8 are multiples of INT8_SCALE."""
    if dtype == np.int8:
        return np.clip(np.rint(x / INT8_SCALE), -128, 127).astype(dtype)
    return x.astype(dtype)


def draw(
    lens,
    *,
    gqa=2,
    num_kv_heads=NUM_KV_HEADS,
    head_dim=32,
    v_head_dim=None,
    seed=0,
    dtypes=BFLOAT16,
    queries=None,
    token_scales=False,
    **options,
):
    """Draw N(0, 1) tokens.

    `dtypes` is one, or those of q, K and V; `queries` is Q or the number for each sequence. An
    option that is an array by head may be given as a few numbers, which are repeated.
    """
    rng = np.random.default_rng(seed)
    if isinstance(dtypes, str | np.dtype):
        dtypes = (dtypes,) * 3
    q_dtype, k_dtype, v_dtype = map(dtype_of, dtypes)
    num_q_heads = gqa * num_kv_heads
    v_head_dim = v_head_dim or head_dim
    if isinstance(queries, tuple | list):
        axes, options["query_counts"] = (sum(queries),), tuple(queries)
    else:
        axes = (len(lens),) if queries is None else (len(lens), queries)
    # The bound is relative to a row's largest output: a single one must not cancel to nothing.
    shift = 4 if v_head_dim == 1 else 0
    q = rng.standard_normal((*axes, num_q_heads, head_dim)).astype(q_dtype)
    keys, values = (
        tuple(as_format(rng.standard_normal((n, num_kv_heads, d)) + more, dtype) for n in lens)
        for d, dtype, more in ((head_dim, k_dtype, 0), (v_head_dim, v_dtype, shift))
    )
    if token_scales:
        for name in ("key_scales", "value_scales"):
            scales = (rng.uniform(0.5, 2, (n, num_kv_heads)).astype(np.float32) for n in lens)
            options[name] = tuple(scales)
    sizes = {"alibi_slopes": num_q_heads, "sinks": num_q_heads}
    for name in ("k_scale", "v_scale"):
        if np.ndim(options.get(name)):
            sizes[name] = num_kv_heads
    for name, size in sizes.items():
        if options.get(name) is not None:
            options[name] = np.resize(np.asarray(options[name], np.float32), size)
    return Sequences(q, keys, values, **options)


def poison(shape, dtype, fill):
    """Fill memory that must not be read; int8 has no NaN."""
    return np.full(shape, 101 if dtype == np.int8 else fill, dtype)


def place(
    seqs: Sequences, block_size: int, *, seed=0, fill=np.nan, ids=UNUSED_IDS, spare=2, whole=False
) -> Paged:
    """Put tokens into shuffled blocks of a pool; `fill` and `ids` go where no token is.

    Nor are tokens placed that no query attends to, unless the `whole` is asked for.
    """
    rng = np.random.default_rng(seed)
    lens = seqs.lens
    counts = -(-lens // block_size)
    order = rng.permutation(counts.sum() + spare).astype(np.int32)  # `spare` stay unused
    tables = np.empty((len(lens), counts.max(initial=0) + 1), np.int32)
    tables.flat = np.resize(np.array(ids, np.int32), tables.size)

    k_pool, v_pool = (
        poison((len(order), block_size, *rows[0].shape[1:]), rows[0].dtype, fill)
        for rows in (seqs.keys, seqs.values)
    )
    for s, first in enumerate(np.cumsum(counts) - counts):
        blocks = order[first : first + counts[s]]
        token = np.arange(lens[s])
        token = token if whole else token[seqs.mask(s).any(axis=0)]
        column = token // block_size
        tables[s, column] = blocks[column]
        where = blocks[column], token % block_size
        k_pool[where], v_pool[where] = seqs.keys[s][token], seqs.values[s][token]
    return Paged(k_pool, v_pool, tables, lens)


def place_scales(scales, paged: Paged) -> np.ndarray:
    """Put the scales of tokens where the tokens are: float32 [N, B, Hkv], NaN elsewhere."""
    num_blocks, block_size, num_kv_heads = paged.k_pool.shape[:3]
    pool = np.full((num_blocks, block_size, num_kv_heads), np.nan, np.float32)
    for s, rows in enumerate(scales):
        token = np.arange(len(rows))
        block = paged.block_tables[s, token // block_size]
        held = (block >= 0) & (block < num_blocks)
        pool[block[held], token[held] % block_size] = rows[held]
    return pool


def tiles(paged: Paged, blocks: int) -> Iterator[Tile]:
    """Cut a cache into tiles of so many blocks a row."""
    block_size, columns = paged.k_pool.shape[1], paged.block_tables.shape[1]
    for first in range(0, columns, blocks):
        starts = np.minimum(first * block_size, paged.seq_lens)
        tokens = np.clip(paged.seq_lens - starts, 0, blocks * block_size)
        counts = -(-tokens // block_size)
        yield Tile(paged.block_tables[:, first : first + blocks], counts, tokens, starts)


def options_of(seqs: Sequences, paged: Paged) -> dict[str, Any]:
    """Return the options that `paged_attention` and `step_tile` share, but those that are off."""
    options = {
        name: getattr(seqs, name)
        for name in ("scale", "softcap", "sliding_window", "alibi_slopes", "k_scale", "v_scale")
    }
    if seqs.key_scales is not None:
        options["k_scale"] = place_scales(seqs.key_scales, paged)
    if seqs.value_scales is not None:
        options["v_scale"] = place_scales(seqs.value_scales, paged)
    if seqs.query_counts is not None:
        options["query_start_loc"] = np.cumsum([0, *seqs.query_counts], dtype=np.int32)
    if seqs.starts is not None:
        options["seq_starts"] = np.array(seqs.starts, np.int32)
    if not seqs.causal:
        options["causal"] = False
    return {name: value for name, value in options.items() if value is not None}


def sinks_of(seqs: Sequences) -> dict[str, Any]:
    return {} if seqs.sinks is None else {"sinks": seqs.sinks}


def attend(backend, seqs: Sequences, paged: Paged, **options) -> Answer:
    """Attend in one call."""
    options = options_of(seqs, paged) | sinks_of(seqs) | {"return_lse": True} | options
    return Answer(*backend.paged_attention(seqs.q, *paged, **options))


def step(backend, state, seqs: Sequences, paged: Paged, tile: Tile) -> None:
    """Absorb one tile."""
    options = options_of(seqs, paged)
    if seqs.positional:
        options |= {"tile_starts": tile.tile_starts, "seq_lens": paged.seq_lens}
    backend.step_tile(
        state,
        seqs.q,
        *paged[:2],
        *tile[:2],
        tile_token_counts=tile.tile_token_counts,
        **options,
    )


def absorb(backend, seqs: Sequences, paged: Paged, tile_list=None):
    """Make a state and absorb the tiles, by default the whole cache as one."""
    state = backend.like(seqs.q, paged.v_pool)
    for tile in tiles(paged, paged.block_tables.shape[1]) if tile_list is None else tile_list:
        step(backend, state, seqs, paged, tile)
    return state


def finish(backend, seqs: Sequences, state) -> Answer:
    """Normalise a state: out [queries, Hq, Dv] in the dtype of q, sinks included."""
    return Answer(
        *backend.finalize(state, dtype=seqs.q.dtype, return_lse=True, **sinks_of(seqs)),
    )
