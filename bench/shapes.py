"""Time per byte of odd head dims and block sizes, beside the nearest size that fits the vectors.

    python bench/shapes.py

Pairs run in bursts, in turn, in one process, over pools in rotation.
"""

import argparse
import dataclasses
import statistics
import sys

import numba_attn
from numba_attn import _machine, _measure
from numba_attn._workloads import Workload, make_steps

BURSTS = {"burst": 6, "uncounted": 2}
BASE = Workload("base", (8192,), 32, 8, 128)
TOKENS = 8000  # a multiple of every block size below but 3 and 17
PAIRS = [  # (odd size, size that fits)
    *(({"head_dim": odd}, {"head_dim": fits}) for odd, fits in ((40, 32), (80, 64), (80, 96))),
    *(({"head_dim": odd}, {"head_dim": fits}) for odd, fits in ((112, 96), (112, 128))),
    *(({"block_size": odd}, {"block_size": 16}) for odd in (1, 3, 17, 64, 1000)),
    *(({"num_q_heads": 8 * g}, {"num_q_heads": 8 * h}) for g, h in ((3, 4), (5, 8), (7, 8))),
]


def main(arguments=None):
    """Print a row per pair: the odd size's time per byte over that of the size that fits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="per pair (default 4)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="context length")
    parser.add_argument("--pools", type=int, default=8, help="pools in rotation (default 8)")
    options = parser.parse_args(arguments)
    print(f"CPU: {_machine.cpu_name()}, {numba_attn.get_num_threads()} threads")
    base = dataclasses.replace(BASE, seq_lens=(options.tokens,))
    for odd, fits in PAIRS:
        ratio = compare(base, odd, fits, options)
        print(f"{name(odd)} takes {ratio:.2f} of the time per byte of {name(fits)}", flush=True)
    return 0


def compare(base, odd, fits, options):
    """Return the ratio of times per byte."""
    workloads = [dataclasses.replace(base, **change) for change in (odd, fits)]
    calls = {}
    for key, workload in zip(("odd", "fits"), workloads, strict=True):
        steps = make_steps(workload, options.pools)
        calls[key] = [call(step) for step in steps]
    times = _measure.in_turn(calls, options.seconds, **BURSTS)
    per_byte = [
        statistics.median(times[key]) / workload.kv_bytes
        for key, workload in zip(("odd", "fits"), workloads, strict=True)
    ]
    return per_byte[0] / per_byte[1]


def call(step):
    """Bind one decode step."""
    return lambda: numba_attn.paged_attention(*step.arguments())


def name(change):
    """Name a size."""
    return ", ".join(f"{key} {value}" for key, value in change.items())


if __name__ == "__main__":
    sys.exit(main())
