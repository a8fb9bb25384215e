"""The loop, at a size that outgrows its buffers."""

import re

import decode_loop
import pytest

SMALL = ["--steps", "150", "--layers", "2", "--every", "50", "--resident-blocks", "6"]
LINE = r"context (\d+): ([\d.]+) MB on disk, ([\d.]+) MB in memory, [\d.]+ ms a step"


@pytest.mark.parametrize("layers", ["1", "2", "3"])
def test_a_cache_outgrows_memory(capsys, layers):
    assert decode_loop.main([*SMALL, "--layers", layers]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    found = [re.fullmatch(LINE, line) for line in lines]
    assert [match[1] for match in found] == ["50", "100", "150"]
    assert float(found[-1][2]) > float(found[-1][3])
    assert len({match[3] for match in found}) == 1, "memory does not grow"
    assert re.fullmatch(r"last step, last layer: \S+e-0\d from the float64 reference", last)


@pytest.mark.parametrize("steps", ["16", "17", "15"])
def test_the_last_token_fills_begins_or_does_not_fill_a_block(capsys, steps):
    assert decode_loop.main([*SMALL, "--steps", steps]) == 0


def test_a_lost_block_is_status_1(monkeypatch, capsys):
    write = decode_loop.numba_attn.KVFile.write_blocks

    def lose(file, layer, ids, k, v):
        write(file, layer, ids[1:], k[1:], v[1:])

    monkeypatch.setattr(decode_loop.numba_attn.KVFile, "write_blocks", lose)
    assert decode_loop.main(SMALL) == 1
