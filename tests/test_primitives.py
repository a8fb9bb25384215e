"""The CUDA twin's building blocks, one by one."""

import pytest

from numba_attn import _device

pytestmark = pytest.mark.cuda


def names():
    """Name the checks; without a device or the simulator their kernels cannot be imported."""
    if not _device.is_simulator() and _device.cuda_problem():
        return ["none here"]
    import _primitives

    return list(_primitives.CHECKS)


@pytest.mark.parametrize("name", names())
def test_a_building_block(name):
    import _primitives

    _primitives.CHECKS[name]()
