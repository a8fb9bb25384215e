"""Threads and processes: any number of them, from anywhere, the same bits."""

import concurrent.futures
import os
import threading

import numpy as np
import pytest
from _bound import assert_same_bits, check_answer
from _cases import attend, draw, place
from _process import needs_fork, run

import numba_attn
from numba_attn import _threads
from numba_attn.kernels import cpu as cpu_kernels

LENS = (1500, 0, 700, 1100, 3)


@pytest.fixture(scope="module")
def case():
    seqs = draw(LENS, num_kv_heads=2)
    return seqs, place(seqs, 16)


def test_250_repeats_with_2_threads(cpu, case, threads):
    threads(2)
    first = attend(cpu, *case)
    check_answer(case[0], first)
    for _ in range(250):
        assert_same_bits(*zip(first, attend(cpu, *case), strict=True))


def test_any_number_of_threads(cpu, case, threads):
    threads(1)
    first = attend(cpu, *case)
    for n in (2, 3, 16):
        threads(n)
        assert numba_attn.get_num_threads() == n
        assert_same_bits(*zip(first, attend(cpu, *case), strict=True))


def test_tiny_work_stays_on_the_calling_thread(cpu, monkeypatch):
    tiny, large = ((seqs, place(seqs, 16)) for seqs in (draw((16, 16)), draw((600, 5000))))
    used = []
    monkeypatch.setattr(_threads, "run", lambda task, args, n: used.append(n) or task(*args))
    monkeypatch.setattr(_threads, "_num_threads", 2)
    for case in (tiny, large):
        check_answer(case[0], attend(cpu, *case))
    assert used == [1, 2]


@pytest.mark.parametrize("n", [0, -1])
def test_the_number_of_threads_is_at_least_1(threads, n):
    before = numba_attn.get_num_threads()
    with pytest.raises(ValueError, match="num_threads"):
        threads(n)
    assert numba_attn.get_num_threads() == before


def test_eight_callers_at_once(cpu, threads):
    """Callers with inputs and sizes of their own, all starting together."""
    threads(2)
    cases = [draw((600 + 40 * i, 5 * i), num_kv_heads=1 + i % 3, seed=i) for i in range(8)]
    cases = [(seqs, place(seqs, 16)) for seqs in cases]
    expected = [attend(cpu, *case) for case in cases]
    gate = threading.Barrier(8)

    def work(i):
        gate.wait()
        for _ in range(20):
            answer = attend(cpu, *cases[i])
            assert_same_bits(*zip(expected[i], answer, strict=True))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    for (seqs, _), answer in zip(cases, expected, strict=True):
        check_answer(seqs, answer)


def test_states_of_several_threads_are_their_own(cpu, threads):
    """Callers step and merge states at once."""
    threads(2)
    seqs = draw((530,), num_kv_heads=1)
    paged = place(seqs, 16)

    def work(_):
        state = cpu.like(seqs.q, paged.v_pool)
        for first in range(0, 33, 11):
            part = cpu.like(seqs.q, paged.v_pool)
            blocks = paged.block_tables[:, first : first + 11]
            cpu.step_tile(part, seqs.q, paged.k_pool, paged.v_pool, blocks, np.array([11]))
            cpu.merge(state, part)
        return cpu.read(state)

    first = work(0)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for other in pool.map(work, range(64)):
            assert_same_bits(*zip(first, other, strict=True))


def test_the_number_of_threads_changes_during_calls(cpu, case, threads):
    expected = attend(cpu, *case)
    done = threading.Event()

    def change():
        n = 0
        while not done.is_set():
            threads(1 + n % 4)
            n += 1

    changer = threading.Thread(target=change)
    changer.start()
    try:
        for _ in range(60):
            assert_same_bits(*zip(expected, attend(cpu, *case), strict=True))
    finally:
        done.set()
        changer.join()


CALLS = """
import os, sys, threading, warnings
import numpy as np, numba_attn.kernels.cpu, _backends, _cases, _process
warnings.simplefilter("ignore")  # Python warns of a fork with threads: that is the point
numba_attn.set_num_threads(2)
numba_attn.kernels.cpu.SERIAL_BYTES = 1  # small work is threaded too
seqs = _cases.draw((1500, 700, 3))
paged = _cases.place(seqs, 16)

def bits():
    out, lse = _cases.attend(_backends.get("cpu"), seqs, paged)
    return out.tobytes() + lse.tobytes()

before = bits()
"""


@needs_fork
def test_calls_in_a_forked_child_and_its_child():
    run(CALLS + "_process.check_forks(bits)")


@needs_fork
def test_multiprocessing_by_fork():
    run(
        CALLS
        + "import multiprocessing\n"
        + "def same(_): return bits() == before\n"
        + "with multiprocessing.get_context('fork').Pool(3) as pool:\n"
        + "    assert all(pool.map(same, range(9)))\n"
    )


def test_calls_end_with_the_interpreter():
    """Workers do not keep a process alive, nor crash it on its way out."""
    run(
        "import numba_attn.kernels.cpu, _backends, _cases, threading\n"
        "numba_attn.set_num_threads(4); numba_attn.kernels.cpu.SERIAL_BYTES = 1\n"
        "seqs = _cases.draw((1500, 700)); paged = _cases.place(seqs, 16)\n"
        "_cases.attend(_backends.get('cpu'), seqs, paged)\n"
        "threading.Thread(target=_cases.attend, args=(_backends.get('cpu'), seqs, paged)).start()\n"
    )


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, float("inf")),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, float("inf")),
        ({}, float("inf")),
    ],
)
def test_the_quota_of_a_container_is_read(tmp_path, files, cores):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n")
    assert _threads._quota(str(tmp_path)) == cores


def test_the_quota_limits_the_default(monkeypatch):
    monkeypatch.setattr(_threads, "_quota", lambda: 0.5)
    assert _threads.usable_cores() == 1
    monkeypatch.setattr(_threads, "_quota", lambda: float("inf"))
    if hasattr(os, "sched_getaffinity"):
        assert _threads.usable_cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("number", ["1", "3"])
def test_the_environment_sets_the_number_of_threads(number):
    run(
        f"import numba_attn; assert numba_attn.get_num_threads() == {number}",
        NUMBA_ATTN_NUM_THREADS=number,
    )


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_a_wrong_number_of_threads_in_the_environment_is_an_error(monkeypatch, text):
    monkeypatch.setenv("NUMBA_ATTN_NUM_THREADS", text)
    with pytest.raises(ValueError, match=f"NUMBA_ATTN_NUM_THREADS: must be .*, got '{text}'"):
        _threads._default_num_threads()


@pytest.mark.parametrize("when", ["atexit.register(go)", "threading.Thread(target=late).start()"])
def test_calls_after_the_main_thread_has_ended(when):
    printed = run(
        "import atexit, threading, time\n"
        "import numba_attn, _backends, _cases, _bound\n"
        "numba_attn.set_num_threads(3)\n"
        "seqs = _cases.draw((3000, 3000)); paged = _cases.place(seqs, 16)\n"
        "before = _cases.attend(_backends.get('cpu'), seqs, paged)\n"
        "def go():\n"
        "    after = _cases.attend(_backends.get('cpu'), seqs, paged)\n"
        "    _bound.assert_same_bits(*zip(before, after, strict=True))\n"
        "    print('same', flush=True)\n"
        "def late():\n"
        "    threading.main_thread().join()\n"
        "    time.sleep(0.2)\n"
        "    go()\n" + when
    )
    assert printed == "same"


def test_a_call_from_within_a_call(cpu, monkeypatch):
    """As a signal handler makes it: between the kernels of the call that it interrupts."""
    inner, outer = ((s, place(s, 16)) for s in (draw((40, 600), seed=i) for i in (1, 2)))
    expected = [attend(cpu, *case) for case in (inner, outer)]
    merge_splits, answers = cpu_kernels.merge_splits, []

    def interrupted(*arguments):
        monkeypatch.setattr(cpu_kernels, "merge_splits", merge_splits)
        answers.append(attend(cpu, *inner))
        merge_splits(*arguments)

    monkeypatch.setattr(cpu_kernels, "merge_splits", interrupted)
    answers.append(attend(cpu, *outer))
    for before, after in zip(expected, answers, strict=True):
        assert_same_bits(*zip(before, after, strict=True))
