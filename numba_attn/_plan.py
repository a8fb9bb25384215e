"""Shapes and lengths -> work items, in plain ints and int32 arrays; no Numba, testable alone.

The cut depends on token counts only, never on the device, the threads, the batch or the block
size: that is what makes results bit-identical across all of them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ._types import IntArray

SPLIT_TOKENS = 512
"""Tokens of one work item, counted from the first token of the call's range."""

GROUP_TOKENS = 16
"""Tokens absorbed at a time (one maximum, one rescale), counted from the split's start."""


class Sizes(NamedTuple):
    """The sizes of one call, in the letters of the field."""

    num_seqs: int  # S
    num_q_heads: int  # Hq
    num_kv_heads: int  # Hkv
    head_dim: int  # D, of q and k
    v_head_dim: int  # Dv
    num_blocks: int  # N
    block_size: int  # B

    @property
    def gqa_ratio(self) -> int:
        """Query heads per kv head, G."""
        return self.num_q_heads // self.num_kv_heads


def ceil_div(a: int, b: int) -> int:
    """Return the quotient rounded up."""
    return -(-a // b)


def split_starts(token_counts: IntArray, split_tokens: int = SPLIT_TOKENS) -> IntArray:
    """Count the splits of a batch.

    Parameters
    ----------
    token_counts : int32 [S]
        Tokens of each sequence in this call.
    split_tokens : int
        Length of a split.

    Returns
    -------
    int32 [S + 1]
        The splits of sequence s are ``starts[s]`` to ``starts[s + 1]``, exclusive.

    Examples
    --------
    >>> split_starts(np.array([512, 0, 513], np.int32)).tolist()
    [0, 1, 1, 3]
    """
    starts = np.zeros(len(token_counts) + 1, np.int32)
    np.cumsum(-(-token_counts // split_tokens), out=starts[1:])
    return starts


def split_items(
    starts: IntArray, token_counts: IntArray, split_tokens: int = SPLIT_TOKENS
) -> IntArray:
    """List the splits as work items.

    Returns
    -------
    int32 [n, 3]
        Sequence, first token, end token (exclusive) of each split.

    Examples
    --------
    >>> lens = np.array([3, 0, 700], np.int32)
    >>> split_items(split_starts(lens), lens).tolist()
    [[0, 0, 3], [2, 0, 512], [2, 512, 700]]
    """
    items = np.empty((int(starts[-1]), 3), np.int32)
    seq = np.repeat(np.arange(len(token_counts), dtype=np.int32), np.diff(starts))
    begin = (np.arange(len(items), dtype=np.int32) - starts[seq]) * split_tokens
    items[:, 0] = seq
    items[:, 1] = begin
    items[:, 2] = begin + np.minimum(split_tokens, token_counts[seq] - begin)
    return items


def cut(token_counts: IntArray) -> tuple[IntArray, IntArray]:
    """Return `split_starts` and `split_items`, read-only; the last few cuts are remembered.

    A model asks for the same cut layer after layer.

    Examples
    --------
    >>> starts, items = cut(np.array([513], np.int32))
    >>> starts.tolist(), items.tolist()
    ([0, 2], [[0, 0, 512], [0, 512, 513]])
    """
    return _cut(token_counts.tobytes())


def one_each(num_seqs: int) -> IntArray:
    """Return the starts of one partial per sequence, read-only as those of `cut`."""
    starts = np.arange(num_seqs + 1, dtype=np.int32)
    starts.setflags(write=False)
    return starts


@functools.lru_cache(maxsize=16)
def _cut(token_counts: bytes) -> tuple[IntArray, IntArray]:
    counts = np.frombuffer(token_counts, np.int32)
    starts = split_starts(counts)
    items = split_items(starts, counts)
    starts.setflags(write=False)
    items.setflags(write=False)
    return starts, items


CUDA_SPLIT_TOKENS = 128
"""Tokens of one split in the CUDA twin; a divisor of `SPLIT_TOKENS`."""

CUDA_MAX_HEAD_DIM = 512
"""Largest D and Dv of the CUDA twin: K/V tiles of 16 rows must fit 48 KiB of shared memory."""

_CUDA_MAX_THREADS = 128
_WARP = 32


class Span(NamedTuple):
    """An array as one run of memory, in elements."""

    size: int  # from its lowest to its highest address
    offset: int  # of element [0, 0, ...] from the lowest address
    strides: tuple[int, ...]  # 0 for an axis of one element


def span(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Span:
    """Return the run of memory that a strided array lies in.

    Parameters
    ----------
    shape, strides : tuple of int
        As in NumPy: strides in bytes, possibly negative.
    itemsize : int
        Bytes of an element.

    Raises
    ------
    ValueError
        If a stride is no multiple of the item size.

    Examples
    --------
    >>> span((3, 4), (-16, 2), 2)
    Span(size=20, offset=16, strides=(-8, 1))
    """
    if 0 in shape:
        return Span(0, 0, (0,) * len(shape))
    if any(n > 1 and s % itemsize for n, s in zip(shape, strides, strict=True)):
        raise ValueError(
            f"strides must be multiples of the {itemsize} bytes of an element on CUDA, got strides "
            f"{tuple(strides)} of shape {tuple(shape)}; copy the array"
        )
    steps = tuple(s // itemsize if n > 1 else 0 for n, s in zip(shape, strides, strict=True))
    reach = [(n - 1) * step for n, step in zip(shape, steps, strict=True)]
    offset = -sum(min(r, 0) for r in reach)
    return Span(1 + sum(abs(r) for r in reach), offset, steps)


class StepVariant(NamedTuple):
    """What a CUDA step kernel is compiled for."""

    head_dim: int  # D
    v_head_dim: int  # Dv
    wide: bool  # rows are loaded 16 bytes at a time, else 2

    @property
    def threads(self) -> int:
        """Threads of a block: whole warps, one thread a column where that suffices."""
        columns = max(self.head_dim, self.v_head_dim)
        return min(_WARP * ceil_div(columns, _WARP), _CUDA_MAX_THREADS)


def step_variant(
    addresses: tuple[int, int],
    strides: tuple[tuple[int, ...], tuple[int, ...]],
    head_dims: tuple[int, int],
) -> StepVariant:
    """Choose the step kernel for a pair of pools.

    Parameters
    ----------
    addresses : (int, int)
        Of the first elements of k_pool and v_pool.
    strides : two tuples of int
        In elements of 2 bytes, of all axes but the last; 0 for an axis of one element.
    head_dims : (int, int)
        D and Dv.

    Raises
    ------
    ValueError
        If D or Dv is above 512.

    Examples
    --------
    >>> step_variant((64, 4096), ((2048, 128, 64), (2048, 128, 64)), (64, 64))
    StepVariant(head_dim=64, v_head_dim=64, wide=True)
    >>> step_variant((64, 4098), ((60, 20, 20), (60, 20, 20)), (20, 20))
    StepVariant(head_dim=20, v_head_dim=20, wide=False)
    """
    if max(head_dims) > CUDA_MAX_HEAD_DIM:
        raise ValueError(
            f"q: D and Dv must be at most {CUDA_MAX_HEAD_DIM} on CUDA, got D = {head_dims[0]} and "
            f"Dv = {head_dims[1]}; use device='cpu'"
        )
    in_bytes = (*addresses, *(2 * n for n in (*head_dims, *strides[0], *strides[1])))
    return StepVariant(*head_dims, wide=all(n % 16 == 0 for n in in_bytes))
