"""The machine's read bandwidth: the bytes of a decode step, read and not computed with.

The *block-order* probe reads the blocks of a step in the order in which attention visits them; the
*sequential* probe reads as many bytes from end to end. Both use the threads and the pick-up of work
of the CPU twin, so a ratio to them says what the arithmetic costs, and the paging.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import no_type_check

import numpy as np
import numpy.typing as npt

from . import _threads
from ._plan import SPLIT_TOKENS, ceil_div
from ._types import HostArray
from ._workloads import Step
from .kernels import rows
from .kernels._jit import kernel

Pieces = npt.NDArray[np.int64]

_WORD = 8  # bytes of a uint64
_STREAM_BYTES = 1 << 20  # long enough for a piece's start not to count


@kernel
@no_type_check
def _fold(words):
    """Read contiguous words; the caller slices, so that this loop starts at 0 and vectorises."""
    folded = np.uint64(0)
    for i in range(words.size):  # `for word in words` does not vectorise
        folded ^= words[i]
    return folded


@kernel
@no_type_check
def _read(counter, k_words, v_words, pieces, pieces_per_item):
    """Take items from the counter until none is left; read each piece of K, then of V."""
    folded = np.uint64(0)
    while True:
        first = rows.fetch_add(counter.ctypes.data, 1) * pieces_per_item
        if first >= len(pieces):
            return folded
        for begin, end in pieces[first : first + pieces_per_item]:
            folded ^= _fold(k_words[begin:end]) ^ _fold(v_words[begin:end])


def block_order(step: Step) -> Callable[[], None]:
    """Return a function that reads the blocks of a step, in order, up to the sequences' lengths."""
    return _reader(step, block_pieces(step), max(1, SPLIT_TOKENS // step.k_pool.shape[1]))


def sequential(step: Step) -> Callable[[], None]:
    """Return a function that reads as many bytes as the step does, from end to end."""
    return _reader(step, stream_pieces(step, _STREAM_BYTES), 1)


def block_pieces(step: Step) -> Pieces:
    """List the blocks of a step as ranges of words."""
    block_size = step.k_pool.shape[1]
    block_bytes = step.k_pool[0].nbytes
    ranges = []
    for row, length in zip(step.block_tables.tolist(), step.seq_lens.tolist(), strict=True):
        for i in range(ceil_div(length, block_size)):
            begin = row[i] * block_bytes
            tokens = min(block_size, length - i * block_size)
            ranges.append((begin, begin + tokens * block_bytes // block_size))
    return _in_words(ranges)


def stream_pieces(step: Step, piece_bytes: int) -> Pieces:
    """List as many bytes as the step reads, from end to end, as ranges of words."""
    total = int(step.seq_lens.sum()) * step.k_pool[0, 0].nbytes
    begins = range(0, total, piece_bytes)
    return _in_words([(begin, min(begin + piece_bytes, total)) for begin in begins])


def words(pool: HostArray) -> HostArray:
    """View a pool as uint64 words, [N * B * Hkv * D / 4]."""
    return pool.reshape(-1).view(np.uint64)


def _in_words(byte_ranges: list[tuple[int, int]]) -> Pieces:
    """Round byte ranges up to whole words, [n, 2] begin, end."""
    return -(-np.array(byte_ranges, np.int64).reshape(-1, 2) // _WORD)


def _reader(step: Step, pieces: Pieces, pieces_per_item: int) -> Callable[[], None]:
    """Prepare a threaded read of pieces of K and V."""
    k_words, v_words = words(step.k_pool), words(step.v_pool)
    items = ceil_div(len(pieces), pieces_per_item)

    def read() -> None:
        arguments = (np.zeros(1, np.int64), k_words, v_words, pieces, pieces_per_item)
        _threads.run(_read, arguments, min(_threads.get_num_threads(), items))

    return read
