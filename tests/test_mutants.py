"""The suite has teeth: each planted fault fails the checks that every implementation passes."""

import _numpy_twin
import pytest
from _backends import Backend
from _checks import CHECKS


def failures(subject):
    """Name the checks that a backend fails."""
    failed = []
    for check in CHECKS:
        try:
            check(subject)
        except AssertionError:
            failed.append(check.__name__)
    return failed


def test_the_unharmed_recurrence_passes():
    assert failures(Backend("numpy", _numpy_twin.NumpyTwin())) == []


@pytest.mark.parametrize("fault", _numpy_twin.FAULTS)
def test_a_planted_fault_fails(fault):
    assert failures(Backend("numpy", _numpy_twin.NumpyTwin(fault)))
