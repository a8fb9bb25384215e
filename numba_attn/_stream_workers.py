"""The threads that read tiles and absorb them, and the buffers between the two."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from . import _buffers, _device
from ._stream_call import Keys
from ._stream_job import Buffer, Job, Stopped
from ._tiles import Tiles
from ._types import HostArray, LongArray
from .sources import Layout


class Workers:
    """A thread for each buffer: it reads a tile, absorbs it, has it folded in order, and so on.

    Parameters
    ----------
    layout : Layout
        Of the blocks.
    device : str
        Where they are absorbed.
    count : int
        Of threads and buffers.
    most_blocks : int
        Room of a buffer.
    """

    def __init__(self, layout: Layout, device: str, count: int, most_blocks: int) -> None:
        self.layout, self.device, self.count, self.most_blocks = layout, device, count, most_blocks
        self._pid = os.getpid()
        self._pool = ThreadPoolExecutor(count, "numba_attn reader")
        self._changed = threading.Condition()
        self._free = [
            Buffer(_memory(device, most_blocks * layout.block_bytes), layout) for _ in range(count)
        ]

    def fit(self, layout: Layout, device: str) -> bool:
        """Tell whether these can work on a pass; after a fork, the threads are the parent's."""
        return (layout, device, os.getpid()) == (self.layout, self.device, self._pid)

    def job(self, keys: Keys, tiles: Tiles) -> Job:
        """Make a job, which takes from the buffers."""
        return Job(keys, tiles, self._free, self._changed, most_ahead=2 * self.count)

    def work_on(self, job: Job) -> None:
        """Begin with the tiles of a job: with the first ones only, where it is not started yet."""
        job.futures += [self._pool.submit(self._work, job) for _ in range(self.count)]

    def end(self) -> None:
        """Wait for the threads, whose jobs have been stopped, and end them."""
        if os.getpid() == self._pid:
            self._pool.shutdown(cancel_futures=True)

    def _work(self, job: Job) -> None:
        _thread.workers = self
        try:
            while (dealt := job.take()) is not None:
                held, buffer = False, dealt.buffer
                try:
                    if not dealt.is_read:
                        _read(job.keys.source, dealt.resident.ids, buffer)
                    held = job.hold(dataclasses.replace(dealt, is_read=True))
                    if held:
                        return
                    turn = functools.partial(job.turn, dealt.index)
                    fold, wait = job.stage.absorb(dealt.resident, buffer, turn)
                    job.fold(dealt, fold)
                    wait()
                finally:
                    if not held:
                        job.put_back(buffer)
        except Stopped:
            pass
        except BaseException as error:  # the caller's thread raises it
            job.stop(error)
        finally:
            _thread.workers = None  # which end once nobody refers to them


_thread = threading.local()


def workers_of_this_thread() -> Workers | None:
    """Return the workers that this thread is one of."""
    return getattr(_thread, "workers", None)


def _read(source: Any, ids: LongArray, buffer: Buffer) -> None:
    """Read blocks to the front of a buffer."""
    found = source.read(ids, buffer.k[: len(ids)], buffer.v[: len(ids)])
    if found is None:
        return
    if isinstance(found, bool) or not isinstance(found, numbers.Integral):
        raise TypeError(
            f"source.read: expected None or the number of blocks that were read, got "
            f"{type(found).__name__}; what is read goes into k_out and v_out"
        )
    if found != len(ids):
        raise OSError(
            f"source: read {found} of {len(ids)} blocks, from {ids[0]} to {ids[-1]}; read must "
            "fill all of its arrays, and return their number or None"
        )


def _memory(device: str, size: int) -> HostArray:
    """Allocate bytes, from which a device can copy."""
    if device == "cuda":
        pinned: HostArray = _device.cuda().pinned_array(size, np.uint8)
        return pinned
    return _buffers.empty((size,), np.uint8)
