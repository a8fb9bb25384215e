"""Addresses: 64-bit offsets, not a byte outside the valid tokens, no use of freed memory."""

import ctypes
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from _bound import assert_same_bits, check_answer
from _cases import BFLOAT16, attend, draw, place
from _process import TESTS, environment, run

linux = pytest.mark.skipif(sys.platform != "linux", reason="guard pages are made by Linux calls")


def guarded(*arguments):
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", TESTS / "_guarded.py", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


@linux
def test_no_byte_outside_the_valid_tokens_is_touched():
    done = guarded("1", "20", "80", "113", "128")
    assert done.returncode == 0, f"{done.stdout}exit status {done.returncode}\n{done.stderr}"
    assert done.stdout.count("guarded") == 12


@linux
def test_the_guard_pages_guard():
    assert guarded("touch").returncode == -signal.SIGSEGV


@linux
def test_no_freed_memory_is_used():
    """Let the C library unmap or scribble over whatever is freed."""
    code = """
import numpy as np, _backends, _cases, _bound
for heads, head_dim in ((300, 64), (3, 64)):
    seqs = _cases.draw((40, 600), gqa=1, num_kv_heads=heads, head_dim=head_dim)
    _bound.check_answer(seqs, _cases.attend(_backends.get("cpu"), seqs, _cases.place(seqs, 16)))
"""
    run(code, MALLOC_MMAP_THRESHOLD_=4096, MALLOC_PERTURB_=165)


def sparse_pool(path, shape):
    """Map a file of zeros that takes no room until it's written to."""
    pool = np.memmap(path, np.uint16, "w+", shape=shape)
    if getattr(os.stat(path), "st_blocks", 0) * 512 > 2**30:
        pytest.skip("this file system has no sparse files")
    return pool


@pytest.mark.parametrize("side", ["k", "v", "both"])
def test_a_pool_of_more_than_2_31_elements(cpu, tmp_path, side):
    seqs = draw((40, 16, 5), num_kv_heads=1)
    small = place(seqs, 16, fill=0)
    row = small.k_pool[0].size
    blocks = 2**31 // row + 1000
    # Spread the blocks over the whole file, the last one included.
    spread = np.linspace(0, blocks - 1, len(small.k_pool)).astype(np.int32)
    assert int(spread[-1]) * row > 2**31
    used = small.block_tables < len(spread)
    used &= small.block_tables >= 0
    tables = np.where(used, spread[np.where(used, small.block_tables, 0)], -1)
    pools = []
    for name, pool in zip("kv", small[:2], strict=True):
        large = sparse_pool(tmp_path / name, (blocks, *pool.shape[1:]))
        large[spread] = pool.view(np.uint16)
        pools.append(large.view(BFLOAT16))
    paged = small._replace(k_pool=pools[0], v_pool=pools[1], block_tables=tables)
    answer = attend(cpu, seqs, paged)
    check_answer(seqs, answer)
    assert_same_bits(*zip(answer, attend(cpu, seqs, small), strict=True))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_strides_of_more_than_2_31_elements(cpu, tmp_path, axis):
    """Two blocks, slots or heads, each on its own side of 2^31 elements."""
    shape = [2 if i == axis else 1 for i in range(3)] + [32]
    seqs = draw((2 if axis == 1 else 1,) * (2 if axis == 0 else 1), num_kv_heads=shape[2])
    small = place(seqs, shape[1])
    far = 2**31 + 64
    file = sparse_pool(tmp_path / "pool", (2 * far,))
    strides = [64 if i != axis else 2 * far for i in range(3)] + [2]
    pools = []
    for start, rows in ((0, seqs.keys), (32, seqs.values)):
        pool = np.lib.stride_tricks.as_strided(file[start:], shape, strides)
        joined = np.stack(rows) if axis == 0 else rows[0][None]
        pool[...] = joined.view(np.uint16)
        pools.append(pool.view(BFLOAT16))
    tables = np.arange(len(seqs.q), dtype=np.int32)[:, None]
    answer = attend(
        cpu, seqs, small._replace(k_pool=pools[0], v_pool=pools[1], block_tables=tables)
    )
    check_answer(seqs, answer)


def test_queries_far_apart(cpu, tmp_path):
    seqs = draw((5, 9))
    far = 2**31 + 64
    file = sparse_pool(tmp_path / "q", (far + seqs.q[0].size,))
    strides = (2 * far, seqs.q.strides[1], 2)
    q = np.lib.stride_tricks.as_strided(file, seqs.q.shape, strides)
    q[...] = seqs.q.view(np.uint16)
    paged = place(seqs, 4)
    out = cpu.paged_attention(q, *paged)
    assert_same_bits((out, cpu.paged_attention(seqs.q, *paged).view(np.uint16)))


def test_partials_take_bounded_memory_and_the_same_bits(cpu, monkeypatch):
    """Many queries over a long cache are done some rows at a time."""
    from numba_attn.kernels import cpu as kernels

    seqs = draw((1500, 0, 700), num_kv_heads=1)
    paged = place(seqs, 16)
    q = np.random.default_rng(1).standard_normal((3, 5, 2, 32)).astype(BFLOAT16)
    whole = cpu.paged_attention(q, *paged, return_lse=True)
    taken = []
    take = kernels._take_partials
    monkeypatch.setattr(kernels, "_take_partials", lambda shape: taken.append(shape) or take(shape))
    monkeypatch.setattr(kernels, "PARTIAL_BYTES", 4 * 4 * 2 * 34)  # 4 items
    parts = cpu.paged_attention(q, *paged, return_lse=True)
    assert_same_bits(*zip(whole, parts, strict=True))
    assert len(taken) > 5
    assert max(shape[0] for shape in taken) <= 4


@pytest.mark.parametrize("given", [("k_scale",), ("v_scale",), ("k_scale", "v_scale")])
def test_scales_that_kernels_read_by_address_stay(given):
    """The factor that was not given is 1, wherever it is kept, after other memory has come."""
    from numba_attn._call import Formats, Options
    from numba_attn.kernels import scaling

    shape = (2, 4, 3)
    scales = {name: np.full(shape, 1.0, np.float32) for name in given}
    found = scaling.scaling_of(Options(scale=1.0, **scales), Formats(), 1, shape)
    others = [np.full(size, 7.0, np.float32) for size in (1, 3, 24) for _ in range(100)]
    for address, *strides in (found.k_tokens, found.v_tokens):
        for index in np.ndindex(shape):
            where = address + int(np.dot(strides, index))
            assert ctypes.c_float.from_address(where).value == 1.0
    assert others
