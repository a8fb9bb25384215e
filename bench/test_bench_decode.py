import itertools
import statistics
import time

import compare
import contenders
import pytest

import numba_attn
from numba_attn import _check, _decode, _device, _machine, _measure
from numba_attn._workloads import WORKLOADS, make_steps

ORACLE_TOKENS = 40_000  # (query head, token) pairs that the float64 reference is asked for
SMOKE = _decode.Effort(rotation_bytes=400_000, step_bytes=200_000, seconds=0.01)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and (_device.is_simulator() or _device.cuda_problem()):
        pytest.skip("no CUDA device here")
    return request.param


def check(step, device):
    out, lse = numba_attn.paged_attention(*step.arguments(), return_lse=True, device=device)
    checks = _check.check_answer(device, "decode", *_check.part(step, out, lse, ORACLE_TOKENS))
    failed = [str(result) for result in checks if not result.ok]
    assert not failed


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_decode(benchmark, name, device):
    effort = _decode.FULL if benchmark.enabled else SMOKE
    workload, num_pools = effort.fit(WORKLOADS[name], _machine.available_memory())
    steps = make_steps(workload, num_pools)
    check(steps[0], device)
    calls = _decode.contenders(steps, device)
    if device == "cpu":
        calls["numpy"] = [contenders.numpy_gather(step) for step in steps]
    rotation = itertools.cycle(calls["attention"])
    time.sleep(compare.BURSTS["rest"])  # NumPy's threads spin after the check
    benchmark(lambda: next(rotation)())

    times = _measure.in_turn(calls, effort.seconds, **compare.BURSTS)
    median = {contender: statistics.median(values) for contender, values in times.items()}
    benchmark.extra_info.update(
        kv_bytes=workload.kv_bytes,
        num_pools=num_pools,
        threads=numba_attn.get_num_threads(),
        cpu=_machine.cpu_name(),
        gb_per_s=workload.kv_bytes / median["attention"] / 1e9,
        block_order_probe_spread=_measure.spread(times["block_order"]),
        **{
            f"{contender}_over_attention": value / median["attention"]
            for contender, value in median.items()
            if contender != "attention"
        },
    )
    assert all(value > 0 for value in median.values())
