"""Plain ``.npy`` files, read and written record by record at their places."""

from __future__ import annotations

import errno
import io
import math
import os
import pathlib
import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from . import _buffers
from ._types import HostArray, LongArray

HEADER = _buffers.PAGE  # bytes, so that records are aligned for direct I/O
_Call: TypeAlias = Callable[[list[memoryview], int], int]
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


class Direct:
    """Whether files are read past the page cache, until that fails once."""

    def __init__(self, path: pathlib.Path, wanted: bool) -> None:
        self.on = wanted
        self._path, self._lock = path, threading.Lock()

    def open(self, path: pathlib.Path, record_size: int) -> int | None:
        """Open a file to be read so, if it can be."""
        if not self.on:
            return None
        if record_size % _buffers.PAGE:
            self.stop(f"a block has {record_size} bytes, not a multiple of {_buffers.PAGE}")
            return None
        if not hasattr(os, "O_DIRECT"):
            self.stop("the system has no O_DIRECT")
            return None
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            self.stop_if_refused(error)
            return None

    def stop_if_refused(self, error: OSError) -> None:
        """Stop if the file system knows no direct reads; other errors are raised."""
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise error
        self.stop(f"the file system refuses it ({error.strerror})")

    def stop(self, why: str) -> None:
        """Read through the page cache from now on, and say so once."""
        with self._lock:
            was, self.on = self.on, False
        if was:
            warnings.warn(
                f"{self._path}: direct=True, but {why}; reads go through the page cache",
                RuntimeWarning,
                stacklevel=2,
            )


class Records:
    """A ``.npy`` file of records, [N, ...], by their numbers; threads may share it."""

    def __init__(
        self,
        path: pathlib.Path,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        mode: str,
        direct: Direct | None = None,
    ) -> None:
        dtype = np.dtype(dtype)
        self._mode = mode
        self._path, self._size = path, math.prod(shape[1:]) * dtype.itemsize
        self._fd = os.open(path, os.O_RDWR if mode == "r+" else os.O_RDONLY)
        self._direct = direct or Direct(path, wanted=False)
        self._direct_fd: int | None = None
        self._use = _Use(path, self._close)
        try:
            self._check(shape, dtype)
            self._direct_fd = self._direct.open(path, self._size)
        except BaseException:
            self.close()
            raise

    def _check(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        expected = HEADER + shape[0] * self._size
        found = os.fstat(self._fd).st_size
        if os.pread(self._fd, HEADER, 0) != _header(shape, dtype):
            raise ValueError(f"{self._path}: expected {dtype} {shape}, but its header is another")
        if found != expected:
            raise ValueError(
                f"{self._path}: expected {expected} bytes, got {found}: it is truncated"
            )

    def read(self, ids: LongArray, parts: tuple[HostArray, ...]) -> None:
        """Read records, of which each part [n, size] has some bytes, in file order."""
        memory = _buffers.Memory(parts)
        pieces = memory.pieces(ids)
        if pieces is None or not self._read_pieces(memory, *pieces):
            self._transfer(self._read_direct if memory.aligned else self._read, ids, memory)

    def _read_pieces(self, memory: _buffers.Memory, ids: LongArray, addresses: LongArray) -> bool:
        """Read records that are far from each other; tell whether all could be read."""
        from .kernels.file_reads import read_pieces  # is compiled on first use

        places, sizes = HEADER + ids * self._size, np.full(len(ids), self._size)
        with self._use:
            fd = self._direct_fd if memory.aligned and self._direct.on else None
            fd = self._fd if fd is None else fd
            found: int = read_pieces(fd, places, addresses, sizes)
        return found == len(ids)

    def write(self, ids: LongArray, parts: tuple[HostArray, ...]) -> None:
        """Write records, in file order."""
        if self._mode == "r":
            raise io.UnsupportedOperation(f"{self._path}: is open to be read; open it with 'r+'")
        self._transfer(self._write, ids, _buffers.Memory(parts))

    def _read(self, buffers: list[memoryview], at: int) -> int:
        return os.preadv(self._fd, buffers, at)

    def _read_direct(self, buffers: list[memoryview], at: int) -> int:
        fd = self._direct_fd
        if fd is not None and self._direct.on and at % _buffers.PAGE == 0:
            try:
                return os.preadv(fd, buffers, at)
            except OSError as error:
                self._direct.stop_if_refused(error)
        return self._read(buffers, at)

    def _write(self, buffers: list[memoryview], at: int) -> int:
        return os.pwritev(self._fd, buffers, at)

    def sync(self) -> None:
        """Return when all that was written is on the disk."""
        with self._use:
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file, when no thread reads or writes it any more; these end with an error."""
        self._use.end()

    def __del__(self) -> None:
        if hasattr(self, "_use"):  # it could be opened
            self.close()

    def _close(self) -> None:
        os.close(self._fd)
        if self._direct_fd is not None:
            os.close(self._direct_fd)

    def _transfer(self, call: _Call, ids: LongArray, memory: _buffers.Memory) -> None:
        with self._use:
            for first, buffers in memory.runs(ids):
                at = HEADER + first * self._size
                for start in range(0, len(buffers), _buffers.MOST_BUFFERS):
                    at = self._all(call, buffers[start : start + _buffers.MOST_BUFFERS], at)

    def _all(self, call: _Call, buffers: list[memoryview], at: int) -> int:
        """Fill or write buffers, from a byte of the file; return where they end."""
        left = sum(map(len, buffers))
        while left:
            self._use.check()
            done = call(buffers, at)
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
