"""Graphs of what is launched on a stream, and times by events; with a way round what is missing."""

import statistics
import time
from unittest import mock

from numba_attn import _device

BURST_SECONDS = 0.02
MOST_REPEATS = 20


def captured(run, stream):
    """Capture what a function launches on a stream.

    Returns
    -------
    replay : callable
        The function itself where no way to capture works.
    how : str
        "graph", or why it is none.
    """
    run()  # what is compiled or allocated on first use
    stream.synchronize()
    reasons = []
    for capture in (_by_bindings, _by_cupy, _by_torch):
        try:
            replay = capture(run, stream)
            replay()
            stream.synchronize()
        except Exception as error:  # each library and version has its own
            reasons.append(f"{capture.__name__}: {type(error).__name__} {error}".splitlines()[0])
        else:
            return replay, "graph"
    return run, "launches: " + "; ".join(reasons)


def _by_bindings(run, stream):
    try:
        from cuda.bindings import driver
    except ImportError:  # before 12.8
        from cuda import cuda as driver

    def value(result):
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


def _by_cupy(run, stream):
    import cupy

    theirs = cupy.cuda.ExternalStream(int(stream))
    theirs.begin_capture()
    try:
        run()
    finally:
        graph = theirs.end_capture()
    return lambda: graph.launch(theirs)


def _by_torch(run, stream):
    return torch_graph(run, stream)


def torch_graph(run, stream):
    """Capture what torch launches: its allocator must know, or a graph would use freed memory."""
    import torch

    theirs, graph = torch.cuda.ExternalStream(int(stream)), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=theirs, capture_error_mode="relaxed"):
        run()

    def replay():
        with torch.cuda.stream(theirs):
            graph.replay()

    return replay


def launches_of(function):
    """Return the launches of a function, (kernel, blocks, threads, *arguments), unmade."""
    launches = []
    with mock.patch.object(_device.backend("cuda"), "launch", lambda *args: launches.append(args)):
        function()
    return launches


def name_of(kernel):
    """Return the name of a kernel's function."""
    return getattr(getattr(kernel, "py_func", None) or kernel.fn, "__name__", "kernel")


def launching(launches, stream):
    """Return the function that makes launches on a stream."""
    launch = _device.backend("cuda").launch

    @_device.streamed
    def make(stream):
        for args in launches:
            launch(*args)

    return lambda: make(stream=stream)


def in_bursts(calls, stream, seconds, least_rounds=3):
    """Time calls in bursts, in turn; return the median burst's seconds of one call for each."""
    times = {name: [] for name in calls}
    repeats = {name: _repeats(run, stream) for name, run in calls.items()}
    begin, rounds = time.perf_counter(), 0
    while rounds < least_rounds or time.perf_counter() - begin < seconds:
        rounds += 1
        for name, run in calls.items():
            times[name].append(timed(run, stream, repeats[name]))
    return {name: statistics.median(found) for name, found in times.items()}


def _repeats(run, stream):
    return max(1, min(MOST_REPEATS, int(BURST_SECONDS / max(timed(run, stream, 1), 1e-9))))


def timed(run, stream, repeats):
    """Return the seconds of one of several calls that follow an untimed one."""
    cuda = _device.cuda()
    run()
    if _device.is_simulator():  # whose events have no times
        return on_the_host(run, repeats)
    begin, end = (cuda.event(timing=True) for _ in range(2))
    begin.record(stream)
    for _ in range(repeats):
        run()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repeats


def on_the_host(run, repeats):
    """Return the seconds of the host of one of several calls."""
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - begin) / repeats
