"""Inputs and the error bound of the suite.

A case is drawn as `Sequences` (the tokens themselves) and then laid out as a `Paged` cache, so that
one set of tokens can be put into pools of any block size and order. Every slot, block and table
entry that holds no token is poisoned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np

from numba_attn import _device

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
UNUSED_IDS = (2147480000, -1)
NUM_KV_HEADS = 1 if _device.is_simulator() else 2  # by default


@dataclasses.dataclass(frozen=True)
class Sequences:
    """The tokens of a batch, wherever they are stored."""

    q: np.ndarray  # [S, Hq, D]
    keys: tuple[np.ndarray, ...]  # S x [tokens, Hkv, D]
    values: tuple[np.ndarray, ...]  # S x [tokens, Hkv, Dv]
    scale: float | None = None

    @property
    def lens(self) -> np.ndarray:
        return np.array([len(keys) for keys in self.keys], np.int32)

    def rows(self, *rows: int) -> Sequences:
        keys = tuple(self.keys[row] for row in rows)
        values = tuple(self.values[row] for row in rows)
        return dataclasses.replace(self, q=self.q[list(rows)], keys=keys, values=values)

    def tokens(self, begin: int, end: int) -> Sequences:
        """Cut every sequence to tokens begin..end."""
        keys = tuple(keys[begin:end] for keys in self.keys)
        values = tuple(values[begin:end] for values in self.values)
        return dataclasses.replace(self, keys=keys, values=values)

    def map(self, change) -> Sequences:
        """Change copies of q, keys and values in place, then make them a case."""
        q, keys, values = (
            self.q.copy(),
            [k.copy() for k in self.keys],
            [v.copy() for v in self.values],
        )
        change(q, keys, values)
        return dataclasses.replace(self, q=q, keys=tuple(keys), values=tuple(values))


class Paged(NamedTuple):
    """The arguments of `paged_attention` after q."""

    k_pool: np.ndarray  # [N, B, Hkv, D]
    v_pool: np.ndarray  # [N, B, Hkv, Dv]
    block_tables: np.ndarray  # [S, max_blocks]
    seq_lens: np.ndarray  # [S]


class Tile(NamedTuple):
    """The arguments of `step_tile` after the pools."""

    tile_blocks: np.ndarray  # [S, T]
    tile_block_counts: np.ndarray  # [S]
    tile_token_counts: np.ndarray  # [S]


class Answer(NamedTuple):
    out: np.ndarray  # [S, Hq, Dv]
    lse: np.ndarray  # [S, Hq]


def draw(
    lens, *, gqa=2, num_kv_heads=NUM_KV_HEADS, head_dim=32, v_head_dim=None, seed=0, scale=None
):
    """Draw N(0, 1) tokens in bfloat16."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(BFLOAT16)

    q = normal(len(lens), gqa * num_kv_heads, head_dim)
    keys = tuple(normal(n, num_kv_heads, head_dim) for n in lens)
    values = tuple(normal(n, num_kv_heads, v_head_dim or head_dim) for n in lens)
    if (v_head_dim or head_dim) == 1:
        # The bound is relative to a row's largest output: a single one must not cancel to nothing.
        values = tuple(v + v.dtype.type(4) for v in values)
    return Sequences(q, keys, values, scale)


def place(
    seqs: Sequences, block_size: int, *, seed=0, fill=np.nan, ids=UNUSED_IDS, spare=2
) -> Paged:
    """Put tokens into shuffled blocks of a pool; `fill` and `ids` go where no token is."""
    rng = np.random.default_rng(seed)
    lens = seqs.lens
    counts = -(-lens // block_size)
    order = rng.permutation(counts.sum() + spare).astype(np.int32)  # `spare` stay unused
    tables = np.empty((len(lens), counts.max(initial=0) + 1), np.int32)
    tables.flat = np.resize(np.array(ids, np.int32), tables.size)

    def pool(rows):
        shape = (len(order), block_size, *rows[0].shape[1:])
        return np.full(shape, fill, BFLOAT16)

    k_pool, v_pool = pool(seqs.keys), pool(seqs.values)
    for s, first in enumerate(np.cumsum(counts) - counts):
        blocks = order[first : first + counts[s]]
        tables[s, : counts[s]] = blocks
        token = np.arange(lens[s])
        where = blocks[token // block_size], token % block_size
        k_pool[where], v_pool[where] = seqs.keys[s], seqs.values[s]
    return Paged(k_pool, v_pool, tables, lens)


def tiles(paged: Paged, blocks: int) -> Iterator[Tile]:
    """Cut a cache into tiles of so many blocks a row."""
    block_size, columns = paged.k_pool.shape[1], paged.block_tables.shape[1]
    for first in range(0, columns, blocks):
        tokens = np.clip(paged.seq_lens - first * block_size, 0, blocks * block_size)
        counts = -(-tokens // block_size)
        yield Tile(paged.block_tables[:, first : first + blocks], counts, tokens)


def attend(backend, seqs: Sequences, paged: Paged, **options) -> Answer:
    """Attend in one call."""
    options = {"scale": seqs.scale, "return_lse": True} | options
    return Answer(*backend.paged_attention(seqs.q, *paged, **options))


def step(backend, state, seqs: Sequences, paged: Paged, tile: Tile) -> None:
    """Absorb one tile."""
    blocks, counts, tokens = tile
    backend.step_tile(
        state,
        seqs.q,
        paged.k_pool,
        paged.v_pool,
        blocks,
        counts,
        tile_token_counts=tokens,
        scale=seqs.scale,
    )


def absorb(backend, seqs: Sequences, paged: Paged, tile_list=None):
    """Make a state and absorb the tiles, by default the whole cache as one."""
    state = backend.like(seqs.q, paged.v_pool)
    for tile in tiles(paged, paged.block_tables.shape[1]) if tile_list is None else tile_list:
        step(backend, state, seqs, paged, tile)
    return state


def dense(seqs: Sequences, dtype=np.float64) -> Answer:
    """Evaluate the two-pass softmax on the widened tokens; in float32 it is the bound's "plain"."""
    num_q_heads, head_dim = seqs.q.shape[1:]
    num_kv_heads, v_head_dim = seqs.values[0].shape[1:]
    scale = dtype(1 / np.sqrt(head_dim) if seqs.scale is None else seqs.scale)
    out = np.zeros((len(seqs.q), num_q_heads, v_head_dim), dtype)
    lse = np.full(out.shape[:2], -np.inf, dtype)
    for s, n in enumerate(seqs.lens):
        q, k, v = (x[s].astype(dtype) for x in (seqs.q, seqs.keys, seqs.values))
        for h in range(num_q_heads if n else 0):
            kv = h // (num_q_heads // num_kv_heads)
            with np.errstate(invalid="ignore"):
                logits = scale * (k[:, kv] @ q[h])
                m = logits.max()
                if m == -np.inf:
                    continue
                p = np.exp(logits - m)
                out[s, h] = p @ v[:, kv] / p.sum()
                lse[s, h] = m + np.log(p.sum())
    return Answer(out, lse)
