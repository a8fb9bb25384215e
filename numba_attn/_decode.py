"""Measure decode attention on a device, beside the bandwidth probes, in the same process."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from . import _device, _measure, _probe, api
from ._progress import Progress
from ._workloads import ROTATION_BYTES, Step, Workload, make_steps

_MEMORY_SHARE = 0.4
"""Part of the available memory that the pools may take."""


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much memory and time a measurement takes."""

    rotation_bytes: int
    step_bytes: int | None
    """Most K/V bytes of one step; longer contexts are cut."""
    seconds: float

    def fit(self, workload: Workload, available: int) -> tuple[Workload, int]:
        """Return the workload, cut where memory is short, and its number of pools."""
        room = int(available * _MEMORY_SHARE)
        fitted = workload.cut(min(room, self.step_bytes or room))
        affordable = max(1, room // max(1, fitted.kv_bytes))
        return fitted, min(affordable, fitted.num_pools(self.rotation_bytes))


FULL = Effort(ROTATION_BYTES, None, 2.5)
QUICK = Effort(64_000_000, 16_000_000, 0.4)


@dataclasses.dataclass(frozen=True)
class Result:
    """Medians of one workload on one device, in seconds."""

    workload: Workload
    device: str
    num_pools: int
    attention: float
    block_order: float
    sequential: float
    probe_spread: float

    @property
    def gigabytes_per_second(self) -> float:
        """K/V bytes read in a second, in GB."""
        return self.workload.kv_bytes / self.attention / 1e9

    @property
    def of_block_order(self) -> float:
        """Fraction of the bandwidth at which the same blocks can be read."""
        return self.block_order / self.attention

    @property
    def of_sequential(self) -> float:
        """Fraction of the bandwidth at which as many bytes can be read from end to end."""
        return self.sequential / self.attention

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for a JSON file."""
        workload = dataclasses.asdict(self.workload)
        return {
            **workload,
            "device": self.device,
            "num_pools": self.num_pools,
            "kv_bytes": self.workload.kv_bytes,
            "ms": self.attention * 1e3,
            "gb_per_s": self.gigabytes_per_second,
            "of_block_order_probe": self.of_block_order,
            "of_sequential_probe": self.of_sequential,
            "block_order_probe_ms": self.block_order * 1e3,
            "sequential_probe_ms": self.sequential * 1e3,
            "block_order_probe_spread": self.probe_spread,
        }


def measure(
    workload: Workload,
    device: str,
    num_pools: int,
    seconds: float,
    progress: Progress,
) -> Result:
    """Time attention and the probes over the same pools."""
    name = f"{workload.name} on {device}:"
    steps = make_steps(
        workload,
        num_pools,
        on_pool=lambda done: progress.say(f"{name} making the K/V pools", done / num_pools),
    )
    progress.say(f"{name} compiling")
    times = _measure.in_turn(
        contenders(steps, device),
        seconds,
        on_progress=lambda fraction: progress.say(f"{name} measuring", fraction),
    )
    median = {name: statistics.median(values) for name, values in times.items()}
    return Result(
        workload, device, num_pools, **median, probe_spread=_measure.spread(times["block_order"])
    )


def contenders(steps: list[Step], device: str) -> dict[str, list[_measure.Call]]:
    """Return attention and the two probes as calls over each pool."""
    if device == "cuda":
        return _cuda_contenders(steps)
    return {
        "attention": [_attention(step) for step in steps],
        "block_order": [_probe.block_order(step) for step in steps],
        "sequential": [_probe.sequential(step) for step in steps],
    }


def _attention(step: Step) -> _measure.Call:
    arguments = step.arguments()
    return lambda: api.paged_attention(*arguments)


def _cuda_contenders(steps: list[Step]) -> dict[str, list[_measure.Call]]:
    """Return the same on a CUDA device; each call waits for its end."""
    from . import _probe_cuda

    placed = [(step, _probe_cuda.to_device(step)) for step in steps]
    return {
        "attention": [_cuda_attention(on_device) for _, on_device in placed],
        "block_order": [_probe_cuda.block_order(*pair) for pair in placed],
        "sequential": [_probe_cuda.sequential(*pair) for pair in placed],
    }


def _cuda_attention(step: Step) -> _measure.Call:
    arguments, synchronize = step.arguments(), _device.cuda().synchronize

    def attend() -> None:
        api.paged_attention(*arguments)
        synchronize()

    return attend
