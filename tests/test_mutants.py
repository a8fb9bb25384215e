"""The suite has teeth: each planted fault fails the checks that every implementation passes."""

import _numpy_twin
import pytest
from _backends import Backend
from _checks import failures
from _process import copy_of_package, run


def test_the_unharmed_recurrence_passes():
    assert failures(Backend("numpy", _numpy_twin.NumpyTwin())) == []


@pytest.mark.parametrize("fault", _numpy_twin.FAULTS)
def test_a_planted_fault_fails(fault):
    assert failures(Backend("numpy", _numpy_twin.NumpyTwin(fault)))


RECURRENCE, PLAN = "kernels/recurrence.py", "_plan.py"
SOURCE = {
    "smaller instead of larger": (RECURRENCE, "b if b > a else a", "b if b < a else a"),
    "no state is empty": (RECURRENCE, "return (m == NEG_INF) and (l == ZERO)", "return False"),
    "weights of 1": (RECURRENCE, "return math.exp(m - offset(m_new))", "return ONE"),
    "0 / 0 in an empty row": (RECURRENCE, "return ZERO if l == ZERO else o / l", "return o / l"),
    "lse without l": (RECURRENCE, "else m + math.log(l)", "else m"),
    "truncated, not rounded": (RECURRENCE, "bits + np.uint32(0x7FFF) +", "bits +"),
    "a sink without weight": (RECURRENCE, "l * factor + weight(sink, m_new)", "l * factor"),
    "a window one key short": (PLAN, "sliding_window + 1)", "sliding_window + 2)"),
    "a query that misses itself": (PLAN, "(lens[seq], position + 1)", "(lens[seq], position)"),
}
FAILURES = "import _backends, _checks; print(_checks.failures(_backends.get('cpu')))"


@pytest.mark.slow
@pytest.mark.parametrize("fault", SOURCE)
def test_a_fault_planted_in_the_source_fails(tmp_path, fault):
    package = copy_of_package(tmp_path, SOURCE[fault])
    assert run(FAILURES, package, NUMBA_CACHE_DIR=tmp_path / "cache") != "[]"


@pytest.mark.slow
def test_an_unharmed_copy_of_the_source_passes(tmp_path):
    package = copy_of_package(tmp_path)
    assert run(FAILURES, package, NUMBA_CACHE_DIR=tmp_path / "cache") == "[]"
