"""The script that a GPU machine runs: what of it the simulator can run, and how it fails."""

import json
import pathlib
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from _bound import assert_same_bits
from _on_device import step_cuda, twin

import numba_attn
from numba_attn import _arrays, _device

BENCH = pathlib.Path(__file__).parent.parent / "bench"
pytestmark = pytest.mark.cuda


@pytest.fixture
def device_check(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import device_check

    return device_check


def results(path):
    found = json.loads(path.read_text())["results"]
    return {result["task"]: result for result in found}


def test_all_of_it_passes(device_check, capsys, tmp_path):
    but_primitives = "golden,properties,formats,cases,ragged,twins,measure"
    file = tmp_path / "results.json"
    assert device_check.main(["--tiny", "--only", but_primitives, "--json", str(file)]) == 0
    found = results(file)
    assert set(found) == {*device_check.CORRECT[1:], "measure W0"}
    for task, result in found.items():
        assert bool(result["passed"]) != ("cupy" in task or "torch" in task), task
    figures = found["measure W0"]["figures"]
    assert set(figures["seconds"]) == {"simple", "split"}
    names = {"reset", "list_items", "split", "merge_splits", "finalize_rows"}
    assert set(figures["kernels"]) == names
    said = capsys.readouterr().out
    assert "without SDPA gqa: the simulator is no device" in said
    assert said.endswith("all checks passed\n")


def test_a_wrong_result_is_a_failure(device_check, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(step_cuda().warp.recurrence, "weight", lambda m, m_new: 1.0)
    file = tmp_path / "results.json"
    only = ["--only", "cases,twins,measure W0", "--json", str(file)]
    assert device_check.main(["--tiny", *only]) == 1
    said = capsys.readouterr().out
    assert said.endswith("checks FAILED\n")
    assert "AssertionError: cuda" in said, "with its traceback"
    found = results(file)
    assert found["cases"]["failed"] == ["check, cuda simple", "check, cuda split"]
    assert found["cases"]["passed"] == ["check, cpu auto"]
    assert found["measure W0"]["failed"] == ["both kernels"]
    assert found["measure W0"]["figures"]["seconds"], "what follows has run"


def test_a_wrong_building_block_is_a_failure(device_check, monkeypatch):
    import _primitives

    monkeypatch.setattr(_primitives.warp, "divide", lambda a, b: a // b + 1)
    assert device_check.run_task("primitives", True)["failed"] == ["scalars"]


def test_kernels_that_differ_are_a_failure(device_check, monkeypatch):
    import _checks
    from _device_arrays import BothKernels

    merge = twin()._merge
    monkeypatch.setattr(twin(), "_merge", lambda *args: (merge(*args), merge(*args)))
    with pytest.raises(AssertionError, match="simple and split differ in"):
        _checks.full_blocks(BothKernels("numba"))


def test_a_task_that_cannot_begin_is_a_failure(device_check, monkeypatch, capsys):
    import _device_correct

    def broken(report, tiny):
        raise OSError("no such thing")

    monkeypatch.setattr(_device_correct, "twins", broken)
    result = device_check.run_task("twins", True)
    assert result["failed"] == ["the task"]
    assert result["errors"]["the task"][-1] == "OSError: no such thing"
    assert "OSError: no such thing" in capsys.readouterr().out


def test_a_task_in_a_process_of_its_own(device_check):
    ((said, (result,)),) = device_check.in_children(["primitives"], time.monotonic() + 300)
    assert (said, result["failed"], result["missing"]) == ("", [], [])
    assert len(result["passed"]) > 100


@pytest.mark.parametrize(("end", "reason"), [("fault", "status -11"), ("hang", "out of time")])
def test_after_a_task_that_ends_its_process(device_check, monkeypatch, end, reason):
    def run(command, **options):
        tasks = command[command.index("--tasks") + 1].split(",")
        done = tasks[: tasks.index("b")] if "b" in tasks else tasks
        file = pathlib.Path(command[command.index("--results") + 1])
        file.write_text("".join(json.dumps({"task": task, "failed": []}) + "\n" for task in done))
        if "b" in tasks and end == "hang":
            raise subprocess.TimeoutExpired(command, 1, output=b"so far")
        return SimpleNamespace(stdout=b"so far", returncode=-11 if "b" in tasks else 0)

    monkeypatch.setattr(subprocess, "run", run)
    found = [r for _, some in device_check.in_children("abcd", time.monotonic()) for r in some]
    assert [result["task"] for result in found] == list("abcd")
    (failed,) = [result for result in found if result["failed"]]
    assert failed["task"] == "b"
    assert failed["failed"][0].endswith(reason)


def test_what_times_nothing_runs_first(device_check, monkeypatch):
    begun = []

    def in_children(tasks, deadline):
        begun.append(list(tasks))
        yield from (("", [{"task": task}]) for task in tasks)

    monkeypatch.setattr(device_check, "in_children", in_children)
    tasks = [*device_check.TIMED, *device_check.CORRECT]
    found = [r["task"] for _, some in device_check.run_all(tasks, 1) for r in some]
    assert sorted(found) == sorted(tasks)
    assert begun[-1] == list(device_check.TIMED)
    assert all(len(one) == 1 for one in begun[:-1])


def test_recorded_launches_are_those_of_a_step(device_check):
    import _device_graph
    import _device_time

    decode = _device_time.Decode(_device_time.TINY, 2)
    decode.call(decode.on_device[0], "split")
    _arrays.overwrite(decode.out, np.zeros(decode.out.shape, np.uint16))
    launches = _device_graph.launches_of(decode.running("split"))
    assert len(launches) == 5 * len(decode.steps)
    assert not _arrays.to_host(decode.out).any(), "nothing has run"
    _device_graph.launching(launches, decode.stream)()
    expected = numba_attn.paged_attention(*decode.on_device[-1].arguments())
    assert_same_bits((_arrays.to_host(decode.out), _arrays.to_host(expected)))


def test_a_graph_is_made_in_the_first_way_that_works(device_check, monkeypatch):
    import _device_graph as graphs

    def fails(run, stream):
        raise RuntimeError("not captured\nat all")

    stream, made, replayed = _device.cuda().stream(), [], []
    monkeypatch.setattr(graphs, "_by_bindings", fails)
    monkeypatch.setattr(graphs, "_by_cupy", lambda run, stream: lambda: replayed.append(1))
    replay, how = graphs.captured(lambda: made.append(1), stream)
    replay()
    assert (how, made, replayed) == ("graph", [1], [1, 1])
    for way in ("_by_cupy", "_by_torch"):
        monkeypatch.setattr(graphs, way, fails)
    replay, how = graphs.captured(lambda: made.append(1), stream)
    replay()
    assert made == [1, 1, 1]
    assert how == "launches: " + "; ".join(["fails: RuntimeError not captured"] * 3)


def test_the_table_does_with_what_there_is(device_check):
    import _device_table

    assert _device_table.table([{"figures": {}}]) == "nothing was timed"
    figures = {"workload": "W1", "pools": 4, "kv_bytes": 10**8, "how": {"split": "graph"}}
    figures["seconds"] = {"split": 1e-4, "SDPA": 2e-4}
    text = _device_table.table([{"figures": figures}])
    assert text.splitlines()[1].split() == "W1 4 100.0 1000 - - 200.0 graph".split()
    figures |= {"copy_bytes_per_s": 2e12, "how": {"split": "launches: no graph"}}
    text = _device_table.table([{"figures": figures}])
    assert " 0.50 " in text
    assert "W1 split timed by launches: no graph" in text


def test_libraries_that_are_missing(device_check, monkeypatch):
    import _device_arrays

    with pytest.raises(_device_arrays.Missing, match="the simulator has Numba's arrays only"):
        _device_arrays.placer("cupy")
    monkeypatch.setattr(_device, "is_simulator", lambda: False)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(_device_arrays.Missing, match="cupy cannot be imported"):
        _device_arrays.placer("cupy")


def test_bits_are_named_anew(device_check):
    import _device_arrays

    interface = {"shape": (3,), "typestr": "<i2", "data": (64, False), "version": 3}
    bits = _device_arrays.Bits(
        SimpleNamespace(shape=(3,), __cuda_array_interface__=interface), "<u2"
    )
    assert (bits.shape, bits.dtype) == ((3,), np.dtype(np.uint16))
    assert bits.__cuda_array_interface__ == interface | {"typestr": "<u2"}


def test_unknown_tasks_are_refused(device_check, capsys):
    with pytest.raises(SystemExit):
        device_check.main(["--only", "nothing"])
    assert "expected beginnings of primitives, golden numba" in capsys.readouterr().err
