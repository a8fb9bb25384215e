"""Check what runs on this machine, then measure it: ``python -m numba_attn``.

``python -m numba_attn stream`` attends to a KV cache on disk; see `_stream_demo`.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

from . import _arguments, _check, _decode, _device, _machine, _stream_demo, _threads
from ._progress import Progress
from ._workloads import WORKLOADS, Workload

_DEFAULT_WORKLOADS = "W0,W1,W2,W4"
_LAYERS = 32


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status: 1 when a check fails.

    Bad arguments end it with status 2.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["stream"]:
        return _stream_demo.main(arguments[1:])
    options = _parse(arguments)
    threads_before = _threads.get_num_threads()
    if options.threads is not None:
        _threads.set_num_threads(options.threads)
    try:
        return _run(options)
    finally:
        _threads.set_num_threads(threads_before)


def _run(options: argparse.Namespace) -> int:
    progress = Progress()
    machine = _machine.describe()
    _print_machine(machine)
    checks = _run_checks(options.devices, progress)
    failed = [check for check in checks if not check.ok]
    results = [] if failed else _run_measurements(options, progress)
    if options.json:
        _write_json(options.json, machine, checks, results)
    print()
    print(_failure(failed) if failed else _summary(results))
    return 1 if failed else 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Parse and check the command line; say what is wrong and exit with 2 where it is bad."""
    parser = argparse.ArgumentParser(
        prog="python -m numba_attn",
        description="Check every device against the float64 reference, then measure decode "
        "attention beside this machine's own read bandwidth.",
        epilog="python -m numba_attn stream --help: attention over a KV cache on disk that is "
        "larger than memory.",
    )
    parser.add_argument(
        "--workload",
        type=_arguments.workloads,
        metavar="W1,W3",
        help=f"workloads to measure, of {', '.join(WORKLOADS)} (default {_DEFAULT_WORKLOADS})",
    )
    parser.add_argument(
        "--shape",
        type=_arguments.shape,
        action="append",
        metavar="S,context,Hq/Hkv,D",
        help="your own model: sequences, tokens in the cache, query/kv heads, head_dim",
    )
    parser.add_argument("--device", choices=_device.DEVICES, default="auto")
    parser.add_argument(
        "--threads",
        type=_arguments.thread_count,
        metavar="N",
        help="CPU threads (default: all usable cores)",
    )
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="write all figures to a file"
    )
    parser.add_argument(
        "--quick", action="store_true", help="shorter contexts, less memory, less time; rough"
    )
    options = parser.parse_args(arguments)
    if options.json and not options.json.parent.is_dir():
        parser.error(f"argument --json: no folder {str(options.json.parent)!r}; create it first")
    options.workloads = _workloads(options)
    try:
        options.devices = _devices(options.device)
    except RuntimeError as error:
        parser.error(f"argument --device: {error}")
    return options


def _workloads(options: argparse.Namespace) -> list[Workload]:
    """Return what was asked for; the default where nothing was."""
    chosen = [*(options.workload or []), *(options.shape or [])]
    return chosen or _arguments.workloads(_DEFAULT_WORKLOADS)


def _devices(requested: str) -> list[str]:
    """Return the devices to check: all there are, or the one asked for.

    Raises
    ------
    RuntimeError
        If it is not available.
    """
    if requested == "auto":
        return list(_device.available_devices())
    return [_device.resolve(requested, home="cpu")]


def _print_machine(machine: dict[str, Any]) -> None:
    print(", ".join(f"{name} {version}" for name, version in machine["versions"].items()))
    print(f"CPU: {machine['cpu']}, {machine['threads']} of {machine['usable_cores']} cores used")
    for name, what in machine["devices"].items():
        print(f"device {name!r}: {what}")
    if machine["cuda_problem"]:
        print(f"device 'cuda' is not available: {machine['cuda_problem']}")
    print()


def _run_checks(devices: list[str], progress: Progress) -> list[_check.Check]:
    """Check each device, on a ragged batch with grouped query heads; print every comparison."""
    checks = []
    for device in devices:
        batch = _check.TINY if _is_simulated(device) else _check.RAGGED
        print(f"{device} against the float64 reference: {batch.describe()}")
        progress.say(f"checking {device}")
        for check in _check.check_device(device, batch):
            progress.clear()
            print(f"  {check}", flush=True)
            checks.append(check)
    return checks


def _is_simulated(device: str) -> bool:
    return device == "cuda" and _device.is_simulator()


def _run_measurements(options: argparse.Namespace, progress: Progress) -> list[_decode.Result]:
    """Measure each workload on each device; print a table, row by row."""
    effort = _decode.QUICK if options.quick else _decode.FULL
    devices = [device for device in options.devices if not _is_simulated(device)]
    if devices:
        print(f"\nDecode, one step{' (--quick: rough)' if options.quick else ''}:\n{_HEADER}")
    results = []
    for device in devices:
        for wanted in options.workloads:
            workload, num_pools = effort.fit(wanted, _machine.available_memory())
            result = _decode.measure(workload, device, num_pools, effort.seconds, progress)
            progress.clear()
            print(_row(result) + (" *" if workload != wanted else ""), flush=True)
            results.append(result)
    if any(result.workload not in options.workloads for result in results):
        print("* contexts cut to fit into memory" + (" and --quick" if options.quick else ""))
    return results


_HEADER = (
    f"{'':4} {'device':6} {'S':>3} {'context':>10} {'heads':>6} {'D':>4} "
    f"{'ms':>8} {'GB/s':>6}  of block-order / sequential read"
)


def _row(result: _decode.Result) -> str:
    workload = result.workload
    row = (
        f"{workload.name:4} {result.device:6} {workload.num_seqs:3} {workload.context:>10} "
        f"{workload.num_q_heads:>3}/{workload.num_kv_heads:<2} {workload.head_dim:4} "
        f"{result.attention * 1e3:8.3f} "
    )
    if workload.measures_latency:
        return row + f"{'-':>6}  (the cost of a call)"
    fractions = f"{result.of_block_order:.2f} / {result.of_sequential:.2f}"
    return row + f"{result.gigabytes_per_second:6.1f}  {fractions}"


def _failure(failed: list[_check.Check]) -> str:
    devices = ", ".join(dict.fromkeys(check.device for check in failed))
    return (
        f"{len(failed)} checks failed on {devices}: results here are wrong, so nothing was measured"
    )


def _summary(results: list[_decode.Result]) -> str:
    """Say the outcome in one sentence, for the first workload that reads from memory."""
    if not results:
        return "The CUDA simulator passed its checks; it has no speed to measure."
    large = [result for result in results if not result.workload.measures_latency]
    result = (large or results)[0]
    workload = result.workload
    read = (
        f"reads K/V at {result.gigabytes_per_second:.1f} GB/s, {result.of_block_order:.0%} of "
        f"this machine's read bandwidth in block order ({result.of_sequential:.0%} of sequential)"
        if large
        else f"takes {result.attention * 1e6:.0f} us a call"
    )
    batch = "token" if workload.num_seqs == 1 else f"step of {workload.num_seqs} tokens"
    return (
        f"{workload.name} on {result.device} {read}; a {_LAYERS}-layer model of that shape "
        f"({workload.describe()}) spends {result.attention * _LAYERS * 1e3:.1f} ms in attention "
        f"per {batch}."
    )


def _write_json(
    path: pathlib.Path,
    machine: dict[str, Any],
    checks: list[_check.Check],
    results: list[_decode.Result],
) -> None:
    report = {
        "machine": machine,
        "checks": [vars(check) | {"ok": check.ok} for check in checks],
        "results": [result.as_dict() for result in results],
    }
    path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
