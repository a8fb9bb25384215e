"""Streams in bounded memory: the room that was asked for, whatever the context and the file."""

import sys

import numpy as np
import pytest
from _cases import BFLOAT16, dtype_of
from _process import run
from _streaming import Watched

import numba_attn
from numba_attn import KVFile
from numba_attn.sources import Layout

GROWTH = """
import numpy as np
import numba_attn
from numba_attn import KVFile, _memory

B, HKV, D, N, ROOM = 64, 8, 128, 32768, 128
sizes = {{"block_size": B, "num_kv_heads": HKV, "head_dim": D, "num_blocks": N, "num_layers": 1}}
file = KVFile.create({folder!r} + "/kv", **sizes, dtype="float16")
layer = file.layer(0)
# Keys of 0: all weights are equal, and the answer is the mean of what a few blocks hold.
known = np.array([0, 1, 5000, 20000, 32766, 32767])
k, v = np.zeros((2, len(known), B, HKV, D), np.float16)
v[:] = (1 + np.arange(len(known)))[:, None, None, None] * 1024.0
file.write_blocks(0, known, k, v)
block_bytes = 2 * k[0].nbytes
assert N * block_bytes == 8 << 30

q = np.ones((1, HKV, D), np.float16)
tables = np.random.default_rng(0).permutation(N)[None]

def call(tokens):
    options = {{"resident_blocks": ROOM, "return_lse": True}}
    return numba_attn.stream_attention(q, layer, tables, [tokens], **options)

call(20 * B)  # warm: all is compiled, reads of blocks that lie apart, too; and with threads
with open("/proc/self/clear_refs", "w") as peak:
    peak.write("5")  # the peak begins anew, with what is resident now
before = _memory.peak()
with _memory.limited(1200 << 20) as limit:
    assert limit is not None
    out, lse = call(N * B)
growth = _memory.peak() - before
expected = 1024 * len(known) * (len(known) + 1) / 2 / N
np.testing.assert_allclose(out.astype(float), expected, rtol=2e-3)
np.testing.assert_allclose(lse, np.log(N * B), rtol=1e-6)
assert growth <= ROOM * block_bytes + (64 << 20), growth
print(growth >> 20)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_8_gib_are_attended_to_in_the_room_that_was_asked_for(tmp_path):
    """In a process that may not have more than 1.2 GiB of addresses."""
    run(GROWTH.format(folder=str(tmp_path)), timeout=600)


def test_a_window_of_a_million_tokens_reads_its_own_blocks(tmp_path):
    tokens, block_size, window = 1 << 20, 32, 1000
    sizes = {"num_blocks": tokens // block_size, "block_size": block_size, "num_kv_heads": 2}
    q = np.random.default_rng(0).standard_normal((1, 4, 32)).astype(BFLOAT16)
    tables = np.random.default_rng(1).permutation(sizes["num_blocks"])[None]
    used = tables[0, (tokens - window) // block_size :]
    with KVFile.create(tmp_path / "kv", num_layers=1, **sizes, head_dim=32) as file:
        k, v = np.random.default_rng(2).standard_normal((2, len(used), block_size, 2, 32))
        file.write_blocks(0, used, k.astype(BFLOAT16), v.astype(BFLOAT16))
        source = Watched(file.layer(0))
        out = numba_attn.stream_attention(
            q, source, tables, [tokens], sliding_window=window, resident_blocks=300
        )
    assert source.blocks == sorted(used.tolist())
    pools = (x.astype(BFLOAT16) for x in (k, v))
    places = np.arange(len(used))[None]
    options = {"sliding_window": window}
    alone = numba_attn.paged_attention(q, *pools, places, [places.size * block_size], **options)
    np.testing.assert_allclose(out.astype(float), alone.astype(float), atol=4e-3)


@pytest.mark.parametrize("room", [3, 30, 300])
def test_buffers_have_the_room_that_was_asked_for(monkeypatch, room):
    """All of them together, whatever the context: the source is given no other memory."""
    tokens = 4096

    class Ones:
        block_size, num_kv_heads, head_dim, dtype = 16, 1, 32, np.dtype(np.float16)
        memory = set()

        def read(self, ids, k_out, v_out):
            k_out[:], v_out[:] = 1, 1
            block_bytes = k_out[0].nbytes + v_out[0].nbytes
            for i in range(len(ids)):
                assert v_out[i].ctypes.data == k_out[i].ctypes.data + k_out[i].nbytes
                assert k_out[i].ctypes.data == k_out.ctypes.data + i * block_bytes
                self.memory.add(k_out[i].ctypes.data)

    source, q = Ones(), np.ones((1, 2, 32), np.float16)
    with numba_attn.Streamer(room, prefetch=2) as streamer:
        for _ in range(3):
            tables = np.arange(tokens // 16)[None]
            out = streamer.attend(q, source, tables, [tokens], then=(source, tables, [tokens]))
            assert (out == 1).all()
    assert len(source.memory) <= room


@pytest.mark.parametrize("head_dim", [1, 3, 32])
@pytest.mark.parametrize("dtypes", [("int8", "float32"), ("float32", "float8_e5m2")])
def test_keys_and_values_of_different_sizes_share_a_buffer(head_dim, dtypes):
    layout = Layout(3, 1, head_dim, 5, *map(dtype_of, dtypes))
    memory = np.zeros(4 * layout.block_bytes + 1, np.uint8)
    k, v = layout.pools(memory)
    assert (k.shape, v.shape) == ((4, 3, 1, head_dim), (4, 3, 1, 5))
    for pool in (k, v):
        assert pool.flags.aligned
        pool.view(f"u{pool.itemsize}")[...] = np.iinfo(f"u{pool.itemsize}").max
    assert (memory == 255).sum() == k.nbytes + v.nbytes  # no byte is of both
    assert not np.shares_memory(k[:1], k[1:])
    assert memory[-1] == 0
