"""Check the CUDA twin on a machine with a GPU, and measure it there: one run of a few minutes.

    python bench/device_check.py --json FILE      all of it, within --minutes
    python bench/device_check.py --only golden    the tasks whose names begin so
    python bench/device_check.py --tiny           a few tokens, in one process: for the simulator

A hung or faulting kernel takes its process with it, so tasks run in children: those that time
nothing side by side, the others in turn after them. The exit status is 1 where a result is wrong or
a task did not end. Times are of graph replays over pools read in turn, beside a device-to-device
copy.
"""

import argparse
import concurrent.futures
import importlib
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import warnings

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE.parent / "tests")]

import _device_report  # noqa: E402 (its folder is on the path now)
import _device_table  # noqa: E402

import numba_attn  # noqa: E402
from numba_attn import _device, _machine  # noqa: E402

LIBRARIES = "numba", "cupy", "torch"
CORRECT = (
    "primitives",
    *(f"{task} {library}" for task in ("golden", "properties") for library in LIBRARIES),
    *("formats", "cases", "ragged", "twins"),
)
TIMED = tuple(f"measure W{i}" for i in range(7))
CORRECT_SHARE = 0.55  # of the minutes, at most
PACKAGES = (
    "torch",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "cuda-bindings",
    "flash-attn",
    "flashinfer-python",
)


def function_of(task):
    """Return a task's function of a report and of whether all is tiny."""
    name, *words = task.split()
    module = importlib.import_module("_device_time" if name == "measure" else "_device_correct")
    function = getattr(module, name)
    return lambda report, tiny: function(report, tiny, *words)


def run_task(task, tiny):
    """Run one task in this process; return its result."""
    report = _device_report.Report(task)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Grid size .* low occupancy")
        if report.check("the task", lambda: function_of(task)(report, tiny)):
            report.passed.pop()  # what it checked stands before
    return report.result()


def in_children(tasks, deadline):
    """Run tasks in a child, one after the other; those after a task that ends it in a new one."""
    left = list(tasks)
    while left:
        found, said, ended = _child(left, deadline)
        yield said, found
        left = left[len(found) :]
        if left:
            yield "", [_device_report.no_result(left.pop(0), ended)]


def _child(tasks, deadline):
    """Return the results of the tasks that came to their end, what was said, and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "results"
        file.touch()
        command = [
            sys.executable,
            "-u",
            __file__,
            "--tasks",
            ",".join(tasks),
            "--results",
            str(file),
        ]
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=max(1.0, deadline - time.monotonic()),
            )
            said, ended = done.stdout, f"the process ended with status {done.returncode}"
        except subprocess.TimeoutExpired as error:
            said, ended = error.stdout or b"", "out of time"
        found = [json.loads(text) for text in file.read_text().splitlines()]
    return found, said.decode(errors="replace"), ended


def run_all(tasks, minutes):
    """Yield the results of all tasks: first those that time nothing, side by side."""
    begin = time.monotonic()
    correct = [task for task in tasks if task in CORRECT]
    deadline = begin + 60 * minutes * CORRECT_SHARE
    with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1)) as pool:
        jobs = [pool.submit(lambda t: list(in_children([t], deadline)), task) for task in correct]
        for job in concurrent.futures.as_completed(jobs):
            yield from job.result()
    yield from in_children([task for task in tasks if task not in CORRECT], begin + 60 * minutes)


def run_here(tasks):
    """Yield the results of all tasks, tiny, from this process."""
    for task in tasks:
        yield "", [run_task(task, tiny=True)]


def versions():
    """Return what the results depend on, in words."""
    found = dict(_machine.versions())
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found |= {f"device {name}": what for name, what in numba_attn.available_devices().items()}
    asked = "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem"
    try:
        said = subprocess.run(
            ["nvidia-smi", asked, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
        )
        found["nvidia-smi"] = said.stdout.strip() or said.stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        found["nvidia-smi"] = f"none ({type(error).__name__})"
    return found


def parse(arguments):
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a few tokens, in this process")
    parser.add_argument("--only", default="", help="beginnings of tasks' names, by commas")
    parser.add_argument("--minutes", type=float, default=7.5, help="for all of it (default 7.5)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--tasks", help=argparse.SUPPRESS)  # of a child
    parser.add_argument("--results", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    chosen = [t for t in (*CORRECT, *TIMED) if t.startswith(tuple(options.only.split(",")))]
    if not chosen:
        parser.error(f"--only: expected beginnings of {', '.join((*CORRECT, *TIMED))}")
    return options, chosen


def main(arguments=None):
    """Run everything; return the exit status."""
    options, tasks = parse(arguments)
    if options.tasks:
        for task in options.tasks.split(","):
            with options.results.open("a") as file:
                file.write(json.dumps(run_task(task, tiny=False)) + "\n")
        return 0
    _device.require_cuda()
    whole = {"versions": versions(), "results": []}
    print("\n".join(f"{name}: {what}" for name, what in whole["versions"].items()), flush=True)
    if options.tiny:
        tasks = [task for task in tasks if task not in TIMED[1:]]
    for said, found in run_here(tasks) if options.tiny else run_all(tasks, options.minutes):
        whole["results"] += found
        print(said + "\n".join(map(_device_report.line, found)), flush=True)
        if options.json:
            options.json.write_text(json.dumps(whole, indent=1) + "\n")
    print("\n" + _device_table.table(whole["results"]))
    failed = sum(len(result["failed"]) for result in whole["results"])
    print(f"\n{failed} checks FAILED" if failed else "\nall checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
