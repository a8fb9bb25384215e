"""How fast the CUDA twin is on a workload, beside a copy and what a user would pick instead."""

import statistics
import time

import _device_graph as graphs
import _device_peers
import contenders
import numpy as np
from _device_arrays import KERNELS, assert_same_numbers
from _device_report import Missing

import numba_attn
from numba_attn import AttentionState, _arrays, _check, _device, _probe_cuda
from numba_attn._workloads import WORKLOADS, Workload, make_steps

COPY_BYTES = 1 << 30
ORACLE_TOKENS = 40_000
PEER_ERROR = 0.02  # peers keep weights in bfloat16: an order below a wrong answer
SECONDS = 2.5
CALLS = 20
TINY = Workload("tiny", (5,), 2, 1, 8, block_size=4)


class Decode:
    """A workload's steps on the device, with a state and an output that all of them work in."""

    def __init__(self, workload, num_pools):
        self.steps = make_steps(workload, num_pools)
        self.on_device = [_probe_cuda.to_device(step) for step in self.steps]
        first = self.on_device[0]
        self.state = AttentionState.like(first.q, first.v_pool)
        self.out = _arrays.empty("cuda", tuple(self.state.o.shape), np.uint16)
        self.stream = _device.cuda().stream()

    def call(self, step, kernel):
        """Launch one step; nothing is allocated from the second time on."""
        options = {"state": self.state, "out": self.out, "kernel": kernel, "stream": self.stream}
        numba_attn.paged_attention(*step.arguments(), **options)

    def running(self, kernel):
        """Return the function that launches all steps."""
        return lambda: [self.call(step, kernel) for step in self.on_device]


def measure(report, tiny, name):
    """Check and time one workload; the figures are of one step."""
    workload = TINY if tiny else WORKLOADS[name]
    decode = Decode(workload, 2 if tiny else workload.num_pools())
    figures, pools = report.figures, len(decode.steps)
    figures |= {"workload": name, "pools": pools, "kv_bytes": workload.kv_bytes, "how": {}}
    report.check("both kernels", _answers, decode)
    calls = {}
    for kernel in KERNELS:
        report.check(f"graph of {kernel}", _capture, decode, kernel, calls, figures["how"])
    copy_bytes = 1 << 16 if tiny else COPY_BYTES
    report.check("copy", _copy, decode, calls, copy_bytes)
    for peer in _device_peers.PEERS:
        report.check(peer, _peer, peer, decode, calls, figures["how"])
    times = graphs.in_bursts(calls, decode.stream, *((0, 1) if tiny else (SECONDS,)))
    figures["seconds"] = {who: value / pools for who, value in times.items() if who != "copy"}
    if "copy" in times:
        figures["copy_bytes_per_s"] = 2 * copy_bytes / times["copy"]
    report.check("kernel by kernel", _kernels, decode, figures)
    report.check("calls", _calls, decode, figures, 2 if tiny else CALLS)


def _answers(decode):
    """Hold the first step against the reference, and the kernels against each other."""
    answers = [
        numba_attn.paged_attention(*decode.on_device[0].arguments(), return_lse=True, kernel=kernel)
        for kernel in KERNELS
    ]
    answers = [tuple(map(_arrays.to_host, answer)) for answer in answers]
    assert_same_numbers(*zip(*answers, strict=True))
    out, lse = answers[0]
    part = _check.part(decode.steps[0], out.view(decode.steps[0].q.dtype), lse, ORACLE_TOKENS)
    wrong = [str(x) for x in _check.check_answer("cuda", "one call", *part) if not x.ok]
    assert not wrong, "; ".join(wrong)


def _capture(decode, kernel, calls, how):
    """Capture the public calls; where that fails, the launches that they make."""
    run = decode.running(kernel)
    replay, said = graphs.captured(run, decode.stream)
    if said != "graph":
        launches = graphs.launching(graphs.launches_of(run), decode.stream)
        replay, again = graphs.captured(launches, decode.stream)
        said = f"{again}, recorded; the call: {said}"
    calls[kernel], how[kernel] = replay, said
    run()
    decode.stream.synchronize()
    expected = np.array(_arrays.to_host(decode.out))
    _arrays.overwrite(decode.out, np.zeros_like(expected))
    replay()
    decode.stream.synchronize()
    assert_same_numbers((_arrays.to_host(decode.out), expected))


def _copy(decode, calls, size):
    cuda = _device.cuda()
    source, target = (cuda.device_array(size, np.uint8) for _ in range(2))
    calls["copy"] = lambda: target.copy_to_device(source, stream=decode.stream)
    calls["copy"]()


def _peer(name, decode, calls, how):
    if _device.is_simulator():
        raise Missing("the simulator is no device")
    try:
        found = _device_peers.prepare(name, decode.steps, decode.on_device, decode.stream)
    except Exception as error:  # it is not here, or cannot do this
        raise Missing(f"{type(error).__name__} {error}".splitlines()[0]) from error
    run, said, out = found
    ours = numba_attn.paged_attention(*decode.on_device[0].arguments())
    ours = _arrays.to_host(ours).view(decode.steps[0].q.dtype)
    calls[name], how[name] = run, said
    error = contenders.worst_error(out, ours)
    assert error <= PEER_ERROR, f"{name} and we differ by {error:.2g}"


def _kernels(decode, figures):
    """Time each kernel of `split` by itself, on the device and for the host to launch."""
    made = graphs.launches_of(decode.running("split"))
    figures["launches"] = len(made) // len(decode.steps)
    for kernel in dict.fromkeys(launch[0] for launch in made):
        run = graphs.launching([x for x in made if x[0] is kernel], decode.stream)
        replay, how = graphs.captured(run, decode.stream)
        seconds = graphs.timed(replay, decode.stream, graphs.MOST_REPEATS if how == "graph" else 1)
        count = sum(launch[0] is kernel for launch in made)
        host = graphs.on_the_host(run, 3) / count
        decode.stream.synchronize()
        name = {"step": "split"}.get(graphs.name_of(kernel), graphs.name_of(kernel))
        figures.setdefault("kernels", {})[name] = {
            "device": seconds / len(decode.steps), "host_per_launch": host, "how": how
        }  # fmt: skip


def _calls(decode, figures, count):
    """Time calls as a user makes them: by the host's clock, with the wait and without."""
    wait = _device.cuda().synchronize
    step = decode.on_device[0]
    ways = {
        "plain": lambda: numba_attn.paged_attention(*step.arguments()),
        "with state and out": lambda: decode.call(step, "auto"),
    }
    for name, call in ways.items():
        call()
        wait()
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            call()
            issued = time.perf_counter()
            wait()
            times.append((issued - begin, time.perf_counter() - begin))
        issue, whole = (statistics.median(column) for column in zip(*times, strict=True))
        figures.setdefault("calls", {})[name] = {"issue": issue, "whole": whole}
