"""Workloads as data, and inputs for them: several pools to read in turn, as a model's layers are.

A pool that was just read is still in the caches; a model comes back to it a whole token later. So
a workload is measured over pools of 512 MB together, read in turn.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from . import _buffers
from ._plan import ceil_div
from ._types import HostArray, IntArray

BLOCK_SIZE = 16
ROTATION_BYTES = 512_000_000
"""K/V bytes of all pools of a workload together, at least (where memory allows)."""

_LATENCY_BYTES = 1_000_000
"""A workload below this measures the call, not the memory; one pool is enough for it."""

_LINE = 64
"""Alignment of the pools in bytes: a cache line, as every serving system's allocator gives."""

_SHAPE = re.compile(r"(\d+),(\d+),(\d+)/(\d+),(\d+)")


@dataclasses.dataclass(frozen=True)
class Workload:
    """One decode step: a batch of sequences, one query token each."""

    name: str
    seq_lens: tuple[int, ...]  # [S] tokens in the cache
    num_q_heads: int  # Hq
    num_kv_heads: int  # Hkv
    head_dim: int  # D, of q, k and v
    block_size: int = BLOCK_SIZE  # B

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch, S."""
        return len(self.seq_lens)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys; its values take as many."""
        return self.num_kv_heads * self.head_dim * 2

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one step reads."""
        return 2 * sum(self.seq_lens) * self.token_bytes

    @property
    def measures_latency(self) -> bool:
        """Tell whether the step is so small that it measures the call, not the memory."""
        return self.kv_bytes < _LATENCY_BYTES

    @property
    def context(self) -> str:
        """The sequences' lengths in words."""
        shortest, longest = min(self.seq_lens), max(self.seq_lens)
        return str(longest) if shortest == longest else f"{shortest}..{longest}"

    def describe(self) -> str:
        """Return the shape in words."""
        return (
            f"{self.num_seqs} x context {self.context}, {self.num_q_heads}/{self.num_kv_heads} "
            f"heads, head_dim {self.head_dim}"
        )

    def num_pools(self, rotation_bytes: int = ROTATION_BYTES) -> int:
        """Count the pools to read in turn, so that K/V come from memory."""
        return 1 if self.measures_latency else ceil_div(rotation_bytes, self.kv_bytes)

    def cut(self, kv_bytes: int) -> Workload:
        """Shorten the sequences until a step reads at most `kv_bytes` (or one token each)."""
        if self.kv_bytes <= kv_bytes:
            return self
        lens = tuple(max(1, n * kv_bytes // self.kv_bytes) for n in self.seq_lens)
        return dataclasses.replace(self, seq_lens=lens)


_RAGGED = (
    *(3013, 1285, 828, 1395, 1741, 2943, 1854, 775),
    *(1504, 2300, 2940, 2686, 3479, 1063, 3141, 665),
)

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W0", (16,), 32, 8, 128),
        Workload("W1", (32768,), 32, 8, 128),
        Workload("W2", _RAGGED, 32, 8, 128),
        Workload("W3", (4096,) * 4, 32, 32, 128),
        Workload("W4", (16384,), 64, 8, 128),
        Workload("W5", (1024,) * 8, 28, 4, 128),
        Workload("W6", (4096,) * 4, 16, 16, 64),
    )
}


def parse_shape(text: str) -> Workload:
    """Read a workload written as ``S,context,Hq/Hkv,D``.

    Raises
    ------
    ValueError
        If the text has another form, a size is 0, or Hkv does not divide Hq.

    Examples
    --------
    >>> parse_shape("2,300,32/8,128").seq_lens
    (300, 300)
    """
    form = "S,context,Hq/Hkv,D, such as 1,8192,32/8,128"
    if (match := _SHAPE.fullmatch(text.replace(" ", ""))) is None:
        raise ValueError(f"expected {form}, got {text!r}")
    num_seqs, context, num_q_heads, num_kv_heads, head_dim = map(int, match.groups())
    if 0 in (num_seqs, context, num_q_heads, num_kv_heads, head_dim):
        raise ValueError(f"expected {form}, with every number at least 1, got {text!r}")
    if num_q_heads % num_kv_heads:
        raise ValueError(
            f"Hkv must divide Hq, got Hq={num_q_heads}, Hkv={num_kv_heads} in {text!r}"
        )
    return Workload("own", (context,) * num_seqs, num_q_heads, num_kv_heads, head_dim)


@dataclasses.dataclass(frozen=True)
class Step:
    """The arrays of one decode step, in the order `paged_attention` takes them."""

    q: Any  # bfloat16 [S, Hq, D]
    k_pool: Any  # bfloat16 [N, B, Hkv, D]
    v_pool: Any  # bfloat16 [N, B, Hkv, D]
    block_tables: Any  # int32 [S, max_blocks]
    seq_lens: Any  # int32 [S]

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of `paged_attention`."""
        return self.q, self.k_pool, self.v_pool, self.block_tables, self.seq_lens


def make_steps(
    workload: Workload,
    num_pools: int,
    *,
    seed: int = 0,
    on_pool: Callable[[int], None] = lambda done: None,
) -> list[Step]:
    """Make one step per pool: N(0, 1) values, every pool with its own shuffled block table."""
    rng = np.random.default_rng(seed)
    heads = (workload.num_kv_heads, workload.head_dim)
    lens = np.array(workload.seq_lens, np.int32)
    blocks = -(-lens // workload.block_size)
    pool_shape = (int(blocks.sum()), workload.block_size, *heads)
    sample = normal(rng, (1 << 20,))
    q = normal(rng, (workload.num_seqs, workload.num_q_heads, workload.head_dim))
    steps = []
    for done in range(num_pools):
        on_pool(done)
        k_pool, v_pool = (
            fill(rng, sample, _buffers.empty(pool_shape, sample.dtype, _LINE)) for _ in range(2)
        )
        steps.append(Step(q, k_pool, v_pool, _shuffled_tables(rng, blocks), lens))
    return steps


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> HostArray:
    """Draw N(0, 1) values in bfloat16."""
    values: HostArray = rng.standard_normal(shape, dtype=np.float32).astype(ml_dtypes.bfloat16)
    return values


def fill(rng: np.random.Generator, sample: HostArray, array: HostArray) -> HostArray:
    """Fill a contiguous array with pieces of `sample`, each begun at a random place (fast)."""
    flat = array.reshape(-1)
    position = 0
    while position < flat.size:
        start = int(rng.integers(sample.size))
        piece = sample[start : start + flat.size - position]
        flat[position : position + piece.size] = piece
        position += piece.size
    return array


def _shuffled_tables(rng: np.random.Generator, blocks: IntArray) -> IntArray:
    """Deal all blocks of a pool to the sequences at random; unused entries are -1."""
    order = rng.permutation(int(blocks.sum())).astype(np.int32)
    tables = np.full((len(blocks), int(blocks.max())), -1, np.int32)
    ends = np.cumsum(blocks)
    for row, end, count in zip(tables, ends, blocks, strict=True):
        row[:count] = order[end - count : end]
    return tables
