"""One table of ratios: numba_attn, what a user would pick instead, and the bandwidth probes.

    python bench/compare.py --workload W1,W4
    VLLM_SO=.../vllm/_C.abi3.so python bench/compare.py
    python bench/compare.py --scaling

Every contender runs in bursts, in turn, in one process, over pools in rotation. OpenMP workers (of
torch and vLLM) and those of OpenBLAS (NumPy) spin after their work and would hold the cores of
whoever runs next: each burst follows a pause, and its first calls are not counted.

On a machine that others use too, give it the cores: ``chrt -f 10 python bench/compare.py``.
"""

import argparse
import json
import pathlib
import statistics
import sys

import contenders

import numba_attn
from numba_attn import _arguments, _check, _decode, _machine, _measure, _probe
from numba_attn._progress import Progress
from numba_attn._workloads import Workload, make_steps

OURS, BLOCK_ORDER, SEQUENTIAL = "numba_attn", "block-order read", "sequential read"
BURSTS = {"burst": 12, "uncounted": 3, "rest": 0.05}
ORACLE_TOKENS = 40_000
MOST_SPREAD = 0.15  # of the block-order probe; beyond it a run is repeated
ATTEMPTS = 3
PEER_ERROR = 0.02  # peers keep weights in bfloat16: an order below a wrong answer
COPIES = 4  # of the pools, in the contenders' own layouts

SCALING = [Workload(f"context {2**i}", (2**i,), 32, 8, 128) for i in range(8, 18)]
SCALING += [Workload(f"batch {2**i}", (1024,) * 2**i, 32, 8, 128) for i in range(7)]


def main(arguments=None):
    """Run the command; return its exit status: 1 where an answer is wrong."""
    options = parse(arguments)
    numba_attn.set_num_threads(options.threads)
    present = {} if options.scaling else with_torch_threads(options.threads)
    print(heading(present))
    effort = _decode.QUICK if options.quick else _decode.FULL
    progress, results = Progress(), []
    for wanted in SCALING if options.scaling else options.workload:
        workload, num_pools = effort.fit(wanted, _machine.available_memory() // COPIES)
        if options.scaling and workload != wanted:
            continue  # a cut context is another row of the table
        results.append(compare(workload, num_pools, present, options.seconds, progress))
        progress.clear()
        print(line(results[-1]), flush=True)
    print("\n" + (scaling_table if options.scaling else table)(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    wrong = [result["workload"] for result in results if result["wrong"]]
    if wrong:
        print(f"wrong answers: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def parse(arguments):
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "W1,W2,W3,W4,W5,W6"
    parser.add_argument("--workload", type=_arguments.workloads, default=default)
    parser.add_argument("--seconds", type=float, default=12.0, help="per workload (default 12)")
    threads = numba_attn.get_num_threads()
    parser.add_argument("--threads", type=_arguments.thread_count, default=threads)
    parser.add_argument("--scaling", action="store_true", help="time per byte over sizes")
    parser.add_argument("--quick", action="store_true", help="short contexts, little memory")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    return parser.parse_args(arguments)


def with_torch_threads(threads):
    """Return the contenders that are here; their libraries get as many threads as we do."""
    present, missing = contenders.available()
    for name, reason in missing.items():
        print(f"without {name}: {reason}")
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
    return present


def heading(present):
    """Say where the figures come from."""
    versions = ", ".join(f"{name} {text}" for name, text in _machine.versions().items())
    lines = [versions, f"CPU: {_machine.cpu_name()}, {numba_attn.get_num_threads()} threads"]
    if present:
        sets = contenders.instruction_sets().items()
        lines += [f"{name}: {instructions}" for name, instructions in sets]
    return "\n".join(lines) + "\n"


def compare(workload, num_pools, present, seconds, progress):
    """Check every contender on one workload, then time them all; return the figures."""
    name = f"{workload.name}:"
    progress.say(f"{name} making {num_pools} pools")
    steps = make_steps(workload, num_pools)
    calls = {
        OURS: _decode.contenders(steps, "cpu")["attention"],
        BLOCK_ORDER: [_probe.block_order(step) for step in steps],
        SEQUENTIAL: [_probe.sequential(step) for step in steps],
    }
    for peer, make in present.items():
        progress.say(f"{name} preparing {peer}")
        calls[peer] = [make(step) for step in steps]
    progress.say(f"{name} checking")
    wrong = wrong_answers(steps[0], calls, present)
    times = time_quietly(calls, seconds, lambda part: progress.say(f"{name} measuring", part))
    return {
        "workload": workload.name,
        "kv_bytes": workload.kv_bytes,
        "num_pools": num_pools,
        "ms": {who: statistics.median(values) * 1e3 for who, values in times.items()},
        "probe_spread": _measure.spread(times[BLOCK_ORDER]),
        "wrong": wrong,
    }


def wrong_answers(step, calls, present):
    """Name the contenders whose answer is wrong: ours by its bound, peers against ours."""
    ours, lse = numba_attn.paged_attention(*step.arguments(), return_lse=True)
    part = _check.part(step, ours, lse, ORACLE_TOKENS)
    holds = all(check.ok for check in _check.check_answer("cpu", "one call", *part))
    off = [who for who in present if contenders.worst_error(calls[who][0](), ours) > PEER_ERROR]
    return off if holds else [OURS, *off]


def time_quietly(calls, seconds, on_progress):
    """Time all contenders; again where the machine was too restless to trust the medians."""
    runs = []
    for _ in range(ATTEMPTS):
        runs.append(_measure.in_turn(calls, seconds, on_progress=on_progress, **BURSTS))
        if _measure.spread(runs[-1][BLOCK_ORDER]) <= MOST_SPREAD:
            break
    return min(runs, key=lambda times: _measure.spread(times[BLOCK_ORDER]))


def line(result):
    """Return one workload's figures in a line."""
    ms, size = result["ms"], result["kv_bytes"]
    parts = [f"{result['workload']}: {ms[OURS]:.3f} ms, {size / ms[OURS] / 1e6:.1f} GB/s"]
    parts += [f"{ms[probe] / ms[OURS]:.2f} of {probe}" for probe in (BLOCK_ORDER, SEQUENTIAL)]
    peers = [who for who in ms if who not in (OURS, BLOCK_ORDER, SEQUENTIAL)]
    parts += [f"{ms[who] / ms[OURS]:.2f} x {who}" for who in peers]
    return ", ".join(parts) + f" (probe spread {result['probe_spread']:.0%})"


def table(results):
    """Return the figures of all workloads: ms, and in brackets the time in units of ours."""
    rows = [["", *(result["workload"] for result in results)]]
    rows.append(["---", *["---:"] * len(results)])
    for who in results[0]["ms"]:
        cells = (cell(result["ms"][who], result["ms"][OURS]) for result in results)
        rows.append([who, *cells])
    spreads = (f"{result['probe_spread']:.0%}" for result in results)
    rows.append(["probe spread", *spreads])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def cell(ms, ours):
    """Return a time, and how many times ours it is."""
    return f"{ms:.2f}" if ms == ours else f"{ms:.2f} ({ms / ours:.2f}x)"


def scaling_table(results):
    """Return the time per byte over sizes; flat is good."""
    rows = ["| | K/V MB | ms | ps per byte | of block-order read |", "|---|---:|---:|---:|---:|"]
    for result in results:
        ms, size = result["ms"], result["kv_bytes"]
        rows.append(
            f"| {result['workload']} | {size / 1e6:.1f} | {ms[OURS]:.3f} "
            f"| {ms[OURS] * 1e9 / size:.1f} | {ms[BLOCK_ORDER] / ms[OURS]:.2f} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
