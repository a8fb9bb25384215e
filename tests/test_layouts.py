"""Strides: whatever view the caller has, nothing is copied and no bit changes."""

import numpy as np
import pytest
from _bound import assert_same_bits, check_answer
from _cases import BFLOAT16, Paged, attend, draw, place


@pytest.fixture(scope="module")
def seqs(twin):
    return draw(twin.size((40, 0, 1, 530), (9, 0)))


@pytest.fixture(scope="module")
def plain(seqs):
    return place(seqs, 8)


@pytest.fixture(scope="module")
def expected(twin, seqs, plain):
    answer = attend(twin, seqs, plain)
    check_answer(seqs, answer)
    return answer


def q_of_packed_qkv(q, paged):
    packed = np.full((len(q), q.shape[1] + 4, q.shape[2]), np.nan, BFLOAT16)  # [S, Hq + 2Hkv, D]
    packed[:, : q.shape[1]] = q
    return packed[:, : q.shape[1]], paged


def one_5d_pool(q, paged):
    both = np.stack([paged.k_pool, paged.v_pool], axis=1)  # [N, 2, B, Hkv, D]
    return q, paged._replace(k_pool=both[:, 0], v_pool=both[:, 1])


def k_and_v_apart(q, paged):
    """Only V interleaved with something else: K and V have strides of their own."""
    wide = np.full((*paged.v_pool.shape[:3], 3 * q.shape[2]), np.nan, BFLOAT16)
    inner = slice(q.shape[2], 2 * q.shape[2])
    wide[..., inner] = paged.v_pool
    return q, paged._replace(v_pool=wide[..., inner])


def head_major(q, paged):
    def view(pool):
        return np.ascontiguousarray(pool.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)

    return q, paged._replace(k_pool=view(paged.k_pool), v_pool=view(paged.v_pool))


def negative_strides(q, paged):
    def view(pool):
        return np.ascontiguousarray(pool[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]

    q = np.ascontiguousarray(q[::-1, ::-1])[::-1, ::-1]
    return q, paged._replace(k_pool=view(paged.k_pool), v_pool=view(paged.v_pool))


def odd_offset(q, paged):
    """Start 2 bytes past a boundary: nothing is aligned to more than an element."""

    def view(array):
        room = np.empty(array.size + 1, BFLOAT16)
        room[1:] = array.ravel()
        return room[1:].reshape(array.shape)

    return view(q), paged._replace(k_pool=view(paged.k_pool), v_pool=view(paged.v_pool))


def read_only(q, paged):
    arrays = [array.copy() for array in (q, *paged)]
    for array in arrays:
        array.flags.writeable = False
    return arrays[0], Paged(*arrays[1:])


def broadcast_heads(q, paged):
    """Repeat one query for all sequences by a stride of 0."""
    return np.broadcast_to(q[:1], q.shape), paged


def strided_tables(q, paged):
    tables = np.full((2 * paged.block_tables.shape[1], 3 * len(q)), -7, np.int32)
    tables[::2, ::3] = paged.block_tables.T
    lens = np.stack([paged.seq_lens, paged.seq_lens + 1], axis=1)
    return q, paged._replace(block_tables=tables[::2, ::3].T, seq_lens=lens[:, 0])


def wide_integers(q, paged):
    return q, paged._replace(
        block_tables=paged.block_tables.astype(np.int64), seq_lens=paged.seq_lens.astype(np.uint64)
    )


def bits_in_uint16(q, paged):
    k_pool, v_pool = (pool.view(np.uint16) for pool in paged[:2])
    return q.view(np.uint16), paged._replace(k_pool=k_pool, v_pool=v_pool)


LAYOUTS = (
    q_of_packed_qkv,
    one_5d_pool,
    k_and_v_apart,
    head_major,
    negative_strides,
    odd_offset,
    read_only,
    strided_tables,
    wide_integers,
    bits_in_uint16,
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_bits_do_not_depend_on_the_layout(twin, seqs, plain, expected, layout):
    q, paged = layout(seqs.q, plain)
    out, lse = twin.paged_attention(q, *paged, return_lse=True)
    assert out.dtype == q.dtype
    assert_same_bits((out.view(np.uint16), expected.out.view(np.uint16)), (lse, expected.lse))


def test_memory_mapped_pools(twin, seqs, plain, expected, tmp_path):
    def mapped(name, array):
        np.save(tmp_path / name, array.view(np.uint16))
        return np.load(tmp_path / name, mmap_mode="r")

    pools = [mapped(name, pool) for name, pool in zip(("k.npy", "v.npy"), plain[:2], strict=True)]
    q = seqs.q.view(np.uint16)
    out, lse = twin.paged_attention(q, *pools, *plain[2:], return_lse=True)
    assert_same_bits((out, expected.out.view(np.uint16)), (lse, expected.lse))


def test_one_query_for_all_by_a_stride_of_0(twin, seqs, plain):
    q, paged = broadcast_heads(seqs.q, plain)
    out = twin.paged_attention(q, *paged)
    assert_same_bits((out, twin.paged_attention(q.copy(), *paged)))


@pytest.mark.parametrize(
    "view",
    [
        lambda shape: np.full((shape[0], 2 * shape[1], shape[2]), 7, BFLOAT16)[:, ::2],
        lambda shape: np.full((shape[1], shape[0], shape[2] + 3), 7, BFLOAT16).transpose(1, 0, 2)[
            ..., 3:
        ],
        lambda shape: np.full(shape, 7, BFLOAT16)[::-1, ::-1],
    ],
    ids=["every other head", "head-major, sliced", "negative"],
)
def test_out_of_any_strides(backend, view):
    seqs = draw((5, 0, 3))
    paged = place(seqs, 4)
    expected = backend.paged_attention(seqs.q, *paged)
    out = view(seqs.q.shape)
    around = out.base.size - out.size
    assert backend.paged_attention(seqs.q, *paged, out=out) is out
    assert_same_bits((out, expected))
    assert (out.base == 7).sum() >= around, "what is not out is left as it was"


def test_a_pool_that_is_not_copied(cpu):
    """A pool that is mostly address space: a copy of it would not fit into memory."""
    seqs = draw((5,), head_dim=32)
    paged = place(seqs, 8)
    blocks = 1 << 32
    shape, strides = (blocks, *paged.k_pool.shape[1:]), (0, *paged.k_pool.strides[1:])
    first = paged.block_tables[0, 0]
    k_pool, v_pool = (
        np.lib.stride_tricks.as_strided(pool[first:], shape, strides, writeable=False)
        for pool in paged[:2]
    )
    table = np.array([[2**31 - 1]])
    out = cpu.paged_attention(seqs.q, k_pool, v_pool, table, seqs.lens)
    assert_same_bits((out, cpu.paged_attention(seqs.q, *paged)))
