"""Plain ``.npy`` files, read and written record by record at their places."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ._types import HostArray, LongArray

HEADER = 4096  # bytes, so that records are aligned for direct I/O
MOST_BUFFERS = 512  # in a system call
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


def as_bytes(array: HostArray) -> HostArray:
    """View records [n, ...] as bytes [n, size]; each must be one piece of memory.

    Raises
    ------
    ValueError
        If they are not.
    """
    size = math.prod(array.shape[1:]) * array.itemsize
    if len(array) and not array[0].flags.c_contiguous:
        raise ValueError(
            f"a block must be one piece of memory, got strides {array.strides} for shape "
            f"{array.shape}; pass a contiguous copy"
        )
    plain = array.view(f"u{array.itemsize}")
    return plain.reshape(len(array), size // array.itemsize).view(np.uint8)


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
        for run in runs(ids, MOST_BUFFERS // len(parts)):
            buffers = [memoryview(part[i]) for i in run for part in parts]
            at, left = HEADER + int(ids[run[0]]) * self._size, len(run) * self._size
            while left:
                done = call(self._fd, buffers, at)
                if done <= 0:
                    raise OSError(f"{self._path}: ended at byte {at}, {left} bytes too soon")
                at, left = at + done, left - done
                if left:
                    buffers = _after(buffers, done)


def runs(ids: LongArray, most: int) -> Iterator[npt.NDArray[np.intp]]:
    """Cut places of ids into runs of neighbours, in file order.

    Examples
    --------
    >>> [run.tolist() for run in runs(np.array([7, 3, 4, 5, 9]), 2)]
    [[1, 2], [3], [0], [4]]
    """
    order = np.argsort(ids, kind="stable")
    cuts = np.flatnonzero(np.diff(ids[order]) != 1) + 1
    for run in np.split(order, cuts):
        for start in range(0, len(run), most):
            yield run[start : start + most]


def _after(buffers: list[memoryview], done: int) -> list[memoryview]:
    """Return what is left of buffers after their first bytes."""
    for i, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[i + 1 :]]
        done -= len(buffer)
    return []
