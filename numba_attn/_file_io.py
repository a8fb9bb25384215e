"""Plain ``.npy`` files, read and written record by record at their places."""

from __future__ import annotations

import math
import os
import pathlib
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
    """A ``.npy`` file of records, [N, ...], by their numbers."""

    def __init__(
        self, path: pathlib.Path, shape: tuple[int, ...], dtype: npt.DTypeLike, mode: str
    ) -> None:
        dtype = np.dtype(dtype)
        self._path, self._size = path, math.prod(shape[1:]) * dtype.itemsize
        self._fd = os.open(path, os.O_RDWR if mode == "r+" else os.O_RDONLY)
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
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _transfer(
        self,
        call: Callable[[int, list[memoryview], int], int],
        ids: LongArray,
        parts: tuple[HostArray, ...],
    ) -> None:
        for first, buffers in _buffers.Memory(parts).runs(ids):
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
            done = call(self._fd, buffers, at)
            if done <= 0:
                raise OSError(f"{self._path}: ended at byte {at}, {left} bytes too soon")
            at, left = at + done, left - done
            if left:
                buffers = _buffers.after(buffers, done)
        return at
