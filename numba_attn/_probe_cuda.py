"""The bandwidth probes of `_probe` on a CUDA device: one thread block per piece.

Imported only where there is a device: `numba.cuda` is slow to import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import no_type_check

import numpy as np
from numba import cuda

from . import _arrays, _device, _probe
from ._workloads import Step
from .kernels._jit import cuda_kernel

_THREADS = 256
_STREAM_BYTES = 1 << 16


@cuda_kernel
@no_type_check
def _read(k_words, v_words, pieces, folded):
    piece = cuda.blockIdx.x
    word = np.uint64(0)
    for i in range(pieces[piece, 0] + cuda.threadIdx.x, pieces[piece, 1], cuda.blockDim.x):
        word ^= k_words[i] ^ v_words[i]
    if word == np.uint64(1):  # practically never, but the compiler can't tell
        folded[0] = word


def to_device(step: Step) -> Step:
    """Copy a step's arrays to the device, bfloat16 as its bits."""
    q, k_pool, v_pool = map(_arrays.as_carrier, step.arguments()[:3])
    return Step(*map(cuda.to_device, (q, k_pool, v_pool, step.block_tables, step.seq_lens)))


def block_order(step: Step, on_device: Step) -> Callable[[], None]:
    """Return a function that reads the blocks of a step, in order, and waits for the end."""
    return _reader(on_device, _probe.block_pieces(step))


def sequential(step: Step, on_device: Step) -> Callable[[], None]:
    """Return a function that reads as many bytes from end to end, and waits for the end."""
    return _reader(on_device, _probe.stream_pieces(step, _STREAM_BYTES))


def _reader(on_device: Step, pieces: _probe.Pieces) -> Callable[[], None]:
    k_words, v_words = (
        pool.reshape(pool.size).view(np.uint64) for pool in (on_device.k_pool, on_device.v_pool)
    )
    device_pieces, folded = cuda.to_device(pieces), cuda.to_device(np.zeros(1, np.uint64))
    launch, wait = _device.backend("cuda").launch, _device.cuda().synchronize

    def read() -> None:
        launch(_read, len(pieces), _THREADS, k_words, v_words, device_pieces, folded)
        wait()

    return read
