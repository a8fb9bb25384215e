import contenders
import numpy as np
import pytest

from numba_attn import reference
from numba_attn._workloads import Workload, make_steps

CASES = {
    "uniform": Workload("uniform", (300, 300), 8, 2, 64),
    "ragged": Workload("ragged", (1, 130, 257), 8, 2, 64),
    "one head": Workload("one head", (40,), 3, 3, 32),
}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("name", list(contenders.CONTENDERS))
def test_a_contender_answers_the_same_question(name, case):
    present, missing = contenders.available()
    if name in missing:
        pytest.skip(missing[name])
    (step,) = make_steps(CASES[case], 1)
    exact = reference.paged_attention(*step.arguments()).astype(np.float64)
    assert contenders.worst_error(present[name](step)(), exact) < 0.02


def test_the_error_measure_sees_a_wrong_answer():
    (step,) = make_steps(CASES["ragged"], 1)
    exact = reference.paged_attention(*step.arguments()).astype(np.float64)
    wrong = exact.copy()
    wrong[1, 2, 3] = -exact[1, 2].max()
    assert contenders.worst_error(wrong, exact) > 0.1


def test_contenders_that_are_missing_say_why(monkeypatch):
    monkeypatch.delenv("VLLM_SO", raising=False)
    present, missing = contenders.available()
    assert "NumPy gather + einsum" in present
    assert set(present) | set(missing) == set(contenders.CONTENDERS)
    assert all("torch" in reason or "VLLM_SO" in reason for reason in missing.values())
