"""Absorbs tiles on CUDA: from pinned memory, by a stream of copies, to a stream of kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from . import _arrays, _device
from ._call import Options, Tile, is_by_token, with_scales_of
from ._stream_call import Call
from ._stream_job import Absorbed, Buffer
from ._tiles import Resident
from ._types import Array, HostArray
from .state import AttentionState


class OnCuda:
    """Absorbs tiles on a GPU: one is read, one is copied and one is attended to at a time, or more.

    Copies and kernels are in the order of the tiles. A kernel waits for its copy on the device, and
    a worker for its kernel, before it reads into its buffer again.

    Parameters
    ----------
    call : Call
    state : AttentionState
        Modified.
    """

    def __init__(self, call: Call, state: AttentionState) -> None:
        cuda = _device.cuda()
        self._state, self._formats = state, call.inputs.formats
        self._layout = call.keys.layout.carried()
        self._gpu = _device.gpu_in_use()
        self._copies = cuda.stream()
        self._kernels = _device.stream_in_use() or cuda.stream()
        self._q = _arrays.bring("cuda", call.inputs.q)
        self._query_starts = _bring(call.keys.whole.query_starts)
        scales = (_scale(x) for x in (call.options.k_scale, call.options.v_scale))
        k_scale, v_scale = scales
        slopes = _bring(call.options.alibi_slopes)
        self._options = call.options._replace(alibi_slopes=slopes, k_scale=k_scale, v_scale=v_scale)

    def absorb(self, resident: Resident, buffer: Buffer, turn: Callable[[], None]) -> Absorbed:
        """Launch what absorbs a tile, in its `turn`; the buffer is in use until that is done."""
        cuda = _device.cuda()
        with self._gpu, _device.launching_on(self._kernels):
            k, v, tile, options = self._copy(resident, buffer)
            copied, done = cuda.event(), cuda.event()
            copied.record(self._copies)
            turn()
            copied.wait(self._kernels)
            backend = _device.backend("cuda")
            backend.step_tile(self._state, self._q, k, v, self._formats, tile, options)
            done.record(self._kernels)
        return Absorbed(wait=functools.partial(self._wait, done))

    def _wait(self, event: Any) -> None:
        with self._gpu:
            event.synchronize()

    def _copy(self, resident: Resident, buffer: Buffer) -> tuple[Array, Array, Tile, Options]:
        """Copy a tile to the device: pools, tables, scales by token."""
        staging = buffer.staging
        if staging is None:
            staging = buffer.staging = _Staging()
        used = buffer.memory[: len(resident.ids) * self._layout.block_bytes]
        k, v = self._layout.pools(staging.blocks(used, self._copies))
        options = with_scales_of(self._options, resident.ids)
        by_token = [x if is_by_token(x) else None for x in (options.k_scale, options.v_scale)]
        small = staging.numbers([*resident.tile[:5], *by_token], self._copies)
        for name, scale in zip(("k_scale", "v_scale"), small[5:], strict=True):
            options = options if scale is None else options._replace(**{name: scale})
        tile = Tile._make([*small[:5], self._query_starts, resident.tile.num_queries])
        return k, v, tile, options


class _Staging:
    """A buffer's memory on the device, and pinned memory for the numbers that go with it."""

    def __init__(self) -> None:
        self._blocks: Any = None
        self._pinned: Any = None
        self._numbers: Any = None

    def blocks(self, used: HostArray, stream: Any) -> Array:
        """Begin to copy bytes; return where they will be."""
        if self._blocks is None or self._blocks.size < used.size:
            self._blocks = _arrays.empty("cuda", used.shape, np.uint8)
        target = self._blocks[: used.size]
        target.copy_to_device(used, stream=stream)
        return target

    def numbers(self, arrays: list[HostArray | None], stream: Any) -> list[Array | None]:
        """Begin to copy arrays of 4-byte numbers, in one piece; return where they will be."""
        ends = np.cumsum([0 if x is None else x.nbytes for x in arrays])
        size = int(ends[-1])
        if self._pinned is None or self._pinned.size < size:
            self._pinned = _device.cuda().pinned_array(2 * size, np.uint8)
            self._numbers = _arrays.empty("cuda", (2 * size,), np.uint8)
        found: list[Array | None] = []
        for array, end in zip(arrays, ends.tolist(), strict=True):
            if array is None:
                found.append(None)
                continue
            begin = end - array.nbytes
            plain = np.ascontiguousarray(array)
            self._pinned[begin:end] = plain.view(np.uint8).ravel()
            place = plain.shape, plain.dtype, begin, plain.strides
            found.append(_arrays.view_bytes(self._numbers, *place))
        self._numbers[:size].copy_to_device(self._pinned[:size], stream=stream)
        return found


def _bring(array: Array | None) -> Array | None:
    return None if array is None else _arrays.bring("cuda", array)


def _scale(scale: Array | None) -> Array | None:
    """Keep scales by token on the host, to pick those of a tile; bring others over."""
    return _arrays.to_host(scale) if is_by_token(scale) else _bring(scale)
