"""A KV cache on disk read past the page cache: the same numbers, or one warning."""

import errno
import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from numba_attn import KVFile, _buffers
from numba_attn.kernels import file_reads
from numba_attn.kv_file import DamagedBlockError

fcntl = pytest.importorskip("fcntl", reason="the system has no direct I/O that is known here")
O_DIRECT = getattr(os, "O_DIRECT", 0)
N, B, HKV, D = 16, 4, 2, 256  # a block's k are a page, as are its v
SIZES = {"num_blocks": N, "block_size": B, "num_kv_heads": HKV, "head_dim": D}


@pytest.fixture
def folder(tmp_path):
    """Make a cache of random numbers in layer 1 of 2; return where it is."""
    rng = np.random.default_rng(0)
    with KVFile.create(tmp_path / "kv", num_layers=2, **SIZES, dtype="float16") as file:
        file.write_blocks(1, range(N), *rng.random((2, N, B, HKV, D)).astype(np.float16))
    return tmp_path / "kv"


@pytest.fixture
def able(tmp_path):
    """Skip where the file system of the tests refuses direct reads."""
    path = tmp_path / "page"
    path.write_bytes(bytes(4096))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except (AttributeError, OSError) as error:
        pytest.skip(f"no direct I/O here: {error}")
    os.close(fd)


@pytest.fixture
def made(monkeypatch):
    """List the reads: True for each that is direct."""
    reads, preadv, read_pieces = [], os.preadv, file_reads.read_pieces

    def listed(fd, buffers, at):
        reads.append(is_direct(fd))
        return preadv(fd, buffers, at)

    def listed_pieces(fd, *pieces):
        reads.append(is_direct(fd))
        return read_pieces(fd, *pieces)

    monkeypatch.setattr(os, "preadv", listed)
    monkeypatch.setattr(file_reads, "read_pieces", listed_pieces)
    return reads


def is_direct(fd):
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & O_DIRECT)


def expected(folder, ids):
    stored = np.load(folder / "layer_0001.npy")
    return stored[ids, 0], stored[ids, 1]


def check(folder, ids, pair):
    for found, part in zip(pair, expected(folder, ids), strict=True):
        np.testing.assert_array_equal(found, part)


@pytest.mark.parametrize(
    "ids", [range(N), [7], [3, 4, 9, 10, 11], [9, 2, 1, 15, 0, 8], [4, 4], range(N)[::-1]]
)
@pytest.mark.parametrize("limit", [None, 1])
def test_direct_reads_are_the_same(able, folder, made, monkeypatch, ids, limit):
    if limit is not None:
        monkeypatch.setattr(_buffers, "MOST_BUFFERS", limit)
    with KVFile(folder, direct=True) as file:
        assert file.direct
        assert file.layer(1).direct
        pair = file.layer(1).pair(len(ids))
        file.layer(1).read(ids, *pair)
        assert file.direct
    check(folder, list(ids), pair)
    assert set(made) == {True}


def test_direct_is_not_by_default(folder, made):
    with KVFile(folder) as file:
        assert not file.direct
        assert not file.layer(1).direct
        file.layer(1).read(range(N), *file.layer(1).pair(N))
    assert made == [False]


ROW = B * HKV * D


def shifted(n, shift, step=ROW):
    """Make an array [n, B, Hkv, D] so many numbers after a page, a row each step."""
    memory = _buffers.empty((n * step + shift,), np.float16)[shift:]
    return memory.reshape(n, step)[:, :ROW].reshape(n, B, HKV, D)


ELSEWHERE = {
    "apart": (True, lambda n: (shifted(n, 0), shifted(n, 0))),
    "k not at a page": (False, lambda n: (shifted(n, 8), shifted(n, 0))),
    "v not at a page": (False, lambda n: (shifted(n, 0), shifted(n, 8))),
    "rows not at a page": (False, lambda n: (shifted(n, 0), shifted(n, 0, ROW + 8))),
    "a pair not at a page": (
        False,
        lambda n: shifted(2 * n, 8).reshape(n, 2, B, HKV, D).swapaxes(0, 1),
    ),
}


@pytest.mark.parametrize("case", ELSEWHERE)
@pytest.mark.parametrize("ids", [[3, 4, 5], [5, 1, 2], [6, 9]])
def test_arrays_that_are_not_at_pages_are_read_through_the_cache(able, folder, made, case, ids):
    direct, make = ELSEWHERE[case]
    with KVFile(folder, direct=True) as file:
        pair = make(len(ids))
        file.layer(1).read(ids, *pair)
        assert file.direct
    check(folder, ids, pair)
    assert set(made) == {direct}


def test_rows_that_are_no_pages_are_read_through_the_cache(able, tmp_path, made):
    """A block is a page, its k are half of one: only a pair is direct."""
    sizes = SIZES | {"head_dim": D // 2}
    with KVFile.create(tmp_path / "half", num_layers=1, **sizes, dtype="float16") as file:
        file.write_blocks(0, [2], *np.ones((2, 1, B, HKV, D // 2), np.float16))
    with KVFile(tmp_path / "half", direct=True) as file:
        pair = file.layer(0).pair(2)
        apart = _buffers.empty((2, 2, 2, B, HKV, D // 2), pair.dtype)
        for target, direct in ((pair, True), (apart[0], False), (apart[:, :, 0], False)):
            made.clear()
            file.layer(0).read([2, 1], *target)
            assert target.sum(axis=(2, 3, 4)).tolist() == [[B * HKV * D // 2, 0]] * 2
            assert set(made) == {direct}


def test_what_is_written_is_read_directly(able, folder, made):
    with KVFile(folder, "r+", direct=True) as file, KVFile(folder, "r+") as other:
        pair = file.layer(1).pair(2)
        for turn in range(20):
            writer = (file, other)[turn % 2]
            values = np.full((2, 2, B, HKV, D), turn, np.float16)
            writer.write_blocks(1, [turn % 15, turn % 15 + 1], *values)
            file.layer(1).read([turn % 15, turn % 15 + 1], *pair)
            np.testing.assert_array_equal(pair, values)
        k, v = np.full((2, 1, HKV, D), 0.5, np.float16)
        file.append_kv(1, k, v, [3 * B + 2])
        file.layer(1).read([3, 4], *pair)
        assert (pair[:, 0, 2] == 0.5).all()
        assert file.direct
    assert set(made) == {True}


def test_checksums_are_kept_beside_direct_reads(able, tmp_path, made):
    path = tmp_path / "sums"
    KVFile.create(path, num_layers=1, **SIZES, dtype="float16", checksum=True).close()
    with KVFile(path, "r+", direct=True) as file:
        values = np.ones((2, 3, B, HKV, D), np.float16)
        file.write_blocks(0, [1, 2, 3], *values)
        pair = file.layer(0).pair(3)
        file.layer(0).read([3, 2, 1], *pair)
        np.testing.assert_array_equal(pair, values)
        assert set(made) == {True, False}
        with open(file.layer(0).path, "r+b") as raw:
            raw.seek(4096 + 2 * 8192)
            raw.write(b"\1")
        with pytest.raises(DamagedBlockError, match="block 2 of layer 0"):
            file.layer(0).read([1, 2, 3], *pair)


def test_a_part_is_followed_by_the_rest(able, folder, monkeypatch):
    """What the system has cut within a page is gone on with through the cache."""
    preadv, made = os.preadv, []

    def partly(fd, buffers, at):
        made.append(is_direct(fd))
        done = preadv(fd, [buffers[0][:4096]], at)
        if len(made) % 3:
            return done
        buffers[0][1000:done] = bytes(max(0, done - 1000))
        return min(done, 1000)

    monkeypatch.setattr(os, "preadv", partly)
    with KVFile(folder, direct=True) as file:
        pair = file.layer(1).pair(N)
        file.layer(1).read(range(N), *pair)
        assert file.direct
    check(folder, range(N), pair)
    assert set(made) == {True, False}


def warned(folder, why):
    return pytest.warns(
        RuntimeWarning, match=f"^{folder}: direct=True, but {why}; reads go through"
    )


def read_all(folder, file):
    """Read twice, in both layers; nothing warns any more."""
    for layer in (0, 1, 0, 1):
        pair = file.layer(layer).pair(N)
        file.layer(layer).read(range(N), *pair)
    check(folder, range(N), pair)
    assert not file.direct
    assert not file.layer(1).direct


def test_blocks_that_are_no_pages_warn(tmp_path):
    path = tmp_path / "small"
    sizes = SIZES | {"head_dim": D + 1}
    with KVFile.create(path, num_layers=2, **sizes, dtype="int8") as file:
        file.write_blocks(1, [2], *np.ones((2, 1, B, HKV, D + 1), np.int8))
    with warned(path, "a block has 4112 bytes, not a multiple of 4096") as caught:
        file = KVFile(path, direct=True)
    assert len(caught) == 1
    with file:
        read_all(path, file)


def test_a_system_without_direct_reads_warns(folder, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    with warned(folder, "the system has no O_DIRECT") as caught:
        file = KVFile(folder, direct=True)
    assert len(caught) == 1
    with file:
        read_all(folder, file)


REFUSED = [errno.EINVAL, errno.ENOTSUP]


def refuse(monkeypatch, name, number, wait=lambda: None):
    """Let a function of os fail, after a wait, where it is asked for direct reads."""
    whole = getattr(os, name)

    def refused(first, *rest):
        if rest[0] & O_DIRECT if name == "open" else is_direct(first):
            wait()
            raise OSError(number, os.strerror(number))
        return whole(first, *rest)

    monkeypatch.setattr(os, name, refused)


@pytest.mark.skipif(not O_DIRECT, reason="the system has no O_DIRECT")
@pytest.mark.parametrize("number", REFUSED)
def test_a_file_system_that_refuses_to_open_warns(folder, monkeypatch, number):
    refuse(monkeypatch, "open", number)
    with warned(folder, r"the file system refuses it \(.*\)") as caught:
        file = KVFile(folder, direct=True)
    assert len(caught) == 1
    with file:
        read_all(folder, file)


@pytest.mark.parametrize("number", REFUSED)
def test_a_file_system_that_refuses_to_read_warns(able, folder, monkeypatch, number):
    refuse(monkeypatch, "preadv", number)
    with KVFile(folder, direct=True) as file:
        assert file.direct
        with warned(folder, r"the file system refuses it \(.*\)") as caught:
            read_all(folder, file)
        assert len(caught) == 1


def test_threads_that_are_refused_warn_once(able, folder, monkeypatch):
    all_have_begun = threading.Barrier(8, timeout=60)
    refuse(monkeypatch, "preadv", errno.EINVAL, all_have_begun.wait)
    with warnings.catch_warnings(record=True) as caught, KVFile(folder, direct=True) as file:
        warnings.simplefilter("always")
        pairs = [file.layer(1).pair(N) for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda pair: file.layer(1).read(range(N), *pair), pairs))
    assert len(caught) == 1
    for pair in pairs:
        check(folder, range(N), pair)


@pytest.mark.parametrize("name", ["open", "preadv"])
def test_other_errors_are_errors(able, folder, monkeypatch, name):
    refuse(monkeypatch, name, errno.EIO)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)), KVFile(folder, direct=True) as file:
        file.layer(0).read([0], *file.layer(0).pair(1))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_becomes_shorter_is_an_error(able, folder):
    with KVFile(folder, direct=True) as file:
        layer = file.layer(1)
        os.truncate(layer.path, layer.path.stat().st_size - 1)
        layer.read([0], *layer.pair(1))
        with pytest.raises(OSError, match="layer_0001.npy: ended at byte"):
            layer.read(range(N), *layer.pair(N))


def test_both_descriptors_are_closed(able, folder):
    before = len(os.listdir("/proc/self/fd"))
    file = KVFile(folder, direct=True)
    assert len(os.listdir("/proc/self/fd")) == before + 4
    file.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_direct_is_a_flag(folder):
    with pytest.raises(TypeError, match="direct: expected True or False, got str"):
        KVFile(folder, direct="yes")
