import functools

import _backends
import _process
import _streaming
import hypothesis
import pytest

import numba_attn
from numba_attn import _device

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
# What is small runs `simple`; these modules ask for `split` too, which has the same bits.
SPLIT = pytest.param("cuda split", marks=[pytest.mark.cuda, pytest.mark.split])
WITH_SPLIT = {"test_golden", "test_options", "test_properties", "test_queries", "test_starts"}
WITH_SPLIT |= {"test_window", "test_sinks", "test_nonfinite"}


def pytest_configure() -> None:
    tiny = _device.is_simulator()
    if tiny:
        _process.stay_on_one_core()
    hypothesis.settings.register_profile(
        "numba_attn",
        max_examples=3 if tiny else 20,
        deadline=None,  # the first example compiles
        derandomize=True,
        database=None,
    )
    hypothesis.settings.load_profile("numba_attn")


def pytest_collection_modifyitems(items) -> None:
    items[:] = [
        item
        for item in items
        if not item.get_closest_marker("split") or item.path.stem in WITH_SPLIT
    ]


@functools.cache
def has_device() -> bool:
    return not _device.is_simulator() and "cuda" in numba_attn.available_devices()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not has_device():
        pytest.skip("no CUDA device here")
    if item.get_closest_marker("cuda") and not (_device.is_simulator() or has_device()):
        pytest.skip("no CUDA device here; test_simulator.py runs these in their own process")


@pytest.fixture(scope="session", params=["reference", "cpu", CUDA, SPLIT])
def backend(request: pytest.FixtureRequest) -> _backends.Backend:
    """Each implementation, the reference included: what holds within the bound."""
    return _backends.get(request.param)


@pytest.fixture(scope="session", params=["cpu", CUDA, SPLIT])
def twin(request: pytest.FixtureRequest) -> _backends.Backend:
    """Each twin: what holds bit for bit."""
    return _backends.get(request.param)


@pytest.fixture(scope="session")
def cpu() -> _backends.Backend:
    return _backends.get("cpu")


@pytest.fixture
def threads(monkeypatch):
    """Give `set_num_threads`; what it set is undone after the test. Small work is threaded too."""
    monkeypatch.setattr("numba_attn.kernels.cpu.SERIAL_BYTES", 1)
    before = numba_attn.get_num_threads()
    yield numba_attn.set_num_threads
    numba_attn.set_num_threads(before)


@pytest.fixture
def no_reader_is_left():
    before = _streaming.readers()
    yield
    assert _streaming.readers() <= before
