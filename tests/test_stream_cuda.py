"""Streaming on CUDA: the order of reads, copies and kernels, as a device would be given them."""

import itertools
import threading

import numpy as np
import pytest

import numba_attn
from numba_attn import _device

pytestmark = pytest.mark.cuda

B, HKV, D = 16, 1, 32
TILES, TILE_BLOCKS = 4, 16  # of a split each
WAIT = 20.0  # seconds, after which it is not to be expected any more


class Log:
    """Records operations, in the order in which they are issued."""

    def __init__(self):
        self.entries = []
        self._lock = threading.Lock()

    def add(self, *entry):
        with self._lock:
            self.entries.append(entry)

    def where(self, *start):
        return [i for i, entry in enumerate(self.entries) if entry[: len(start)] == start]


@pytest.fixture
def log(monkeypatch):
    """Record what is done with streams and events, and the steps."""
    if not _device.is_simulator():
        pytest.skip("records the simulator's objects, not a driver's")
    cuda, backend, log = _device.cuda(), _device.backend("cuda"), Log()
    numbers = itertools.count()

    class Stream:
        def __init__(self):
            self.number = next(numbers)

        def synchronize(self):
            log.add("stream.synchronize", self.number)

    class Event:
        def __init__(self):
            self.number = next(numbers)

        def record(self, stream):
            log.add("record", self.number, stream.number)

        def wait(self, stream):
            log.add("wait", self.number, stream.number)

        def synchronize(self):
            log.add("synchronize", self.number)

    array_type = type(cuda.device_array(1, np.uint8))
    copy, step = array_type.copy_to_device, backend.step_tile

    def copy_to_device(self, array, stream=0):
        if isinstance(stream, Stream):
            log.add("copy", stream.number, np.asarray(array).__array_interface__["data"][0])
        return copy(self, array)

    def step_tile(state, q, k_pool, v_pool, formats, tile, options):
        # The first key of a tile is the number of its first block.
        first = int(k_pool.copy_to_host()[0, 0, 0, 0])
        log.add("step", first // TILE_BLOCKS, _device.stream_in_use().number)
        return step(state, q, k_pool, v_pool, formats, tile, options)

    monkeypatch.setattr(cuda, "stream", Stream)
    monkeypatch.setattr(cuda, "event", Event)
    monkeypatch.setattr(array_type, "copy_to_device", copy_to_device)
    monkeypatch.setattr(backend, "step_tile", step_tile)
    monkeypatch.setattr(_device, "as_stream", lambda stream: stream)
    return log


class Numbered:
    """Keys are the number of their block; values, too."""

    block_size, num_kv_heads, head_dim, dtype = B, HKV, D, np.dtype(np.int8)

    def __init__(self, log):
        self._log = log

    def read(self, block_ids, k_out, v_out):
        self._log.add("read", int(block_ids[0]) // TILE_BLOCKS, k_out.ctypes.data)
        k_out[:] = v_out[:] = block_ids[:, None, None, None]


def attend(source, prefetch):
    q = np.zeros((1, 2, D), np.float32)
    tables = np.arange(TILES * TILE_BLOCKS)[None]
    resident = TILE_BLOCKS * (prefetch + 1)
    lens = [TILES * TILE_BLOCKS * B]
    with numba_attn.Streamer(resident, prefetch) as streamer:
        out = streamer.attend(q, source, tables, lens, device="cuda")
    assert out == pytest.approx(tables.mean(), rel=1e-6)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_reads_copies_and_kernels_of_a_tile_are_in_order(log, prefetch):
    attend(Numbered(log), prefetch)
    steps = log.where("step")
    assert [log.entries[i][1] for i in steps] == list(range(TILES))
    assert len({log.entries[i][2] for i in steps}) == 1
    kernels = log.entries[steps[0]][2]
    on_kernels = [i for i, entry in enumerate(log.entries) if entry[2:] == (kernels,)]
    assert [log.entries[i][0] for i in on_kernels] == ["wait", "step", "record"] * TILES
    last_use = {}  # of a buffer: the event after its kernel
    for tile in range(TILES):
        wait, _, record = on_kernels[3 * tile : 3 * tile + 3]
        (read,) = log.where("read", tile)
        address = log.entries[read][2]
        if address in last_use:
            (free,) = log.where("synchronize", last_use[address])
            assert free < read
        (copied,) = log.where("record", log.entries[wait][1])
        copies = log.entries[copied][2]
        assert copies != kernels
        assert len([i for i in log.where("copy", copies, address) if read < i < copied]) == 1
        assert copied < wait
        last_use[address] = log.entries[record][1]


def test_a_tile_is_read_copied_and_launched_while_the_kernel_of_another_runs(log, monkeypatch):
    """Whoever waits for the first kernel does so until the second one has been launched."""
    launched = threading.Event()
    event = _device.cuda().event
    record, synchronize = event.record, event.synchronize

    def record_and_tell(self, stream):
        record(self, stream)
        if log.where("step", 1):
            launched.set()

    def slow(self):
        assert launched.wait(WAIT)
        synchronize(self)

    monkeypatch.setattr(event, "record", record_and_tell)
    monkeypatch.setattr(event, "synchronize", slow)
    attend(Numbered(log), prefetch=1)


def test_a_callers_stream_is_that_of_the_kernels(log):
    stream = _device.cuda().stream()
    q = np.zeros((1, 2, D), np.float32)
    on_device = _device.cuda().to_device(q)
    tables = np.arange(TILE_BLOCKS)[None]
    out = numba_attn.stream_attention(
        on_device, Numbered(log), tables, [TILE_BLOCKS * B], resident_blocks=64, stream=stream
    )
    assert out.copy_to_host() == pytest.approx(tables.mean(), rel=1e-6)
    (step,) = log.where("step")
    assert log.entries[step][2] == stream.number


@pytest.mark.parametrize("resident_blocks", [1, 7, 40, 200])
def test_the_answer_is_that_of_one_call(resident_blocks):
    rng = np.random.default_rng(0)
    pools = rng.integers(-100, 100, (2, 40, B, HKV, D), np.int8)
    scales = {
        "k_scale": rng.uniform(0.01, 0.02, (40, B, HKV)).astype(np.float32),
        "v_scale": np.array([0.02]),
    }
    q = rng.standard_normal((3, 2, D)).astype(np.float16)
    tables = rng.permutation(40)[:36].reshape(3, 12)
    tables[2, :6] = tables[0, :6]
    lens = [190, 0, 100]
    options = {"sliding_window": 90, "softcap": 3.0, "sinks": [0.5, 1.0], **scales}
    expected = numba_attn.paged_attention(
        q, *pools, tables, lens, device="cuda", return_lse=True, **options
    )
    source = numba_attn.ArraySource(*pools)
    found = numba_attn.stream_attention(
        *(q, source, tables, lens),
        resident_blocks=resident_blocks,
        device="cuda",
        return_lse=True,
        **options,
    )
    for one, other in zip(found, expected, strict=True):
        if resident_blocks > 16 * 3:  # room for a split of 256 tokens in each of three buffers
            np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=1e-4)
