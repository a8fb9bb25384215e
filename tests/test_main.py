import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import numba_attn
from numba_attn import __main__ as main_job
from numba_attn import _check, _decode, _device, _threads

QUICK = ["--quick", "--device", "cpu", "--shape", "2,256,4/2,16"]
LAST_LINE = re.compile(
    r"own on cpu (takes \d+ us a call|reads K/V at [\d.]+ GB/s, \d+% of this machine's read "
    r"bandwidth in block order \(\d+% of sequential\)); a 32-layer model of that shape "
    r"\(\d+ x context \d+, 4/2 heads, head_dim 16\) spends [\d.]+ ms in attention per "
    r"(token|step of \d+ tokens)\."
)


@pytest.fixture
def brief(monkeypatch):
    """Measure for a moment only, in pools of a few MB."""
    monkeypatch.setattr(_decode, "QUICK", _decode.Effort(4_000_000, 16_000_000, 0.01))


@pytest.mark.parametrize("shape", ["2,256,4/2,16", "1,9000,4/2,16"], ids=["overhead", "memory"])
def test_it_checks_then_measures(brief, capsys, shape):
    assert main_job.main(["--quick", "--device", "cpu", "--shape", shape]) == 0
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert f"numba_attn {numba_attn.__version__}" in lines[0]
    assert f"numpy {np.__version__}" in lines[0]
    for way in ("one call", "tile by tile"):
        for quantity in ("out", "lse"):
            assert re.search(rf"cpu +{way} +{quantity} +ok +error \S+, bound \S+", output.out)
    assert LAST_LINE.fullmatch(lines[-1])
    assert "checking cpu\n" in output.err
    assert "own on cpu: measuring\n" in output.err
    assert output.out.count("own ") == 2


def test_the_json_file_holds_consistent_figures(brief, capsys, tmp_path):
    path = tmp_path / "figures.json"
    arguments = ["--quick", "--device", "cpu", "--workload", "W0,W5", "--json", str(path)]
    assert main_job.main(arguments) == 0
    report = json.loads(path.read_text())
    assert report["machine"]["versions"]["numba_attn"] == numba_attn.__version__
    assert "cpu" in report["machine"]["devices"]
    assert len(report["checks"]) == 4
    assert all(check["ok"] and check["error"] <= check["bound"] for check in report["checks"])
    assert [result["name"] for result in report["results"]] == ["W0", "W5"]
    for result in report["results"]:
        ratio = result["block_order_probe_ms"] / result["ms"]
        assert result["of_block_order_probe"] == pytest.approx(ratio)
        rate = result["kv_bytes"] / result["ms"] / 1e6
        assert result["gb_per_s"] == pytest.approx(rate)
    assert "W5 on cpu reads" in capsys.readouterr().out.splitlines()[-1]


def test_a_failed_check_ends_it_with_status_1(monkeypatch, capsys, tmp_path):
    correct = _check.api.paged_attention

    def off_by_a_little(*args, **options):
        out, lse = correct(*args, **options)
        return out * out.dtype.type(1.02), lse

    monkeypatch.setattr(_check.api, "paged_attention", off_by_a_little)
    path = tmp_path / "figures.json"
    assert main_job.main([*QUICK, "--json", str(path)]) == 1
    output = capsys.readouterr().out
    assert re.search(r"cpu +one call +out +FAIL", output)
    assert output.splitlines()[-1].startswith("1 checks failed on cpu")
    assert json.loads(path.read_text())["results"] == []


def test_threads_are_set_for_the_run_only(brief, monkeypatch, threads, capsys):
    threads(2)
    monkeypatch.setattr(_threads, "usable_cores", lambda: 2)
    assert main_job.main([*QUICK, "--threads", "1"]) == 0
    assert "1 of 2 cores used" in capsys.readouterr().out
    assert numba_attn.get_num_threads() == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "W9"], "argument --workload: unknown workload 'W9'; choose from W0, W1"),
        (["--workload", "W1,"], "argument --workload: unknown workload ''"),
        (["--shape", "1,2,3"], "argument --shape: expected S,context,Hq/Hkv,D, such as"),
        (["--shape", "1,9,3/2,8"], "argument --shape: Hkv must divide Hq, got Hq=3, Hkv=2"),
        (["--threads", "0"], "argument --threads: expected 1 to "),
        (["--threads", "-1"], "argument --threads: expected 1 to "),
        (["--threads", "two"], "the cores this process may use, got 'two'"),
        (["--threads", "100000"], "the cores this process may use, got '100000'"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--json", "no/such/folder/x.json"], "argument --json: no folder 'no/such/folder'"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_bad_arguments_end_it_with_status_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as error:
        main_job.main(arguments)
    assert error.value.code == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.out == ""


def test_a_device_that_is_not_there_is_a_bad_argument(monkeypatch, capsys):
    monkeypatch.setattr(_device, "cuda_problem", lambda: "no driver today")
    with pytest.raises(SystemExit) as error:
        main_job.main(["--device", "cuda"])
    assert error.value.code == 2
    assert "argument --device: device='cuda' is not available: no driver today" in (
        capsys.readouterr().err
    )


def test_it_says_why_cuda_is_not_available(brief, monkeypatch, capsys):
    monkeypatch.setattr(_device, "cuda_problem", lambda: "no driver today")
    assert main_job.main(QUICK) == 0
    assert "device 'cuda' is not available: no driver today" in capsys.readouterr().out


def test_the_simulator_is_checked_and_not_timed():
    done = subprocess.run(
        [sys.executable, "-m", "numba_attn", "--device", "cuda"],
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"cuda +tile by tile +lse +ok", done.stdout)
    last = done.stdout.splitlines()[-1]
    assert last == "The CUDA simulator passed its checks; it has no speed to measure."
    assert "GB/s" not in done.stdout


def test_the_module_runs_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "numba_attn", "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0
    for option in (
        "--workload",
        "--shape",
        "--device",
        "--threads",
        "--json",
        "--quick",
        "python -m numba_attn stream --help",
    ):
        assert option in done.stdout
