"""The rows of the streaming bench, at a size that only shows that it works."""

import re

import pytest
import stream


@pytest.mark.slow
def test_a_row_for_each_comparison(capsys, tmp_path):
    sizes = ["--mib", "8", "--tile-mib", "0.25", "--seconds", "0.1"]
    assert stream.main(["--dir", str(tmp_path), *sizes]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert len(rows) == 12
    for row in rows:
        ratios = re.search(
            r"streamed +[\d.]+ ms: ([\d.]+) of the read, ([\d.]+) of memory, ([\d.]+) x the longer",
            row,
        )
        assert all(float(ratio) > 0 for ratio in ratios.groups())
    assert not list(tmp_path.iterdir())
