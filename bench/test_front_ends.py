"""The rows of the bench of front ends, in a time that only shows that it works."""

import front_ends


def test_a_row_for_each_call(capsys):
    assert front_ends.main(["--seconds", "0.1"]) == 0
    first, *rows = capsys.readouterr().out.splitlines()[1:]
    assert first.startswith("paged_attention ")
    assert "(+0.0)" in first.replace(" ", "")
    assert len(rows) in (3, 8)  # without torch, and with it
    assert all("median" in row for row in rows)
