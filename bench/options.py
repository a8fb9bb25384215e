"""What each option costs: its time over that of the plain call on the same step.

    python bench/options.py

All run in bursts, in turn, in one process, over pools in rotation.
"""

import argparse
import dataclasses
import statistics
import sys

import ml_dtypes
import numpy as np

import numba_attn
from numba_attn import _machine, _measure, _probe
from numba_attn._workloads import WORKLOADS, Workload, make_steps

BURSTS = {"burst": 6, "uncounted": 2}
WINDOW = 1024
MLA = Workload("MLA", (4096,) * 4, 16, 1, 576)
MLA_VALUES = 512  # v_pool is a view of so many columns of k_pool


def main(arguments=None):
    """Print a row per option."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="in all (default 30)")
    parser.add_argument("--tokens", type=int, help="context length (default: that of W1)")
    parser.add_argument("--pools", type=int, default=2, help="pools in rotation (default 2)")
    options = parser.parse_args(arguments)
    print(f"CPU: {_machine.cpu_name()}, {numba_attn.get_num_threads()} threads")
    workload, mla = WORKLOADS["W1"], MLA
    if options.tokens:
        workload = dataclasses.replace(workload, seq_lens=(options.tokens,))
        mla = dataclasses.replace(mla, seq_lens=(options.tokens,) * 4)
    calls = w1_calls(workload, options.pools)
    times = _measure.in_turn(calls, 0.8 * options.seconds, **BURSTS)
    plain = statistics.median(times["plain"])
    for name, taken in times.items():
        median = statistics.median(taken)
        print(f"{name:32} {1e3 * median:8.3f} ms  {median / plain:.2f} x plain", flush=True)
    times = _measure.in_turn(mla_calls(mla, options.pools), 0.2 * options.seconds, **BURSTS)
    ours, read = (statistics.median(times[name]) for name in ("MLA", "read of its keys"))
    size = f"S 4, context {mla.context}, G 16, D 576, Dv 512"
    print(f"MLA, {size}: {1e3 * ours:.3f} ms, {ours / read:.2f} x a read of its keys alone")
    return 0


def w1_calls(workload, num_pools):
    """Return the calls by option, one for each pool."""
    steps = make_steps(workload, num_pools)
    context, num_q_heads = workload.seq_lens[0], workload.num_q_heads
    slopes = 2.0 ** (-8 * (1 + np.arange(num_q_heads)) / num_q_heads)
    tokens = np.ones(steps[0].k_pool.shape[:3], np.float32)
    options = {
        "plain": {},
        "softcap": {"softcap": 30.0},
        "sinks": {"sinks": np.ones(num_q_heads)},
        "sliding_window = context": {"sliding_window": context},
        f"sliding_window = {WINDOW}": {"sliding_window": WINDOW},
        "ALiBi": {"alibi_slopes": slopes},
        "k_scale, v_scale": {"k_scale": 0.5, "v_scale": 2.0},
        "scales by token": {"k_scale": tokens, "v_scale": tokens},
    }
    calls = {name: [call(step, **given) for step in steps] for name, given in options.items()}
    for dtype in (np.float16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8, np.float32):
        calls[f"{np.dtype(dtype).name} pools"] = [call(converted(step, dtype)) for step in steps]
    calls["token ids, blocks of 1"] = [call(by_token(step)) for step in steps]
    return calls


def call(step, **options):
    """Bind one decode step."""
    return lambda: numba_attn.paged_attention(*step.arguments(), **options)


def converted(step, dtype):
    """Store the pools in another format (int8: as thirds)."""
    factor = 3 if np.dtype(dtype) == np.int8 else 1
    pools = (
        (pool.astype(np.float32) * factor).astype(dtype) for pool in (step.k_pool, step.v_pool)
    )
    k_pool, v_pool = pools
    return dataclasses.replace(step, k_pool=k_pool, v_pool=v_pool)


def by_token(step):
    """Ask for all tokens one by one, in random order: blocks of one token, nothing copied."""
    pools = (pool.reshape(-1, 1, *pool.shape[2:]) for pool in (step.k_pool, step.v_pool))
    k_pool, v_pool = pools
    ids = np.random.default_rng(0).permutation(len(k_pool))[None, : step.seq_lens[0]]
    ids = ids.astype(np.int32)
    return dataclasses.replace(step, k_pool=k_pool, v_pool=v_pool, block_tables=ids)


def mla_calls(workload, num_pools):
    """Return the calls of DeepSeek's absorbed attention, and a probe that reads its keys once."""
    steps = make_steps(workload, num_pools)
    attend, read = [], []
    for step in steps:
        values = step.k_pool[..., :MLA_VALUES]
        attend.append(call(dataclasses.replace(step, v_pool=values)))
        read.append(_probe.block_order(dataclasses.replace(step, v_pool=step.k_pool)))
    return {"MLA": attend, "read of its keys": read}


if __name__ == "__main__":
    sys.exit(main())
