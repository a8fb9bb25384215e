import json
import re

import compare
import pytest

from numba_attn import _decode
from numba_attn._workloads import Workload

SMOKE = _decode.Effort(rotation_bytes=400_000, step_bytes=200_000, seconds=0.01)
QUICK = ["--quick", "--seconds", "0.01"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(_decode, "QUICK", SMOKE)
    monkeypatch.setitem(compare.BURSTS, "rest", 0)
    monkeypatch.setattr(compare, "ATTEMPTS", 1)


def test_the_table_has_every_contender_and_consistent_ratios(capsys, tmp_path):
    path = tmp_path / "figures.json"
    assert compare.main([*QUICK, "--workload", "W1,W5", "--json", str(path)]) == 0
    output = capsys.readouterr().out
    assert "CPU: " in output
    assert "NumPy gather + einsum: OpenBLAS" in output
    assert re.search(r"^\| numba_attn \| [\d.]+ \| [\d.]+ \|$", output, re.MULTILINE)
    for result in json.loads(path.read_text()):
        ms = result["ms"]
        assert {compare.OURS, compare.BLOCK_ORDER, compare.SEQUENTIAL} < set(ms)
        ratio = f"{ms['NumPy gather + einsum'] / ms[compare.OURS]:.2f} x NumPy"
        assert ratio in output


def test_scaling_tables_time_per_byte(monkeypatch, capsys):
    sizes = [Workload(f"context {n}", (n,), 4, 2, 16) for n in (32, 64)]
    monkeypatch.setattr(compare, "SCALING", sizes)
    assert compare.main([*QUICK, "--scaling"]) == 0
    rows = re.findall(r"^\| context \d+ \| .*$", capsys.readouterr().out, re.MULTILINE)
    assert len(rows) == 2


def test_scaling_covers_its_range():
    lens = [workload.seq_lens for workload in compare.SCALING]
    assert {(256,), (131072,)} < set(lens)
    assert {len(x) for x in lens if len(set(x)) == 1 and x[0] == 1024} >= {1, 2, 4, 8, 16, 32, 64}


@pytest.mark.parametrize("who", ["ours", "a peer"])
def test_a_wrong_answer_is_status_1(monkeypatch, capsys, who):
    if who == "ours":
        monkeypatch.setattr(compare._check, "part", wrong_part)
    else:
        peer = compare.contenders.numpy_gather
        wrong = {"NumPy gather + einsum": lambda step: lambda: peer(step)() * 1.1}
        monkeypatch.setattr(compare.contenders, "available", lambda: (wrong, {}))
    assert compare.main([*QUICK, "--workload", "W5"]) == 1
    assert "wrong answers: W5" in capsys.readouterr().err


def wrong_part(step, out, lse, tokens):
    return step, out * out.dtype.type(1.1), lse
