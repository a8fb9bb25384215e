"""The memory that records of a file are read into or written from, as few buffers as can be."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from ._types import HostArray, LongArray

PAGE = 4096  # bytes; direct I/O needs multiples of it
MOST_BUFFERS = 512  # in a system call
FEW_PIECES = 4  # that may be read by a system call each, of Python's
MOST_BYTES = 1 << 30  # in a system call; Linux stops a little below 2 GiB


class Memory:
    """Parts [n, size] of n records: bytes, of which each row is one piece of memory.

    Where the rows of all parts lie side by side, as in `empty` [n, parts, size], neighbouring
    records are one buffer.
    """

    def __init__(self, parts: tuple[HostArray, ...]) -> None:
        self._parts = parts
        self.record_size = sum(part.shape[1] for part in parts)
        places = [_address(part) for part in parts]
        self._address = places[0]
        self._whole = _whole(parts, places, self.record_size)
        units = (
            [places[0], self.record_size]
            if self._whole
            else [*places, *(size for part in parts for size in (part.shape[1], part.strides[0]))]
        )
        self.aligned = not any(unit % PAGE for unit in units)

    def runs(self, ids: LongArray) -> Iterator[tuple[int, list[memoryview]]]:
        """Yield neighbours in the file, in its order: the first record, and buffers for all."""
        for record, stretches in runs(ids, max(1, MOST_BYTES // self.record_size)):
            yield record, self._buffers(stretches)

    def pieces(self, ids: LongArray) -> tuple[LongArray, LongArray] | None:
        """Return records in file order and the addresses for them, if they are many apart."""
        apart = np.count_nonzero(ids[1:] - ids[:-1] != 1)
        if self._whole is None or apart < FEW_PIECES:
            return None
        order = np.argsort(ids, kind="stable")
        return ids[order], self._address + order * self.record_size

    def _buffers(self, stretches: list[range]) -> list[memoryview]:
        size, whole = self.record_size, self._whole
        if whole is None:
            return [
                memoryview(part[i]) for places in stretches for i in places for part in self._parts
            ]
        return [whole[places.start * size : places.stop * size] for places in stretches]


def runs(ids: LongArray, most: int) -> Iterator[tuple[int, list[range]]]:
    """Cut ids into runs of neighbours, in file order: the first, and the places of all.

    Examples
    --------
    >>> list(runs(np.array([7, 8, 3, 4, 6]), 4))
    [(3, [range(2, 4)]), (6, [range(4, 5), range(0, 2)])]
    """
    order: npt.NDArray[np.intp] | None = None
    steps = ids[1:] - ids[:-1]
    cuts = (steps != 1).nonzero()[0]
    if len(cuts) and steps.min() < 0:
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        cuts = (np.diff(ids) != 1).nonzero()[0]
    edges = [0, *(cuts + 1).tolist(), len(ids)] if len(ids) else []
    for begin, end in zip(edges, edges[1:], strict=False):
        for start in range(begin, end, most):
            stop = min(start + most, end)
            places = [range(start, stop)] if order is None else _stretches(order[start:stop])
            yield int(ids[start]), places


def _stretches(places: npt.NDArray[np.intp]) -> list[range]:
    """Cut places where the next is not the following one."""
    if len(places) == 1:  # the usual case, told quickly
        return [range(int(places[0]), int(places[0]) + 1)]
    cuts = (np.diff(places) != 1).nonzero()[0]
    firsts, lasts = places[[0, *(cuts + 1)]].tolist(), places[[*cuts, -1]].tolist()
    return [range(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]


def after(buffers: list[memoryview], done: int) -> list[memoryview]:
    """Return what is left of buffers after their first bytes."""
    for i, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[i + 1 :]]
        done -= len(buffer)
    return []


def as_bytes(array: HostArray) -> HostArray:
    """View records [n, ...] as bytes [n, size]; each must be one piece of memory.

    Raises
    ------
    ValueError
        If they are not.
    """
    size = math.prod(array.shape[1:])
    if len(array) and not array[0].flags.c_contiguous:
        raise ValueError(
            f"a block must be one piece of memory, got strides {array.strides} for shape "
            f"{array.shape}; pass a contiguous copy"
        )
    return array.view(f"u{array.itemsize}").reshape(len(array), size).view(np.uint8)


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike, multiple: int = PAGE) -> HostArray:
    """Allocate memory that begins at a page, or at another multiple of bytes."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + multiple, np.uint8)
    start = -_address(memory) % multiple
    return memory[start : start + size].view(dtype).reshape(shape)


def _address(array: HostArray) -> int:
    return int(array.__array_interface__["data"][0])


def _whole(parts: tuple[HostArray, ...], places: list[int], size: int) -> memoryview | None:
    """Return the memory of all rows of all parts, if it is one piece in the order of the file."""
    rows, next_place = len(parts[0]), places[0]
    for part, place in zip(parts, places, strict=True):
        if place != next_place or (rows > 1 and part.strides[0] != size):
            return None
        next_place += part.shape[1]
    return as_strided(parts[0], (rows * size,), (1,)).data if rows else None
