"""The table of odd sizes, at a size that only shows that it works."""

import re

import shapes


def test_a_row_for_each_pair(capsys, monkeypatch):
    monkeypatch.setattr(shapes, "PAIRS", shapes.PAIRS[-4:-2])
    assert shapes.main(["--seconds", "0.01", "--tokens", "64", "--pools", "1"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert len(rows) == 2
    for row in rows:
        ratio = re.fullmatch(r".+ takes ([\d.]+) of the time per byte of .+", row)
        assert float(ratio[1]) > 0
