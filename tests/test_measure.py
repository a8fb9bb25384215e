import io
import itertools

import numba
import numpy as np
import pytest

from numba_attn import _check, _machine, _measure, _probe
from numba_attn._progress import Progress
from numba_attn._workloads import Workload, make_steps

RAGGED = Workload("ragged", (0, 1, 40, 1100, 16), 4, 2, 8)


def expected_fold(step, pieces):
    """XOR of the words that a probe must read."""
    folded = np.uint64(0)
    for pool in (step.k_pool, step.v_pool):
        flat = _probe.words(pool)
        for begin, end in pieces:
            folded ^= np.bitwise_xor.reduce(flat[begin:end])
    return folded


@pytest.mark.parametrize("pieces_per_item", [1, 7, 10_000])
def test_a_probe_reads_every_word_of_its_pieces(pieces_per_item):
    (step,) = make_steps(RAGGED, 1)
    pieces = _probe.block_pieces(step)
    counter = np.zeros(1, np.int64)
    words = _probe.words(step.k_pool), _probe.words(step.v_pool)
    folded = _probe._read(counter, *words, pieces, pieces_per_item)
    assert np.uint64(folded) == expected_fold(step, pieces)


def test_the_read_loop_is_vectorised():
    jitted = numba.njit(_probe._fold.py_func)  # afresh: what is cached on disk has no listing
    jitted(np.zeros(64, np.uint64))
    (ir,) = jitted.inspect_llvm().values()
    assert any(f"load <{width} x i64>" in ir for width in (2, 4, 8))


def test_block_pieces_follow_the_table_up_to_each_length():
    (step,) = make_steps(RAGGED, 1)
    words = _probe.words(step.k_pool)
    read = np.concatenate([words[begin:end] for begin, end in _probe.block_pieces(step)])
    tokens = [
        step.k_pool[step.block_tables[s, t // 16], t % 16]
        for s, length in enumerate(step.seq_lens)
        for t in range(length)
    ]
    assert read.tobytes() == np.stack(tokens).tobytes()


def test_stream_pieces_are_as_many_words_end_to_end():
    (step,) = make_steps(RAGGED, 1)
    pieces = _probe.stream_pieces(step, 512)
    assert len(pieces) > 3
    assert (pieces[1:, 0] == pieces[:-1, 1]).all()
    assert pieces[0, 0] == 0
    assert pieces[-1, 1] * 8 == step.seq_lens.sum() * 2 * 8 * 2


def test_contenders_run_in_bursts_in_turn_over_all_pools():
    log = []
    contenders = {
        name: [lambda name=name, pool=pool: log.append((name, pool)) for pool in range(3)]
        for name in "ab"
    }
    times = _measure.in_turn(contenders, 1e-9, burst=2, uncounted=1)
    assert log[:6] == [(name, pool) for name in "ab" for pool in range(3)]
    names = ["".join(name for name, _ in log[6:])[i : i + 3] for i in range(0, 18, 3)]
    assert names == ["aaa", "bbb"] * 3
    assert [pool for name, pool in log[6:] if name == "a"] == [0, 1, 2] * 3
    assert [len(values) for values in times.values()] == [6, 6]
    assert all(value >= 0 for values in times.values() for value in values)


def test_a_burst_of_slow_calls_is_cut_short(monkeypatch):
    clock = itertools.count(step=0.2)
    monkeypatch.setattr(_measure.time, "perf_counter", lambda: next(clock))
    times = _measure.in_turn({"slow": [lambda: None]}, 1e-9, burst=50)
    assert times["slow"] == pytest.approx([0.2] * 6)


def test_progress_ends_complete():
    seen = []
    _measure.in_turn({"a": [lambda: None]}, 1e-9, on_progress=seen.append)
    assert seen == [1.0] * 3


def test_spread_is_relative():
    assert _measure.spread([2.0] * 8) == 0
    assert _measure.spread([10.0, 20.0, 30.0]) == pytest.approx(1.0)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_redraws_on_a_terminal():
    stream = Terminal()
    progress = Progress(stream)
    progress.say("reading", 0.5)
    progress.clear()
    assert stream.getvalue() == "\r\x1b[Kreading  50%\r\x1b[K"


def test_progress_elsewhere_is_a_line_a_stage():
    stream = io.StringIO()
    progress = Progress(stream)
    for fraction in (0.1, 0.9):
        progress.say("reading", fraction)
    progress.say("writing")
    progress.clear()
    assert stream.getvalue() == "reading\nwriting\n"


@pytest.fixture(scope="module")
def answered():
    """Give a step with the reference's own answer."""
    (step,) = make_steps(RAGGED, 1)
    exact = _check._reference(step)
    return step, exact.out.astype(step.q.dtype), exact.lse


def verdicts(step, out, lse):
    return [check.ok for check in _check.check_answer("cpu", "here", step, out, lse)]


def test_the_exact_answer_passes(answered):
    assert verdicts(*answered) == [True, True]


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.25])
def test_a_wrong_output_fails(answered, value):
    step, out, lse = answered
    out = out.copy()
    out[3, 1, 5] = value
    assert verdicts(step, out, lse) == [False, True]


def test_two_ulps_of_the_output_fail(answered):
    step, out, lse = answered
    out = out.copy()
    s, h, d = np.unravel_index(np.argmax(np.abs(out.astype(np.float32))), out.shape)
    out.view(np.uint16)[s, h, d] += 2
    assert verdicts(step, out, lse) == [False, True]


@pytest.mark.parametrize(
    ("row", "value"), [(3, np.nan), (3, -np.inf), (0, 0.0), (0, np.nan), (0, np.inf)]
)
def test_a_wrong_lse_fails(answered, row, value):
    step, out, lse = answered
    lse = lse.copy()
    lse[row, 2] = value
    assert verdicts(step, out, lse) == [True, False]


def test_the_mean_of_v_fails(answered):
    step, _, lse = answered
    zero_q = step.__class__(step.q * 0, *step.arguments()[1:])
    mean = _check._reference(zero_q).out.astype(step.q.dtype)
    assert verdicts(step, mean, lse)[0] is False


def test_a_part_of_a_step_is_that_part_of_the_answer(answered):
    step, out, lse = answered
    rolled = step.__class__(
        step.q[3:], step.k_pool, step.v_pool, step.block_tables[3:], step.seq_lens[3:]
    )
    subset, part_out, part_lse = _check.part(rolled, out[3:], lse[3:], tokens=2200)
    assert subset.k_pool.shape[2] == 1
    assert part_out.shape == (1, 2, 8)
    assert verdicts(subset, part_out, part_lse) == [True, True]
    wrong = part_out.copy()
    wrong[0, 0, 0] = 0.5
    assert verdicts(subset, wrong, part_lse) == [False, True]


def test_a_container_limit_counts_cached_files_as_room(tmp_path):
    for name, text in {
        "memory.max": "1000\n",
        "memory.current": "900\n",
        "memory.stat": "anon 200\ninactive_file 600\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert _machine._cgroup_room(tmp_path) == 700
    (tmp_path / "memory.max").write_text("max\n")
    assert _machine._cgroup_room(tmp_path) is None
    assert _machine._cgroup_room(tmp_path / "absent") is None


def test_available_memory_is_positive():
    assert 10**7 < _machine.available_memory() < 10**15
