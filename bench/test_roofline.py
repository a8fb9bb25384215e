"""The arithmetic of the estimates, by launches of round numbers; then the table."""

import doctest
import json
from collections import Counter

import pytest
import roofline
from roofline import CLOCK, COPY, MULTIPROCESSORS

from numba_attn import _ptx
from numba_attn._workloads import Workload

KERNEL = _ptx.Compiled("", registers=128, stack=0, spilled=0, shared=1024)  # 4 blocks of 4 warps
LAUNCH = roofline.Launch(
    name="round",
    kernel=KERNEL,
    threads=128,
    tiles=(10,) * MULTIPROCESSORS,
    kv_bytes=int(COPY) // 1000,
    asked_bytes=int(COPY) // 500,
    other_bytes=int(COPY) // 1000,
    in_flight=4096,
    counts=Counter({"FMA": 100, "ALU": 60, "MUFU": 1, "BAR": 2, "LDS.128": 8, "SHFL": 5}),
    shuffles=5,
    waits=1,
)
MISSING = _ptx.missing(disassembler=True)
compiles = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")


def seconds(cycles):
    return pytest.approx(cycles / CLOCK)


def test_examples_run():
    assert doctest.testmod(roofline).failed == 0


def test_memory_reads_each_byte_once_and_the_cache_as_asked():
    assert roofline.memory_seconds(LAUNCH) == pytest.approx(2e-3)
    assert roofline.cache_seconds(LAUNCH) == pytest.approx(2e-3 * COPY / roofline.L2)


@pytest.mark.parametrize(
    ("blocks", "at_work"),
    [(1, 1), (MULTIPROCESSORS, MULTIPROCESSORS), (4 * MULTIPROCESSORS + 1, 2 * MULTIPROCESSORS)],
)
def test_bytes_in_flight(blocks, at_work):
    """A last block that begins when all others have ended halves how many are at work."""
    launch = LAUNCH._replace(tiles=(10,) * blocks)
    rate = at_work * 4096 / roofline.MEMORY_LATENCY
    assert roofline.in_flight_seconds(launch) == pytest.approx(launch.asked_bytes / rate, rel=2e-3)


def test_a_kernel_that_reads_no_keys_has_none_in_flight():
    assert roofline.in_flight_seconds(LAUNCH._replace(asked_bytes=0, in_flight=0)) == 0


def test_what_a_multiprocessor_does():
    assert roofline.issue_seconds(LAUNCH) == seconds(10 * 4 * 176 / 4)
    assert roofline.pipe_seconds(LAUNCH) == seconds(10 * 4 * 60 / 2)
    assert roofline.shared_seconds(LAUNCH) == seconds(10 * 4 * (8 * 4 + 5))


def test_one_block_too_many_doubles_the_work_of_a_multiprocessor():
    launch = LAUNCH._replace(tiles=(10,) * (MULTIPROCESSORS + 1))
    assert roofline.issue_seconds(launch) == 2 * roofline.issue_seconds(LAUNCH)
    assert roofline.latency_seconds(launch) == roofline.latency_seconds(LAUNCH)


def test_latency():
    chain = 2 * roofline.BARRIER + 5 * roofline.SHUFFLE + roofline.ALONE * 176
    tile = chain / CLOCK + roofline.MEMORY_LATENCY
    assert roofline.latency_seconds(LAUNCH) == pytest.approx(10 * tile)
    full = LAUNCH._replace(tiles=(10,) * (4 * MULTIPROCESSORS))
    assert roofline.latency_seconds(full) == pytest.approx(10 * tile)
    over = LAUNCH._replace(tiles=(10,) * (4 * MULTIPROCESSORS + 1))
    assert roofline.latency_seconds(over) == pytest.approx(20 * tile)


def test_the_longest_sequence_is_waited_for():
    ragged = LAUNCH._replace(tiles=(1,) * 400 + (50,))
    assert ragged.chain == 50


def test_the_largest_bound_binds_and_other_launches_follow():
    merge = LAUNCH._replace(kv_bytes=0, asked_bytes=0, other_bytes=int(COPY))
    step = roofline.estimate([LAUNCH, merge])
    assert step.binding == "in flight"
    assert step.others == pytest.approx(1)
    assert step.gaps == 2 * roofline.LAUNCH_GAP
    assert step.total == pytest.approx(step.bounds["in flight"] + step.others + step.gaps)


def test_a_row_has_a_cell_for_each_head():
    workload = Workload("round", (1000,), 8, 8, 128)
    for measured, cells in ((None, ["", ""]), (1e6, ["1000000.0", "0.000"])):
        row = roofline.row(workload, [LAUNCH], measured)
        assert len(row) == 1 + len(roofline.HEADS)
        assert row[:5] == ["round", "round", "128", "4", "176"]
        assert row[-2:] == cells


def test_unknown_names_are_an_error(capsys):
    with pytest.raises(SystemExit):
        roofline.main(["--workload", "W9"])
    assert "expected names of W0" in capsys.readouterr().err


@compiles
@pytest.mark.parametrize("workload", ["W1", "W2", "W3", "W4", "W6"])
def test_a_kernel_is_near_a_copy_on_paper(workload):
    given = roofline.WORKLOADS[workload]
    bounds = roofline.bounds_of(roofline.launches(given)[0])
    assert roofline.of_copy(given, max(bounds.values())) >= 0.6


@compiles
def test_the_table(capsys, tmp_path):
    figures = tmp_path / "figures.json"
    figures.write_text(json.dumps({"W5": 100.0}))
    assert roofline.main(["--workload", "W3,W5", "--measured", str(figures)]) == 0
    heads, _, *rows = capsys.readouterr().out.splitlines()
    assert [row.count("|") for row in rows] == [heads.count("|")] * 2
    assert rows[0].endswith("|  |  |")
    assert "| 100.0 | 0.039 |" in rows[1]
