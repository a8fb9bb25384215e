"""Plain ``.npy`` files, read and written record by record at their places."""

from __future__ import annotations

import math
import os
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _buffers
from ._types import HostArray, LongArray

HEADER = _buffers.PAGE  # bytes, so that records are aligned for direct I/O
_MAGIC = b"\x93NUMPY\x01\x00"


def _header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    described = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    length = HEADER - len(_MAGIC) - 2
    text = repr(described).ljust(length - 1) + "\n"
    return _MAGIC + length.to_bytes(2, "little") + text.encode("latin1")


def create(
    path: pathlib.Path,
    shape: tuple[int, ...],
    dtype: npt.DTypeLike,
    content: HostArray | None = None,
) -> None:
    """Make a file of zeros, which takes no room, or of some content."""
    dtype = np.dtype(dtype)
    with open(path, "xb") as file:
        file.write(_header(shape, dtype))
        if content is not None:
            file.write(content.tobytes())
        file.truncate(HEADER + math.prod(shape) * dtype.itemsize)


class Records:
    """A ``.npy`` file of records, [N, ...], by their numbers; threads may share it."""

    def __init__(
        self, path: pathlib.Path, shape: tuple[int, ...], dtype: npt.DTypeLike, mode: str
    ) -> None:
        dtype = np.dtype(dtype)
        self._path, self._size = path, math.prod(shape[1:]) * dtype.itemsize
        self._fd = os.open(path, os.O_RDWR if mode == "r+" else os.O_RDONLY)
        self._use = _Use(path, self._close)
        expected = HEADER + shape[0] * self._size
        found = os.fstat(self._fd).st_size
        if os.pread(self._fd, HEADER, 0) != _header(shape, dtype):
            self.close()
            raise ValueError(f"{path}: expected {dtype} {shape}, but its header is another")
        if found != expected:
            self.close()
            raise ValueError(f"{path}: expected {expected} bytes, got {found}: it is truncated")

    def read(self, ids: LongArray, parts: tuple[HostArray, ...]) -> None:
        """Read records, of which each part [n, size] has some bytes, in file order."""
        self._transfer(os.preadv, ids, parts)

    def write(self, ids: LongArray, parts: tuple[HostArray, ...]) -> None:
        """Write records, in file order."""
        self._transfer(os.pwritev, ids, parts)

    def sync(self) -> None:
        """Return when all that was written is on the disk."""
        with self._use:
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file, when no thread reads or writes it any more; these end with an error."""
        self._use.end()

    def _close(self) -> None:
        os.close(self._fd)

    def _transfer(
        self,
        call: Callable[[int, list[memoryview], int], int],
        ids: LongArray,
        parts: tuple[HostArray, ...],
    ) -> None:
        memory = _buffers.Memory(parts)
        with self._use:
            for first, buffers in memory.runs(ids):
                at = HEADER + first * self._size
                for start in range(0, len(buffers), _buffers.MOST_BUFFERS):
                    at = self._all(call, buffers[start : start + _buffers.MOST_BUFFERS], at)

    def _all(
        self,
        call: Callable[[int, list[memoryview], int], int],
        buffers: list[memoryview],
        at: int,
    ) -> int:
        """Fill or write buffers, from a byte of the file; return where they end."""
        left = sum(map(len, buffers))
        while left:
            self._use.check()
            done = call(self._fd, buffers, at)
            if done <= 0:
                raise OSError(f"{self._path}: ended at byte {at}, {left} bytes too soon")
            at, left = at + done, left - done
            if left:
                buffers = _buffers.after(buffers, done)
        return at


class _Use:
    """Who uses a file: the last user closes it, as its number may then be another file's."""

    def __init__(self, path: pathlib.Path, close: Callable[[], None]) -> None:
        self._path, self._close = path, close
        self._lock, self._users, self._ended = threading.Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            self.check()
            self._users += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            last = self._ended and not self._users
        if last:
            self._close()

    def check(self) -> None:
        if self._ended:
            raise ValueError(f"{self._path}: is closed")

    def end(self) -> None:
        """Let nobody begin any more."""
        with self._lock:
            last = not self._ended and not self._users
            self._ended = True
        if last:
            self._close()
