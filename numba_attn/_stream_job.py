"""One pass over a source: its tiles are dealt in order, and folded in order."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from ._stream_call import Keys
from ._tiles import Resident, Tiles
from ._types import Array
from .sources import Layout


class Stopped(Exception):
    """The job has failed elsewhere, or was cancelled."""


class Buffer:
    """Memory for the blocks of a tile."""

    def __init__(self, memory: Array, layout: Layout) -> None:
        self.memory = memory  # uint8, on the host
        self.k, self.v = layout.pools(memory)  # [n, B, Hkv, D], [n, B, Hkv, Dv]
        self.staging: Any = None  # what a device keeps with it


@dataclasses.dataclass(frozen=True)
class Dealt:
    """A tile that a worker has, and its buffer."""

    index: int
    resident: Resident
    buffer: Buffer
    is_read: bool = False


def _nothing() -> None:
    """Do what is left to do where all is done."""


class Absorbed(NamedTuple):
    """What is left to do with a tile that a stage has absorbed."""

    fold: Callable[[], None] = _nothing  # in the turn of the tile; by whichever thread
    wait: Callable[[], None] = _nothing  # until the buffer may be put back


class Job:
    """The tiles of a pass.

    Workers take them, read them, absorb them, and fold them in order. Before it is started with a
    stage, the first tiles may be read, and are held. The first error stops all workers.

    Parameters
    ----------
    keys : Keys
    tiles : Tiles
    free : list of Buffer
        Those of the workers that no tile has, of whichever job.
    changed : Condition
        Of the workers: guards the free buffers, and what is here.
    most_ahead : int
        Tiles from the first one that is not folded, which may be absorbed: each has partial states.
    """

    def __init__(
        self,
        keys: Keys,
        tiles: Tiles,
        free: list[Buffer],
        changed: threading.Condition,
        most_ahead: int,
    ) -> None:
        self.keys, self.tiles = keys, tiles
        self.stage: Any = None
        self.error: BaseException | None = None
        self.futures: list[Future[None]] = []
        self.blocks_folded = 0  # entries of tables
        self._free, self._changed = free, changed
        self._most_ahead = most_ahead
        self._next = self._folded = 0  # indices of tiles
        self._all_dealt = False
        self._held: list[Dealt] = []
        self._absorbed: dict[int, tuple[int, Callable[[], None]]] = {}  # table blocks, fold

    def start(self, stage: Any) -> None:
        """Give what absorbs a tile."""
        with self._changed:
            self.stage = stage
            self._changed.notify_all()

    def take(self) -> Dealt | None:
        """Return a tile: the first one held, else the next one; None at the end.

        A tile comes with a buffer: without, it might wait for those that the next job holds.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._ready or self._over)
            if self._ready:
                self._held.sort(key=lambda dealt: dealt.index)
                return self._held.pop(0)
            if self._over:
                return None
            index, buffer = self._next, self._free.pop()
            self._next += 1
        resident = self.tiles.get(index)
        if resident is not None:
            return Dealt(index, resident, buffer)
        with self._changed:
            self._all_dealt = True
            self._put_back(buffer)
        return None

    @property
    def _ready(self) -> bool:
        """Whether a tile that is held may be absorbed."""
        return self.error is None and self.stage is not None and bool(self._held)

    @property
    def _over(self) -> bool:
        """Whether no further tile is read."""
        return self.error is not None or self._all_dealt

    def put_back(self, buffer: Buffer) -> None:
        """Let a buffer be taken again."""
        with self._changed:
            self._put_back(buffer)

    def _put_back(self, buffer: Buffer) -> None:
        self._free.append(buffer)
        self._changed.notify_all()

    def hold(self, dealt: Dealt) -> bool:
        """Keep a tile that was read ahead; not any more once the job has started."""
        with self._changed:
            if self.stage is None:
                self._held.append(dealt)
            return self.stage is None

    def turn(self, index: int) -> None:
        """Wait until all tiles before this one are folded."""
        with self._changed:
            self._wait_until(lambda: self._folded == index)

    def fold(self, dealt: Dealt, fold: Callable[[], None]) -> None:
        """Fold tiles as long as it is the turn of one that is absorbed; leave this one, if not."""
        with self._changed:
            self._wait_until(lambda: dealt.index < self._folded + self._most_ahead)
            self._absorbed[dealt.index] = dealt.resident.table_blocks, fold
        while (found := self._next_to_fold()) is not None:
            table_blocks, fold_next = found
            fold_next()
            with self._changed:
                self._folded += 1
                self.blocks_folded += table_blocks
                self._changed.notify_all()

    def _next_to_fold(self) -> tuple[int, Callable[[], None]] | None:
        """Return what is left of the tile whose turn it is, once, if it is absorbed."""
        with self._changed:
            return self._absorbed.pop(self._folded, None)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a change that makes it true, or for an error."""
        self._changed.wait_for(lambda: self.error is not None or condition())
        if self.error is not None:
            raise Stopped

    def stop(self, error: BaseException) -> None:
        """Note the first error; no further tile is taken."""
        with self._changed:
            if self.error is None:
                self.error = error
            self._changed.notify_all()
