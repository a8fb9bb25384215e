"""How a KV cache on disk asks the system: in few buffers, safe from being closed, direct."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from numba_attn import KVFile, _buffers
from numba_attn.kernels import file_reads

N, B, HKV, D = 16, 4, 2, 256  # a block's k are a page, as are its v
SIZES = {"num_blocks": N, "block_size": B, "num_kv_heads": HKV, "head_dim": D}


@pytest.fixture
def folder(tmp_path):
    """Make a cache of one layer, of other numbers in each block; return where it is."""
    with KVFile.create(tmp_path / "kv", num_layers=1, **SIZES, dtype="float16") as file:
        file.write_blocks(0, range(N), *numbers(range(N)))
    return tmp_path / "kv"


def numbers(ids):
    k = np.array(ids, np.float16)[:, None, None, None] + np.zeros((B, HKV, D), np.float16)
    return k, k + np.float16(0.5)


def check(ids, k, v):
    for found, expected in zip((k, v), numbers(ids), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.fixture
def calls(monkeypatch):
    """List the system calls that transfer: each the lengths of its buffers, in pages."""
    made = []
    for name in ("preadv", "pwritev"):
        transfer = getattr(os, name)

        def listed(fd, buffers, at, transfer=transfer):
            made.append([len(buffer) / 4096 for buffer in buffers])
            return transfer(fd, buffers, at)

        monkeypatch.setattr(os, name, listed)
    return made


IN_FEW_BUFFERS = {
    "in order": ([3, 4, 5, 6], [[8]]),
    "one": ([3], [[2]]),
    "a gap": ([3, 4, 6], [[4], [2]]),
    "twice": ([3, 4, 4], [[4], [2]]),
    "backwards": ([6, 5, 4], [[2, 2, 2]]),
    "two runs, the later first": ([8, 9, 3, 4], [[4], [4]]),
    "two runs that adjoin": ([5, 6, 3, 4], [[4, 4]]),
    "none": ([], []),
}


@pytest.mark.parametrize("case", IN_FEW_BUFFERS)
def test_neighbours_in_file_and_memory_are_one_buffer(folder, calls, case):
    ids, expected = IN_FEW_BUFFERS[case]
    with KVFile(folder, "r+") as file:
        pair = file.layer(0).pair(len(ids))
        file.layer(0).read(np.array(ids, np.int32), *pair)
        assert calls == expected
        check(ids, *pair)
        if case != "twice":
            pair += np.float16(0.25)
            calls.clear()
            file.layer(0).write(ids, *pair)
            assert calls == expected
            again = file.layer(0).pair(len(ids))
            file.layer(0).read(ids, *again)
            np.testing.assert_array_equal(again, pair)


APART = [9, 2, 14, 0, 6, 4, 12, 11]


@pytest.fixture
def pieces(monkeypatch):
    """List the calls that read many pieces: the number of each."""
    made, read_pieces = [], file_reads.read_pieces

    def listed(fd, places, addresses, sizes):
        made.append(len(sizes))
        return read_pieces(fd, places, addresses, sizes)

    monkeypatch.setattr(file_reads, "read_pieces", listed)
    return made


def test_blocks_that_are_apart_are_read_in_one_call(folder, calls, pieces):
    with KVFile(folder) as file:
        pair = file.layer(0).pair(len(APART))
        file.layer(0).read(APART, *pair)
        check(APART, *pair)
        assert pieces == [len(APART)]
        assert not calls
        apart = np.zeros(pair.shape, np.float16)  # K and V are not one piece of memory
        file.layer(0).read(APART, *apart)
        check(APART, *apart)
        assert pieces == [len(APART)]


def test_a_read_of_many_pieces_that_fails_says_why(folder, pieces):
    with KVFile(folder) as file:
        os.truncate(file.layer(0).path, file.layer(0).path.stat().st_size - 4096 * 4)
        with pytest.raises(OSError, match="layer_0000.npy: ended at byte"):
            file.layer(0).read(APART, *file.layer(0).pair(len(APART)))
        assert pieces == [len(APART)]
    with pytest.raises(ValueError, match="is closed"):
        file.layer(0).read(APART, *file.layer(0).pair(len(APART)))


def strange(kind, n):
    """Make k and v [n, ...] that only look as if their rows adjoined."""
    memory = np.zeros((2 * n + 2, 2, B, HKV, D), np.float16)
    return {
        "apart": (memory[:n, 0].copy(), memory[:n, 0].copy()),
        "one after the other": tuple(
            memory.reshape(-1, B, HKV, D)[: 2 * n].reshape(2, n, B, HKV, D)
        ),
        "v first": (memory[:n, 1], memory[:n, 0]),
        "with gaps": (memory[: 2 * n : 2, 0], memory[: 2 * n : 2, 1]),
        "backwards": (memory[n:0:-1, 0], memory[n:0:-1, 1]),
        "v of the next": (memory[:n, 0], memory[1 : n + 1, 1]),
        "other steps": (memory[:n, 0], memory[: 2 * n : 2, 1]),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "apart",
        "one after the other",
        "v first",
        "with gaps",
        "backwards",
        "v of the next",
        "other steps",
    ],
)
@pytest.mark.parametrize("ids", [[2, 3, 4, 5], [5, 4, 2, 9], [7]])
def test_other_memory_is_read_and_written_row_by_row(folder, calls, kind, ids):
    k, v = strange(kind, len(ids))
    with KVFile(folder, "r+") as file:
        file.layer(0).read(ids, k, v)
        check(ids, k, v)
        if len(ids) > 1:
            assert {size for call in calls for size in call} == {1}
        others = [11, 10, 12, 0][: len(ids)]
        file.layer(0).write(others, k, v)
        back = file.layer(0).pair(len(ids))
        file.layer(0).read(others, *back)
        check(ids, *back)


@pytest.mark.parametrize(("limit", "value"), [("MOST_BUFFERS", 3), ("MOST_BYTES", 5 * 4096)])
def test_a_call_has_a_limit(folder, calls, monkeypatch, limit, value):
    monkeypatch.setattr(_buffers, limit, value)
    with KVFile(folder) as file:
        for ids in (range(N), range(N)[::-1]):
            pair = file.layer(0).pair(N)
            file.layer(0).read(ids, *pair)
            check(ids, *pair)
        apart = np.zeros((2, N, B, HKV, D), np.float16)
        file.layer(0).read(range(N), *apart)
        check(range(N), *apart)
    most = max(map(len if limit == "MOST_BUFFERS" else sum, calls))
    assert most == (3 if limit == "MOST_BUFFERS" else 4)


def test_a_pair_begins_at_a_page(folder):
    with KVFile(folder) as file:
        for blocks in (1, 3, 100):
            pair = file.layer(0).pair(blocks)
            assert pair.shape == (2, blocks, B, HKV, D)
            assert pair.dtype == np.float16
            assert pair.ctypes.data % 4096 == 0


@pytest.mark.parametrize("which", [0, 1])
def test_memory_that_is_not_to_be_written_is_refused(folder, which):
    with KVFile(folder, "r+") as file:
        parts = list(file.layer(0).pair(2))
        parts[which].flags.writeable = False
        with pytest.raises(ValueError, match=f"{'kv'[which]}_out: must be writable"):
            file.layer(0).read([0, 1], *parts)
        parts = numbers([0, 1])
        parts[which].flags.writeable = False
        file.layer(0).write([2, 3], *parts)
        pair = file.layer(0).pair(2)
        file.layer(0).read([2, 3], *pair)
        check([0, 1], *pair)


class Held:
    """Calls of a function of os that wait to be let go, and then transfer a page."""

    def __init__(self, monkeypatch, name):
        self.begun, self.let_go = threading.Semaphore(0), threading.Event()
        self.called = []
        whole = getattr(os, name)

        def held(fd, buffers, at):
            self.called.append(fd)
            self.begun.release()
            assert self.let_go.wait(60)
            return whole(fd, [buffers[0][:4096]], at)

        monkeypatch.setattr(os, name, held)


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
@pytest.mark.parametrize("pages", [1, 2])
def test_a_file_is_closed_when_the_last_thread_has_left_it(folder, monkeypatch, name, pages):
    """The call goes on in a file that is open; a further one is an error."""
    dim = D // 2 * pages  # a block's k and v are so many pages
    with KVFile.create(folder / "other", num_layers=1, **SIZES | {"head_dim": dim}) as file:
        layer = file.layer(0)
        pair = layer.pair(1)
        pair.view(np.uint8)[...] = 0
        held = Held(monkeypatch, name)
        with ThreadPoolExecutor(2) as pool:
            transfer = layer.read if name == "preadv" else layer.write
            users = [pool.submit(transfer, [block], *pair) for block in (3, 4)]
            assert all(held.begun.acquire(timeout=60) for _ in users)
            file.close()
            file.close()
            assert is_open(held.called[0])
            with pytest.raises(ValueError, match=r"layer_0000.npy: is closed"):
                transfer([5], *pair)
            held.let_go.set()
            for user in users:
                if pages == 1:
                    user.result()
                else:
                    with pytest.raises(ValueError, match=r"layer_0000.npy: is closed"):
                        user.result()
        assert len(held.called) == 2
        assert not is_open(held.called[0])


@pytest.mark.parametrize("checksum", [False, True])
def test_a_closed_file_is_not_used(tmp_path, checksum):
    file = KVFile.create(tmp_path / "kv", num_layers=1, **SIZES, checksum=checksum)
    pair = file.layer(0).pair(1)
    file.layer(0).read([0], *pair)
    file.close()
    file.close()
    for use in (
        lambda: file.layer(0).read([0], *pair),
        lambda: file.layer(0).write([0], *pair),
        lambda: file.write_blocks(0, [0], *pair),
        lambda: file.append_kv(0, pair[0, 0], pair[1, 0], range(B)),
        file.sync,
    ):
        with pytest.raises(ValueError, match=r"layer_0000.npy: is closed"):
            use()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system does not list files")
def test_no_file_stays_open(tmp_path):
    before = os.listdir("/proc/self/fd")
    file = KVFile.create(tmp_path / "kv", num_layers=2, **SIZES, checksum=True)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 4
    file.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)
    os.truncate(tmp_path / "kv" / "layer_0001.crc32.npy", 5000)
    for damage in ("shorter", "none"):
        if damage == "none":
            (tmp_path / "kv" / "layer_0001.crc32.npy").unlink()
        with pytest.raises((ValueError, OSError), match="layer_0001.crc32.npy"):
            KVFile(tmp_path / "kv")
        assert len(os.listdir("/proc/self/fd")) == len(before)
