"""A KV cache on disk: what is written is read, or it is an error."""

import gc
import json
import os
import signal
import subprocess
import sys
import time

import _process
import numpy as np
import pytest

import numba_attn
from numba_attn import KVFile, _arrays, _buffers
from numba_attn.kv_file import DamagedBlockError

N, B, HKV, D = 9, 4, 2, 8
SIZES = {"num_blocks": N, "block_size": B, "num_kv_heads": HKV, "head_dim": D}


def numbers(seed, blocks, dtype):
    """Draw bits for k and v [blocks, B, Hkv, D]."""
    shape = 2, blocks, B, HKV, D * dtype.itemsize
    return np.random.default_rng(seed).integers(0, 120, shape, np.uint8).view(dtype)


@pytest.fixture(params=[False, True], ids=["plain", "checksum"])
def file(request, tmp_path):
    with KVFile.create(tmp_path / "kv", num_layers=2, **SIZES, checksum=request.param) as file:
        yield file


@pytest.mark.parametrize("dtype", _arrays.POOL_FORMATS)
@pytest.mark.parametrize("checksum", [False, True])
def test_what_is_written_is_read_after_opening_again(tmp_path, dtype, checksum):
    sizes = {"num_layers": 3, **SIZES, "dtype": dtype, "checksum": checksum}
    with KVFile.create(tmp_path / "kv", **sizes) as file:
        assert not np.stack(read(file.layer(0), range(N))).view(np.uint8).any()
        k, v = numbers(0, 5, file.layer(0).dtype)
        file.write_blocks(1, [7, 2, 3, 0, 8], k, v)
        file.sync()
    with KVFile(tmp_path / "kv") as file:
        assert file.geometry == numba_attn.kv_file.Geometry(**sizes)
        layer = file.layer(1)
        assert (layer.block_size, layer.num_kv_heads, layer.head_dim) == (B, HKV, D)
        assert _arrays.format_of(layer.dtype) == layer.dtype.name == dtype
        found = read(layer, [0, 1, 2, 3, 7, 8, 8])
        for part, expected in zip(found, (k, v), strict=True):
            assert part.dtype == layer.dtype
            whole = np.zeros((N, *expected.shape[1:]), expected.dtype)
            whole[[7, 2, 3, 0, 8]] = expected
            np.testing.assert_array_equal(
                part.view(np.uint8), whole[[0, 1, 2, 3, 7, 8, 8]].view(np.uint8)
            )
        assert not np.stack(read(file.layer(2), range(N))).view(np.uint8).any()


def read(layer, ids):
    ids = np.array(ids)
    pair = layer.pair(len(ids))
    pair.view(np.uint8)[...] = 0xAB
    layer.read(ids, *pair)
    return pair[0], pair[1]


def test_arrays_of_their_own_are_read_into_as_well(file):
    layer = file.layer(0)
    k, v = numbers(1, 3, layer.dtype)
    file.write_blocks(0, [4, 1, 5], k, v)
    apart = np.zeros_like(k), np.zeros_like(v)
    layer.read([5, 4, 1], *apart)
    for found, expected in zip(apart, (k, v), strict=True):
        np.testing.assert_array_equal(found, expected[[2, 0, 1]])


def test_numpy_reads_a_layer(file):
    k, v = numbers(2, 1, file.layer(0).dtype)
    file.write_blocks(0, [3], k, v)
    mapped = np.load(file.layer(0).path, mmap_mode="r")
    assert mapped.shape == (N, 2, B, HKV, D)
    assert mapped.offset == 4096
    np.testing.assert_array_equal(mapped[3], np.stack([k[0], v[0]]).view(mapped.dtype))


@pytest.mark.parametrize("options", [{}, {"k_scale": 0.5, "v_scale": np.array([2.0, 4.0])}])
def test_tokens_are_appended_as_in_memory(tmp_path, options):
    rng = np.random.default_rng(3)
    k, v = rng.standard_normal((2, 6, HKV, D)).astype(np.float32)
    slots = [3, 4, 30, -1, 5, 21]
    pools = np.zeros((2, N, B, HKV, D), _arrays.ml_dtype("float8_e4m3fn"))
    with KVFile.create(tmp_path / "kv", num_layers=1, **SIZES, dtype=pools.dtype) as file:
        for part in (slice(0, 4), slice(4, 6)):
            tokens = k[part], v[part]
            numba_attn.append_kv(*tokens, *pools, slots[part], **options)
            file.append_kv(0, *tokens, slots[part], **options)
        found = np.stack(read(file.layer(0), range(N)))
    np.testing.assert_array_equal(found.view(np.uint8), pools.view(np.uint8))


def test_transfers_go_on_where_the_system_has_stopped(file, monkeypatch):
    """A call may read or write a part; records are cut at any byte."""
    for name in ("preadv", "pwritev"):
        whole = getattr(os, name)

        def partly(fd, buffers, at, whole=whole):
            cut = [buffers[0][:50]] if len(buffers[0]) > 50 else buffers[:2]
            return whole(fd, cut, at)

        monkeypatch.setattr(os, name, partly)
    k, v = numbers(4, 4, file.layer(0).dtype)
    file.write_blocks(0, [1, 2, 3, 7], k, v)
    monkeypatch.undo()
    for found, expected in zip(read(file.layer(0), [1, 2, 3, 7]), (k, v), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_file_that_becomes_shorter_is_an_error(file):
    layer = file.layer(1)
    os.truncate(layer.path, layer.path.stat().st_size - 1)
    read(layer, [0])
    with pytest.raises(OSError, match="layer_0001.npy: ended at byte"):
        read(layer, [N - 1])


@pytest.mark.parametrize("part", ["data", "sum"])
def test_a_damaged_block_is_an_error(tmp_path, part):
    with KVFile.create(tmp_path / "kv", num_layers=2, **SIZES, checksum=True) as file:
        k, v = numbers(5, N, file.layer(1).dtype)
        file.write_blocks(1, range(N), k, v)
        path = file.layer(1).path
        at = 4096 + (2 * B * HKV * D * 2 * 4 + 77 if part == "data" else 4 * 4)
        damaged = path if part == "data" else path.with_name("layer_0001.crc32.npy")
        with open(damaged, "r+b") as raw:
            raw.seek(at)
            byte = raw.read(1)[0]
            raw.seek(at)
            raw.write(bytes([byte ^ 1]))
        read(file.layer(1), [0, 1, 2, 3, 5, 6, 7, 8])
        with pytest.raises(DamagedBlockError, match=r"block 4 of layer 1 in .*layer_0001.npy"):
            read(file.layer(1), range(N))


@pytest.mark.parametrize(
    "what",
    [
        "truncated",
        "longer",
        "header",
        "unfinished",
        "geometry",
        "other names",
        "text",
        "no layers",
        "another dtype",
    ],
)
def test_what_is_not_as_it_was_made_is_refused(file, what):
    folder, path = file.path, file.layer(1).path
    if what == "unfinished":
        (folder / "kv.json").unlink()
    elif what == "geometry":
        made = json.loads((folder / "kv.json").read_text())
        (folder / "kv.json").write_text(json.dumps(made | {"head_dim": 2 * D}))
    elif what == "other names":
        (folder / "kv.json").write_text('{"blocks": 3}')
    elif what in ("text", "no layers", "another dtype"):
        change = {"text": {"num_layers": "1"}, "no layers": {"num_layers": 0}}
        made = json.loads((folder / "kv.json").read_text()) | change.get(what, {"dtype": "int16"})
        (folder / "kv.json").write_text(json.dumps(made))
    elif what == "header":
        np.save(path, np.zeros((N, 2, B, HKV, D), np.int16))
    else:
        os.truncate(path, path.stat().st_size + (1 if what == "longer" else -1))
    error = FileNotFoundError if what == "unfinished" else ValueError
    with pytest.raises(error, match=r"kv\.json|layer_000.\.npy"):
        KVFile(folder)


def test_an_existing_folder_is_kept(file):
    with pytest.raises(FileExistsError):
        KVFile.create(file.path, num_layers=1, **SIZES)
    KVFile(file.path).close()


@pytest.mark.parametrize(
    ("ids", "change", "error"),
    [
        ([0, N], lambda x: x, "block_ids: must be from 0 to 8, got 0 to 9"),
        ([-1, 0], lambda x: x, "block_ids: must be from 0 to 8, got -1 to 0"),
        ([0.0, 1.0], lambda x: x, "block_ids: expected integers"),
        ([2, 2], lambda x: x, "block_ids: must differ"),
        ([0, 1], lambda x: x[:1], "k: expected bfloat16"),
        ([0, 1], lambda x: x.astype(np.float32), "k: expected bfloat16"),
        ([0, 1], lambda x: x[:, ::-1], "must be one piece of memory"),
    ],
)
def test_wrong_arguments_write_nothing(file, ids, change, error):
    k, v = (change(x) for x in numbers(6, 2, file.layer(0).dtype))
    with pytest.raises((TypeError, ValueError), match=error):
        file.write_blocks(0, ids, k, v)
    assert not np.stack(read(file.layer(0), range(N))).view(np.uint8).any()


def test_a_cache_opened_to_be_read_is_not_written(file):
    with (
        KVFile(file.path) as reading,
        pytest.raises(OSError, match="is open to be read; open it with 'r\\+'"),
    ):
        reading.write_blocks(0, [0], *numbers(7, 1, file.layer(0).dtype))
    with pytest.raises(ValueError, match="mode: expected 'r' or 'r\\+', got 'w'"):
        KVFile(file.path, "w")


WRITER = """
import numpy as np
from numba_attn import KVFile
file = KVFile({path!r}, "r+")
print("ready", flush=True)
turn = 0
while True:
    turn = turn % 100 + 1
    k, v = np.full((2, 64, 64, 8, 128), turn, np.int8)
    file.write_blocks(0, np.arange(64), k, v)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="the system has no kill -9")
def test_after_a_kill_every_block_is_whole_or_damaged(tmp_path):
    sizes = {"num_blocks": 64, "block_size": 64, "num_kv_heads": 8, "head_dim": 128}
    path = tmp_path / "kv"
    KVFile.create(path, num_layers=1, **sizes, dtype="int8", checksum=True).close()
    rng, damaged = np.random.default_rng(8), 0
    for _ in range(20):
        code = WRITER.format(path=str(path))
        writer = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, env=_process.environment()
        )
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0.001, 0.2))
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        with KVFile(path) as file:
            for block in range(64):
                try:
                    k, v = read(file.layer(0), [block])
                except DamagedBlockError:
                    damaged += 1
                else:
                    assert (k == k.flat[0]).all()
                    assert (v == k.flat[0]).all()
    assert damaged  # some kills came between a block and its checksum


def test_runs_are_cut_at_the_most_buffers_of_a_call(file, monkeypatch):
    monkeypatch.setattr(_buffers, "MOST_BUFFERS", 4)
    k, v = numbers(9, N, file.layer(0).dtype)
    file.write_blocks(0, range(N), k, v)
    found = read(file.layer(0), range(N))
    for part, expected in zip(found, (k, v), strict=True):
        np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize("layer", [2, -1])
def test_layers_that_are_not_there(file, layer):
    with pytest.raises(IndexError, match=f"layer: must be from 0 to 1, got {layer}"):
        file.layer(layer)
    with pytest.raises(IndexError, match="layer: must be"):
        file.write_blocks(layer, [0], *numbers(0, 1, file.layer(0).dtype))


def test_slots_that_are_not_there(file):
    k, v = np.ones((2, 1, HKV, D), np.float32)
    with pytest.raises(
        ValueError, match=f"slot_mapping: must be below N \\* B = {N * B}, got {N * B}"
    ):
        file.append_kv(0, k, v, [N * B])


def test_a_cache_that_is_forgotten_is_closed(tmp_path):
    file = KVFile.create(tmp_path / "kv", num_layers=2, **SIZES, checksum=np.True_)
    number = file.layer(1)._file._fd
    os.fstat(number)
    del file
    gc.collect()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(number)
