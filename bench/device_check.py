"""Check the twins on a machine with a GPU, and measure the CUDA one there; one short run.

    python bench/device_check.py          parity with the reference, then W1..W6
    python bench/device_check.py --tiny   a few tokens and no timing, as for the simulator

The exit status is 1 when a check fails. Times are of graph replays (of plain launches where a graph
cannot be made), over pools read in turn, beside a device-to-device copy.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

import numba_attn
from numba_attn import AttentionState, _arrays, _check, _device, _machine
from numba_attn._workloads import WORKLOADS, Step, Workload, make_steps

Launch = tuple[Any, ...]  # kernel, blocks, threads, arguments

CASES = (
    _check.RAGGED,
    Workload("long", (32768, 5000), 8, 1, 128),
    Workload("odd", (0, 1, 50, 333), 21, 3, 20, block_size=3),
    Workload("page of 1", (17, 200), 8, 8, 80, block_size=1),
    Workload("one kv head", (300, 4), 71, 1, 64, block_size=64),
    Workload("large heads", (0, 130), 2, 2, 512, block_size=17),
    Workload("small heads", (400,), 5, 1, 1, block_size=256),
)
COPY_BYTES = 1 << 30
REPLAYS = 20


def check(cases: tuple[Workload, ...], devices: list[str]) -> bool:
    """Hold every device against the reference; print each comparison."""
    ok = True
    for case in cases:
        print(f"{case.name}: {case.describe()}, block_size {case.block_size}")
        for device in devices:
            for result in _check.check_device(device, case):
                print(f"  {result}")
                ok &= result.ok
    return ok


def decode(steps: list[Step]) -> Callable[[], None]:
    """Return one decode step per pool, on device arrays, that allocates nothing."""
    state = AttentionState.like(steps[0].q, steps[0].v_pool)
    out = _arrays.empty("cuda", tuple(state.o.shape), np.uint16)
    block_size = steps[0].k_pool.shape[1]
    counts = [np.int32(-(-step.seq_lens.copy_to_host() // block_size)) for step in steps]
    placed = [_device.cuda().to_device(count) for count in counts]

    def run() -> None:
        for step, blocks in zip(steps, placed, strict=True):
            state.reset()
            arrays = (step.q, step.k_pool, step.v_pool, step.block_tables, blocks)
            numba_attn.step_tile(state, *arrays, tile_token_counts=step.seq_lens)
            numba_attn.finalize(state, dtype=np.uint16, out=out)

    return run


def launches_of(function: Callable[[], None]) -> list[Launch]:
    """Return the kernel launches of a function, without making them."""
    launches: list[Launch] = []
    with mock.patch.object(_device.backend("cuda"), "launch", lambda *args: launches.append(args)):
        function()
    return launches


def seconds_of(launches: list[Launch]) -> tuple[float, str]:
    """Time launches on the device; say how."""
    stream = _device.cuda().stream()

    def run() -> None:
        for kernel, blocks, threads, *args in launches:
            kernel[blocks, threads, stream](*args)

    run()
    stream.synchronize()
    try:
        return timed(graph_of(run, stream), stream), "graph"
    except (ImportError, RuntimeError, TypeError) as error:
        print(f"no graph ({type(error).__name__}: {error}); timing plain launches")
        return timed(run, stream), "launches"


def graph_of(run: Callable[[], None], stream: Any) -> Callable[[], None]:
    """Capture what is launched on a stream as a graph; return its replay."""
    from cuda.bindings import driver

    def value(result: tuple[Any, ...]) -> Any:
        if result[0] != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(result[0].name)
        return result[1] if len(result) > 1 else None

    handle = driver.CUstream(int(stream))
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    value(driver.cuStreamBeginCapture(handle, mode))
    try:
        run()
    finally:
        graph = value(driver.cuStreamEndCapture(handle))
    executable = value(driver.cuGraphInstantiate(graph, 0))
    return lambda: value(driver.cuGraphLaunch(executable, handle))


def timed(run: Callable[[], None], stream: Any) -> float:
    """Return the seconds of one of many runs, by events."""
    begin, end = (_device.cuda().event(timing=True) for _ in range(2))
    run()
    begin.record(stream)
    for _ in range(REPLAYS):
        run()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / REPLAYS


def copy_bandwidth() -> float:
    """Return the bytes read and written in a second by a copy on the device."""
    cuda = _device.cuda()
    source, target = (cuda.device_array(COPY_BYTES, np.uint8) for _ in range(2))
    stream = cuda.stream()
    return 2 * COPY_BYTES / timed(lambda: target.copy_to_device(source, stream=stream), stream)


def measure(names: list[str]) -> None:
    """Print a table of the workloads beside the copy."""
    copy = copy_bandwidth()
    print(f"\ndevice-to-device copy: {copy / 1e9:.0f} GB/s (read and written)")
    print(f"{'':4} {'pools':>5} {'ms':>8} {'GB/s':>7} {'of copy':>8} {'call ms':>8}  timed by")
    for name in names:
        workload = WORKLOADS[name]
        steps = [to_device(step) for step in make_steps(workload, workload.num_pools())]
        run = decode(steps)
        run()
        _device.cuda().synchronize()
        total, how = seconds_of(launches_of(run))
        seconds = total / len(steps)
        rate = workload.kv_bytes / seconds
        print(
            f"{name:4} {len(steps):5} {seconds * 1e3:8.3f} {rate / 1e9:7.0f} {rate / copy:8.2f} "
            f"{call_seconds(steps) * 1e3:8.3f}  {how}",
            flush=True,
        )


def to_device(step: Step) -> Step:
    """Copy a step's arrays to the device, bfloat16 as its bits."""
    bits = map(_arrays.as_carrier, step.arguments()[:3])
    return Step(*map(_device.cuda().to_device, (*bits, step.block_tables, step.seq_lens)))


def call_seconds(steps: list[Step]) -> float:
    """Return the seconds of a call of `paged_attention` as a user makes it, with the wait."""
    begin = time.perf_counter()
    for step in steps:
        numba_attn.paged_attention(*step.arguments())
        _device.cuda().synchronize()
    return (time.perf_counter() - begin) / len(steps)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let small grids pass without a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Grid size .* low occupancy")
        yield


def main(arguments: list[str] | None = None) -> int:
    """Check, then measure; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a few tokens, and no timing")
    parser.add_argument("--workload", default="W1,W2,W3,W4,W5,W6", help="names, by commas")
    options = parser.parse_args(arguments)
    names = options.workload.split(",")
    if unknown := set(names) - set(WORKLOADS):
        parser.error(f"--workload: expected names of {', '.join(WORKLOADS)}, got {unknown}")
    _device.require_cuda()
    print(", ".join(f"{name} {version}" for name, version in _machine.versions().items()))
    print("\n".join(f"{name}: {what}" for name, what in numba_attn.available_devices().items()))
    with quiet():
        ok = check((_check.TINY,) if options.tiny else CASES, ["cpu", "cuda"])
        print("\nparity: " + ("ok" if ok else "FAILED"))
        if ok and not options.tiny:
            measure(names)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
