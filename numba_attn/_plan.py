"""Shapes and lengths -> work items, in plain ints and int32 arrays; no Numba, testable alone.

The cut depends on token counts only, never on the device, the threads, the batch or the block
size: that is what makes results bit-identical across all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from ._call import Tile
from ._types import IntArray

SPLIT_TOKENS = 512
"""Tokens of one work item, counted from the first token that the sequence may attend to."""

GROUP_TOKENS = 16
"""Tokens absorbed at a time (one maximum, one rescale), counted from the split's start."""


class Sizes(NamedTuple):
    """The sizes of one call, in the letters of the field."""

    num_seqs: int  # S
    num_rows: int  # query tokens of the batch
    num_queries: int  # Q of each sequence; 0 where they differ
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


class Ranges(NamedTuple):
    """The tokens that each row attends to, counted from the first of its sequence's table.

    A row is one query token. All int32 [rows].
    """

    seq: IntArray
    begin: IntArray
    end: IntArray  # exclusive; begin where the row attends to none
    origin: IntArray  # from where its splits are counted
    query: IntArray  # where the query itself stands


def key_ranges(tile: Tile, sliding_window: int = 0, causal: bool = True) -> Ranges:
    """Find the tokens of each row: all that are after its start, in its window, not after itself.

    Examples
    --------
    >>> tile = Tile(None, np.array([9, 2], np.int32), num_queries=2)
    >>> ranges = key_ranges(tile, sliding_window=4)
    >>> ranges.seq.tolist(), ranges.begin.tolist(), ranges.end.tolist()
    ([0, 0, 1, 1], [4, 5, 0, 0], [8, 9, 1, 2])
    """
    counts = tile.token_counts.astype(np.int64)
    zero = np.zeros_like(counts)
    starts = zero if tile.starts is None else tile.starts
    lens = starts + counts if tile.seq_lens is None else tile.seq_lens
    first = zero if tile.seq_starts is None else tile.seq_starts
    if tile.query_starts is None:
        queries = zero + tile.num_queries
        rows_before = np.arange(len(counts)) * tile.num_queries
    else:
        queries = np.diff(tile.query_starts)
        rows_before = tile.query_starts[:-1]
    seq = np.repeat(np.arange(len(counts)), queries)
    position = (lens - queries - rows_before)[seq] + np.arange(len(seq))
    low = np.maximum(first[seq], position - sliding_window + 1) if sliding_window else first[seq]
    high = np.minimum(lens[seq], position + 1) if causal else lens[seq]
    start, count = starts[seq], counts[seq]
    begin = np.clip(low - start, 0, count)
    end = np.maximum(np.minimum(high - start, count), begin)
    origin = np.minimum(np.maximum(first[seq] - start, 0), count)
    return Ranges(*(x.astype(np.int32) for x in (seq, begin, end, origin, position - start)))


def used_tokens(ranges: Ranges, num_seqs: int) -> tuple[IntArray, IntArray]:
    """Return the first token [S] that any row of a sequence attends to, and the end [S]."""
    seq, begin, end, _, _ = ranges
    first = np.full(num_seqs, np.iinfo(np.int32).max, np.int32)
    last = np.zeros_like(first)
    used = end > begin
    np.minimum.at(first, seq[used], begin[used])
    np.maximum.at(last, seq[used], end[used])
    return first, last


class Cut(NamedTuple):
    """The work of a call: its splits, each one item."""

    starts: IntArray  # [rows + 1]: the partials of a row are starts[row] to starts[row + 1]
    items: IntArray  # [n, 6]: row, sequence, first token, end token, partial, query's place
    tokens: int  # of all items


def split_items(ranges: Ranges, split_tokens: int = SPLIT_TOKENS) -> Cut:
    """Cut each row's tokens into splits, which are counted from the row's origin.

    The items of one sequence and split, which read the same keys, come together.

    Examples
    --------
    >>> lens = np.array([3, 0, 700], np.int32)
    >>> split_items(key_ranges(Tile(None, lens))).items.tolist()
    [[0, 0, 0, 3, 0, 2], [2, 2, 0, 512, 1, 699], [2, 2, 512, 700, 2, 699]]
    """
    seq, begin, end, origin, query = ranges
    first = (begin - origin) // split_tokens
    last = -(-(end - origin) // split_tokens)
    counts = np.where(end > begin, last - first, 0)
    starts = np.zeros(len(seq) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    part = np.arange(starts[-1], dtype=np.int32)
    row = np.repeat(np.arange(len(seq), dtype=np.int32), counts)
    split = part - starts[row] + first[row]
    split_begin = origin[row] + split * split_tokens
    low = np.maximum(begin[row], split_begin)
    high = low + np.minimum(end[row] - low, split_begin - low + split_tokens)
    items = np.stack([row, seq[row], low, high, part, query[row]], axis=1)
    if len(seq) and np.any(seq[1:] == seq[:-1]):
        items = items[np.lexsort((row, split, seq[row]))]
    return Cut(starts, np.ascontiguousarray(items, np.int32), int(np.sum(high - low, dtype=int)))


def cut(tile: Tile, sliding_window: int = 0, causal: bool = True) -> Cut:
    """Return the `split_items` of a tile, read-only; the last few cuts are remembered.

    A model asks for the same cut layer after layer.

    Examples
    --------
    >>> starts, items, tokens = cut(Tile(None, np.array([513], np.int32)))
    >>> starts.tolist(), items[:, 2:4].tolist(), tokens
    ([0, 2], [[0, 512], [512, 513]], 513)
    """
    key = [None if array is None else array.tobytes() for array in tile[1:6]]
    return _cut(tuple(key), tile.num_queries, sliding_window, causal)


@functools.lru_cache(maxsize=16)
def _cut(key: tuple[bytes | None, ...], num_queries: int, sliding_window: int, causal: bool) -> Cut:
    arrays = (None if one is None else np.frombuffer(one, np.int32) for one in key)
    tile = Tile._make([None, *arrays, num_queries])
    found = split_items(key_ranges(tile, sliding_window, causal))
    found.starts.setflags(write=False)
    found.items.setflags(write=False)
    return found


def batches(cut: Cut, most_items: int) -> Iterable[tuple[int, int, Cut]]:
    """Split the work by rows, so that the partials of a batch fit the memory for them.

    Returns
    -------
    iterable of (int, int, Cut)
        First row, end row, and the work of these rows: at most `most_items` items, or one row.

    Examples
    --------
    >>> whole = cut(Tile(None, np.array([700, 5, 600], np.int32)))
    >>> [(first, end, len(work.items)) for first, end, work in batches(whole, 3)]
    [(0, 2, 3), (2, 3, 2)]
    """
    if len(cut.items) <= most_items:
        return ((0, len(cut.starts) - 1, cut),)
    return _batches(cut, most_items)


def _batches(cut: Cut, most_items: int) -> Iterator[tuple[int, int, Cut]]:
    first, rows = 0, len(cut.starts) - 1
    while first < rows:
        before = cut.starts[first]
        fits = int(np.searchsorted(cut.starts, before + most_items, side="right")) - 1
        end = max(first + 1, fits)
        items = cut.items[(cut.items[:, 0] >= first) & (cut.items[:, 0] < end)]
        items[:, 4] -= before
        tokens = int(np.sum(items[:, 3] - items[:, 2], dtype=int))
        if len(items):
            yield first, end, Cut(cut.starts[first : end + 1] - before, items, tokens)
        first = end


def one_each(num_rows: int) -> IntArray:
    """Return the starts of one partial per row, read-only as those of `cut`."""
    starts = np.arange(num_rows + 1, dtype=np.int32)
    starts.setflags(write=False)
    return starts
