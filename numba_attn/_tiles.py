"""Tables and lengths -> tiles: which blocks are resident together, and what is attended to there.

The order is split by split, for all sequences, so that sequences with a common prefix meet in a
tile. A tile is as many whole splits as it has room for: then results have the bits of one call.
Only a split that has no room alone is cut, between blocks.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import NamedTuple

import numpy as np

from . import _plan
from ._call import Tile
from ._types import LongArray

REMEMBERED_BYTES = 1 << 24
"""Most memory for tiles that are kept: the next layer asks for the same ones."""


@dataclasses.dataclass
class Resident:
    """A tile, and the blocks that it is made of."""

    ids: LongArray  # [n], ascending
    tile: Tile  # its tables hold places in `ids`
    table_blocks: int  # entries of the table that it stands for
    cut: _plan.Cut | None = None  # its work items, once a backend has asked for them


class _Units(NamedTuple):
    """Splits, or pieces of them, in the order in which they are read; int64 [n]."""

    seq: LongArray
    begin: LongArray  # tokens, counted from the first of the sequence's table
    end: LongArray
    origin: LongArray  # where a split begins, in a tile that begins with this unit
    column: LongArray  # of the first block
    blocks: LongArray


class Tiles:
    """The tiles of a batch. They are made when they are asked for, by any thread.

    Parameters
    ----------
    whole : Tile
        All that is to be attended to, on the host.
    sliding_window, causal
        What is not attended to is not in any tile.
    block_size : int
        B.
    split_tokens : int
        Those of the device.
    most_blocks : int
        Room of a tile.

    Examples
    --------
    >>> tables, lens = np.array([[7, 2, 9, 4]], np.int32), np.array([50], np.int32)
    >>> tiles = Tiles(Tile(tables, lens), 0, True, block_size=16, split_tokens=32, most_blocks=3)
    >>> [tiles.get(i).ids.tolist() for i in range(2)], tiles.get(2)
    ([[2, 7], [4, 9]], None)
    >>> tiles.get(1).tile.tables.tolist(), tiles.get(1).tile.starts.tolist()
    ([[1, 0]], [32])
    """

    def __init__(
        self,
        whole: Tile,
        sliding_window: int,
        causal: bool,
        *,
        block_size: int,
        split_tokens: int,
        most_blocks: int,
    ) -> None:
        starts = whole.starts
        self._starts = np.zeros_like(whole.token_counts) if starts is None else starts
        lens = self._starts + whole.token_counts if whole.seq_lens is None else whole.seq_lens
        self._whole = whole._replace(seq_lens=lens)
        self._block_size, self._most = block_size, most_blocks
        splits = _splits(self._whole, sliding_window, causal, block_size, split_tokens)
        self._units = _pieces(splits, block_size, most_blocks)
        self._blocks_before = np.concatenate([[0], np.cumsum(self._units.blocks)])
        self.table_blocks = int(self._blocks_before[-1])
        self._lock = threading.Lock()
        self._at = 0  # the first unit of the tile that is made next
        self._count = 0  # of tiles made
        self._made: dict[int, Resident] = {}
        self.reusable = self._bytes(split_tokens) <= REMEMBERED_BYTES  # to be asked for again

    def get(self, index: int) -> Resident | None:
        """Return a tile, None past the last; those before it are made with it."""
        with self._lock:
            while self._count <= index and self._at < len(self._units.seq):
                units = self._take()
                self._made[self._count] = self._resident(units)
                self._at += len(units.seq)
                self._count += 1
            return self._made.get(index) if self.reusable else self._made.pop(index, None)

    def _bytes(self, split_tokens: int) -> int:
        """Return about how much memory all tiles take, at most: each has a row per sequence."""
        num_seqs = max(1, len(self._whole.tables))
        split_blocks = min(_plan.ceil_div(split_tokens, self._block_size) + 1, self._most)
        rows = min(num_seqs, self._most // split_blocks)  # that have blocks in a tile
        width = self._most // rows + split_blocks
        num_tiles = 2 * self.table_blocks // self._most + 1  # two in a row are more than one's room
        return 4 * num_tiles * num_seqs * (width + 5)

    def _take(self) -> _Units:
        """Return the next units, as many as there is room for."""
        shared = len(self._whole.tables) > 1  # perhaps: then more than the room may fit into it
        budget = self._most * (1 + shared)
        while True:
            most = self._blocks_before[self._at] + budget
            end = int(np.searchsorted(self._blocks_before, most, side="right")) - 1
            units = _Units._make(x[self._at : end] for x in self._units)
            if not shared:
                return units
            fit = self._fit(units)
            if fit < len(units.seq) or end == len(self._units.seq):
                return _Units._make(x[:fit] for x in units)
            budget *= 2

    def _fit(self, units: _Units) -> int:
        """Count the units whose blocks, each counted once, have room together."""
        named = self._whole.tables[np.repeat(units.seq, units.blocks), _columns(units)]
        new = np.zeros(len(named), np.int64)
        new[np.unique(named, return_index=True)[1]] = 1
        used = np.cumsum(new)[np.cumsum(units.blocks) - 1]
        return int(np.searchsorted(used, self._most, side="right"))

    def _resident(self, units: _Units) -> Resident:
        """Make the tile of some units."""
        whole, num_seqs = self._whole, len(self._whole.tables)
        seq, columns = np.repeat(units.seq, units.blocks), _columns(units)
        ids, places = np.unique(whole.tables[seq, columns], return_inverse=True)
        # A row's table begins with the block that its first split begins in. What is before the
        # first token attended to is masked: it has entries, which are not read.
        rows, first = np.unique(units.seq, return_index=True)
        origin, before, end = np.zeros((3, num_seqs), np.int64)
        origin[rows] = units.origin[first]
        before[rows] = units.origin[first] // self._block_size
        np.maximum.at(end, units.seq, units.end)
        counts = np.maximum(end - before * self._block_size, 0)
        width = -(-int(counts.max()) // self._block_size)
        tables = np.zeros((num_seqs, width), np.int32)
        tables[seq, columns - before[seq]] = places
        starts = self._starts + before * self._block_size
        seq_starts = self._starts + origin
        tile = whole._replace(
            tables=tables,
            token_counts=counts.astype(np.int32),
            starts=starts.astype(np.int32),
            seq_starts=seq_starts.astype(np.int32),
        )
        ids = ids.astype(np.int64)
        ids.setflags(write=False)  # a source is given them
        return Resident(ids, tile, len(places))


def _splits(
    whole: Tile, sliding_window: int, causal: bool, block_size: int, split_tokens: int
) -> _Units:
    """Cut what is attended to into splits, in the order in which they are read."""
    ranges = _plan.key_ranges(whole, sliding_window, causal)
    num_seqs = len(whole.token_counts)
    first, end = _plan.used_tokens(ranges, num_seqs)
    origin = np.zeros(num_seqs, np.int32)
    origin[ranges.seq] = ranges.origin  # the same for all rows of a sequence
    used = _plan.Ranges(
        np.arange(num_seqs, dtype=np.int32), np.minimum(first, end), end, origin, end
    )
    items = _plan.split_items(used, split_tokens).items.astype(np.int64)
    seq, begin, stop = items[:, 1], items[:, 2], items[:, 3]
    split = (begin - origin[seq]) // split_tokens
    column = begin // block_size
    blocks = -(-stop // block_size) - column
    order = np.lexsort((seq, split))
    parts = seq, begin, stop, origin[seq] + split * split_tokens, column, blocks
    return _Units._make(x[order] for x in parts)


def _pieces(splits: _Units, block_size: int, most_blocks: int) -> _Units:
    """Cut splits that are larger than a tile."""
    count = -(-splits.blocks // most_blocks)
    piece = _ranges(np.zeros_like(count), count)
    seq, begin, end, origin, column, blocks = (np.repeat(x, count) for x in splits)
    first = column + piece * most_blocks
    blocks = np.minimum(column + blocks - first, most_blocks)
    begin = np.maximum(begin, first * block_size)
    end = np.minimum(end, (first + blocks) * block_size)
    return _Units(seq, begin, end, np.where(piece == 0, origin, begin), first, blocks)


def _columns(units: _Units) -> LongArray:
    """Return the columns of the blocks of units, one after another."""
    return _ranges(units.column, units.blocks)


def _ranges(starts: LongArray, counts: LongArray) -> LongArray:
    """Return ranges of integers, one after another.

    Examples
    --------
    >>> _ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    before = np.cumsum(counts) - counts
    found: LongArray = np.arange(int(counts.sum())) + np.repeat(starts - before, counts)
    return found
