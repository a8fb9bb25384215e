"""The transformers benchmark, at a size that only shows that it works."""

import re

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import transformers_decode


def test_a_row_for_each_figure(capsys):
    transformers_decode.main(["--small", "--context", "40", "--layers", "1", "--seconds", "0.02"])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == 4
    for row in rows:
        ratio = re.fullmatch(r".+: numba_attn [\d.]+ ms, sdpa [\d.]+ ms, ([\d.]+) x", row)
        assert float(ratio[1]) > 0
