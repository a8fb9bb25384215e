import numpy as np
import pytest

from numba_attn import _device, _probe
from numba_attn._workloads import Workload, make_steps

pytestmark = pytest.mark.cuda

SMALL = Workload("small", (9, 0, 3), 4, 2, 4, block_size=4)


@pytest.fixture
def probe(monkeypatch):
    """Give the module, with as few threads a block as a simulator likes."""
    from numba_attn import _probe_cuda

    if _device.is_simulator():
        monkeypatch.setattr(_probe_cuda, "_THREADS", 4)
    return _probe_cuda


def test_the_kernel_reads_every_word_of_its_pieces_and_no_other(probe):
    (step,) = make_steps(SMALL, 1)
    pieces = _probe.block_pieces(step)
    inside = np.concatenate([np.arange(begin, end) for begin, end in pieces])
    cuda = _device.cuda()
    for pool in range(2):
        for word in range(_probe.words(step.k_pool).size):
            words = np.zeros((2, _probe.words(step.k_pool).size), np.uint64)
            words[pool, word] = 1  # the one value that the kernel reports
            folded = cuda.to_device(np.zeros(1, np.uint64))
            arrays = (*map(cuda.to_device, words), cuda.to_device(pieces), folded)
            probe._read[len(pieces), probe._THREADS](*arrays)
            assert folded.copy_to_host()[0] == (word in inside)


@pytest.mark.parametrize("order", ["block_order", "sequential"])
def test_the_probes_run_on_the_device(probe, order):
    (step,) = make_steps(SMALL, 1)
    on_device = probe.to_device(step)
    before = on_device.k_pool.copy_to_host()
    getattr(probe, order)(step, on_device)()
    assert np.array_equal(on_device.k_pool.copy_to_host(), before)
