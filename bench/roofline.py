"""Estimate the CUDA kernels on an H200, on paper: no GPU, only the compiler and the assembler.

    python bench/roofline.py
    python bench/roofline.py --workload W1,W3 --measured figures.json

A launch takes as long as the slowest of what it cannot do without (columns in microseconds):

memory      K, V and states, once each, at the bandwidth of a copy
L2          K and V as often as blocks ask for them, at the bandwidth of the second-level cache
in flight   the same, at what the blocks at work have asked for in one latency of the memory
issue       all instructions of all warps; the busiest multiprocessor counts
pipes       those of the arithmetic that is slowest: half rate for integers, an eighth for exp2
shared      the traffic of shared memory
latency     a block's tiles one after the other, each with its barriers, shuffles and waits

The figures file maps names of workloads to measured microseconds, such as {"W1": 40.2}.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import pathlib
import sys
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from numba_attn import _plan, _plan_cuda, _ptx, _sass
from numba_attn._ptx import Compiled
from numba_attn._workloads import WORKLOADS, Workload

# An H200
COPY = 4.3e12  # bytes in a second, measured; read and written
L2 = 5.5e12  # bytes in a second
MULTIPROCESSORS = 132
CLOCK = 1.785e9
MEMORY_LATENCY = 0.8e-6
LAUNCH_GAP = 1.0e-6  # from the end of a kernel to the start of the next, in a graph

# A multiprocessor: warp instructions in a cycle
ISSUE_RATE = 4.0
PIPE_RATES = {"FMA": 4.0, "IMAD": 2.0, "ALU": 2.0, "MUFU": 0.5}
SHARED_RATE = 1.0  # of 128 bytes: a warp's access of 32 bits

# A warp: cycles
BARRIER = 40.0
SHUFFLE = 25.0
ALONE = 2.0  # an instruction of a warp that a processor has nothing beside: half wait for the last

CAPABILITY = (9, 0)
WARP = 32
SPLIT = _plan_cuda.SPLIT_TOKENS


class Launch(NamedTuple):
    """A launch of a kernel, in numbers."""

    name: str
    kernel: Compiled
    threads: int  # of a block
    tiles: tuple[int, ...]  # passes of the main loop, block by block
    kv_bytes: int  # of K and V, each byte once
    asked_bytes: int  # of K and V, by all blocks
    other_bytes: int  # of queries and states, read and written
    in_flight: int  # bytes of K and V that a block has on their way
    counts: Counter[str]  # a warp's instructions for a tile, a share of those around it included
    shuffles: float  # of a tile, that wait for one another
    waits: float  # for memory, of a tile, that nothing of the block hides

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return _plan.ceil_div(self.threads, WARP)

    @property
    def resident(self) -> int:
        """Blocks on a multiprocessor at a time."""
        return _sass.occupancy(self.kernel.registers, self.kernel.shared, self.threads)

    @property
    def chain(self) -> int:
        """Tiles of the place that has most, where every resident block is a place."""
        return busiest(self.tiles, MULTIPROCESSORS * self.resident)


def busiest(tiles: Iterable[int], places: int) -> int:
    """Return the work of the place that has most: each block goes to the first that is free.

    Examples
    --------
    >>> busiest([8] * 132, 132), busiest([8] * 133, 132), busiest([1, 9, 1, 1], 2)
    (8, 16, 9)
    """
    ends = [0] * places
    for work in tiles:
        heapq.heapreplace(ends, ends[0] + work)
    return max(ends)


def memory_seconds(launch: Launch) -> float:
    """Return the time of every byte, once, at the bandwidth of a copy."""
    return (launch.kv_bytes + launch.other_bytes) / COPY


def cache_seconds(launch: Launch) -> float:
    """Return the time of every byte, as often as it is asked for."""
    return launch.asked_bytes / L2


def in_flight_seconds(launch: Launch) -> float:
    """Return the time of what is asked for, at what is on its way in one latency of the memory.

    That is what the blocks at work have on their way; their number is averaged over the launch.
    """
    if not launch.asked_bytes:
        return 0.0
    blocks = sum(launch.tiles) / launch.chain
    return launch.asked_bytes * MEMORY_LATENCY / (blocks * launch.in_flight)


def issue_seconds(launch: Launch) -> float:
    """Return the time of all instructions of the busiest multiprocessor."""
    return _busy_seconds(launch, sum(launch.counts.values()) / ISSUE_RATE)


def pipe_seconds(launch: Launch) -> float:
    """Return the time of the pipe that takes longest."""
    cycles = (launch.counts[kind] / rate for kind, rate in PIPE_RATES.items())
    return _busy_seconds(launch, max(cycles))


def shared_seconds(launch: Launch) -> float:
    """Return the time of the traffic of shared memory; shuffles go by the same way."""
    return _busy_seconds(launch, shared_accesses(launch.counts) / SHARED_RATE)


def shared_accesses(counts: Counter[str]) -> float:
    """Count a warp's accesses to shared memory, in units of 128 bytes.

    Examples
    --------
    >>> shared_accesses(Counter({"LDS.128": 2, "STS.16": 1, "SHFL": 5, "LDG.128": 7}))
    14.0
    """
    total = float(counts["SHFL"])
    for kind, times in counts.items():
        name, _, bits = kind.partition(".")
        if name in ("LDS", "STS", "LDGSTS"):
            total += times * max(1.0, int(bits) / 32)
    return total


def _busy_seconds(launch: Launch, cycles: float) -> float:
    """Return the time of the busiest multiprocessor, by the cycles that a warp's tile takes it."""
    return busiest(launch.tiles, MULTIPROCESSORS) * launch.warps * cycles / CLOCK


def latency_seconds(launch: Launch) -> float:
    """Return the time of tiles one after the other, of as many blocks at a time as are resident."""
    cycles = BARRIER * launch.counts["BAR"] + SHUFFLE * launch.shuffles
    cycles += ALONE * sum(launch.counts.values())
    return launch.chain * (cycles / CLOCK + MEMORY_LATENCY * launch.waits)


BOUNDS = {
    "memory": memory_seconds,
    "L2": cache_seconds,
    "in flight": in_flight_seconds,
    "issue": issue_seconds,
    "pipes": pipe_seconds,
    "shared": shared_seconds,
    "latency": latency_seconds,
}


class Estimate(NamedTuple):
    """A decode step on paper; times in seconds."""

    bounds: dict[str, float]  # of its first launch, which reads K and V
    others: float  # launches
    gaps: float

    @property
    def binding(self) -> str:
        """The bound that is largest."""
        return max(self.bounds, key=lambda name: self.bounds[name])

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.bounds[self.binding] + self.others + self.gaps


def bounds_of(launch: Launch) -> dict[str, float]:
    """Return what a launch cannot be faster than, by the name of the reason."""
    return {name: bound(launch) for name, bound in BOUNDS.items()}


def estimate(step: list[Launch]) -> Estimate:
    """Estimate a step: its launches follow one another, with a gap for each."""
    first, *others = map(bounds_of, step)
    return Estimate(first, sum(max(bounds.values()) for bounds in others), LAUNCH_GAP * len(step))


def launches(workload: Workload) -> list[Launch]:
    """Describe the launches of a decode step, the one that reads K and V first.

    This is the place that knows the kernels; all else here takes them as they come.
    """
    dim, rows = workload.head_dim, workload.num_seqs
    gqa = workload.num_q_heads // workload.num_kv_heads
    variant = _plan_cuda.split_variant(_plan_cuda.StepVariant(dim, dim, True), gqa, True)
    groups = _plan.ceil_div(gqa, variant.heads)
    splits = [SPLIT] * sum(n // SPLIT for n in workload.seq_lens)
    splits += [n % SPLIT for n in workload.seq_lens if n % SPLIT]
    partial_bytes, state_bytes = (
        4 * states * workload.num_q_heads * (dim + 2) for states in (len(splits), rows)
    )
    kernel = compiled("split", variant)
    tile_bytes = variant.tile * variant.token_bytes
    split = Launch(
        name="split",
        kernel=kernel,
        threads=variant.threads,
        tiles=tuple(
            _plan.ceil_div(n, variant.tile)
            for n in splits
            for _ in range(workload.num_kv_heads * groups)
        ),
        kv_bytes=workload.kv_bytes,
        asked_bytes=workload.kv_bytes * groups,
        other_bytes=partial_bytes + 2 * rows * workload.num_q_heads * dim,
        in_flight=(variant.stages - 1) * tile_bytes,
        counts=counts_of_tile(_sass.parse(kernel.sass), SPLIT // variant.tile),
        # Of the rows of a lane, which are summed side by side, one; and the two of absorb.
        shuffles=math.log2(variant.key.lanes) + 2 * math.log2(variant.tile),
        # A split waits for its item and for its table; then for what it has begun to copy.
        waits=3 * variant.tile / SPLIT,
    )
    partials = [_plan.ceil_div(n, SPLIT) for n in workload.seq_lens]
    merge = rest_of_step(
        "merge_splits",
        tiles=[_plan.ceil_div(n, WARP) for n in partials for _ in range(workload.num_q_heads)],
        threads=WARP * _plan.ceil_div(dim, WARP),
        other_bytes=partial_bytes + 2 * state_bytes,
    )
    pairs = rows * workload.num_q_heads
    return [
        split,
        rest_of_step("list_items", [1] * rows, WARP, 0),
        merge,
        rest_of_step("finalize-bfloat16", [1] * pairs, WARP, state_bytes),
    ]


def rest_of_step(name: str, tiles: list[int], threads: int, other_bytes: int) -> Launch:
    """Describe a launch that reads no K or V; it waits for the memory once in each pass."""
    kernel = compiled(name)
    counts = _sass.count(_sass.parse(kernel.sass), None, 1)
    return Launch(name, kernel, threads, tuple(tiles), 0, 0, other_bytes, 0, counts, 0, 1)


def counts_of_tile(program: _sass.Program, tiles_of_split: int) -> Counter[str]:
    """Count a warp's instructions for a tile, and its share of those for the split around it."""
    loop = _sass.main_loop(program)
    assert loop is not None, "a step walks its tiles in a loop"
    tile = _sass.count(program, loop, 0)
    if (around := _sass.outer_loop(program, loop)) is None:
        return tile
    split = _sass.count(program, around, 1) - tile
    return Counter({kind: tile[kind] + split[kind] / tiles_of_split for kind in tile | split})


def compiled(name: str, variant: _plan_cuda.StepVariant | None = None) -> Compiled:
    """Compile a kernel."""
    return _ptx.compile_named(name, variant, CAPABILITY, disassemble=True)


HEADS = (
    *(
        "kernel",
        "registers",
        "blocks/SM",
        "instr./tile",
        *BOUNDS,
        "binds",
        "its us",
        "of copy",
        "others",
        "gaps",
    ),
    *("us", "of copy", "measured us", "of copy"),
)


def row(workload: Workload, step: list[Launch], measured: float | None) -> list[str]:
    """Return the cells of a workload; `measured` is in microseconds."""
    paper, first = estimate(step), step[0]
    alone = paper.bounds[paper.binding]
    times = [*paper.bounds.values(), alone, paper.others, paper.gaps]
    *before, its, others, gaps = (f"{seconds * 1e6:.1f}" for seconds in times)
    return [
        *(workload.name, first.name, str(first.kernel.registers), str(first.resident)),
        *(f"{sum(first.counts.values()):.0f}", *before, paper.binding, its),
        *(f"{of_copy(workload, alone):.3f}", others, gaps),
        *(f"{paper.total * 1e6:.1f}", f"{of_copy(workload, paper.total):.3f}"),
        "" if measured is None else f"{measured:.1f}",
        "" if measured is None else f"{of_copy(workload, measured / 1e6):.3f}",
    ]


def of_copy(workload: Workload, seconds: float) -> float:
    """Return the rate at which K and V are read, as a fraction of a copy's."""
    return workload.kv_bytes / seconds / COPY


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="W1,W2,W3,W4,W5,W6", help="names, by commas")
    parser.add_argument("--measured", type=pathlib.Path, help="a file of figures, as JSON")
    options = parser.parse_args(arguments)
    names = options.workload.split(",")
    if unknown := set(names) - set(WORKLOADS):
        parser.error(f"--workload: expected names of {', '.join(WORKLOADS)}, got {unknown}")
    if reason := _ptx.missing(disassembler=True):
        print(reason)
        return 1
    measured = json.loads(options.measured.read_text()) if options.measured else {}
    rows = [["", *HEADS], ["---", *["---:"] * len(HEADS)]]
    rows += (row(WORKLOADS[name], launches(WORKLOADS[name]), measured.get(name)) for name in names)
    print("\n".join(f"| {' | '.join(cells)} |" for cells in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
