"""Absorbs tiles on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable

from . import _arrays, _device, _plan, _threads
from ._call import with_scales_of
from ._stream_call import Call
from ._stream_job import Absorbed, Buffer
from ._tiles import Resident
from .state import AttentionState


class OnCpu:
    """Absorbs tiles on the CPU, several at a time; only their folds are in order.

    Parameters
    ----------
    call : Call
    state : AttentionState
        Modified.
    num_workers : int
        Threads that call `absorb`.
    """

    def __init__(self, call: Call, state: AttentionState, num_workers: int) -> None:
        self._call, self._state = call, state
        self._backend = _device.backend("cpu")
        self._num_threads = _plan.ceil_div(_threads.get_num_threads(), num_workers)

    def absorb(self, resident: Resident, buffer: Buffer, turn: Callable[[], None]) -> Absorbed:
        """Absorb a tile up to its last fold; call `turn` before the state is changed."""
        inputs, options, tile = self._call.inputs, self._call.options, resident.tile
        k, v = (_arrays.as_carrier(pool[: len(resident.ids)]) for pool in (buffer.k, buffer.v))
        if resident.cut is None:
            ranges = _plan.key_ranges(tile, options.sliding_window, options.causal)
            resident.cut = _plan.split_items(ranges, self._backend.SPLIT)
        options = with_scales_of(options, resident.ids)
        arguments = resident.cut, inputs.q, k, v, inputs.formats, tile, options, self._num_threads
        for fold, is_last in self._backend.attend(*arguments):
            if is_last:
                return Absorbed(functools.partial(fold, self._state))
            turn()
            fold(self._state)
        return Absorbed()
