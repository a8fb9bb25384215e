"""The table of options, at a size that only shows that it works."""

import re

import options
import pytest


@pytest.mark.slow  # a kernel is compiled for each row
def test_a_row_for_each_option(capsys):
    assert options.main(["--seconds", "0.02", "--tokens", "64", "--pools", "1"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert len(rows) == 15
    for row in rows[:-1]:
        ratio = re.fullmatch(r".+ ms +([\d.]+) x plain", row)
        assert float(ratio[1]) > 0
    assert re.search(r"MLA, .+ x a read of its keys alone", rows[-1])
