import ml_dtypes
import numpy as np
import pytest

from numba_attn import _decode, _workloads
from numba_attn._workloads import WORKLOADS, Workload, make_steps, parse_shape

SMALL = Workload("small", (1, 40, 0, 17), 4, 2, 8)


@pytest.mark.parametrize(
    ("name", "num_seqs", "megabytes"),
    [
        ("W0", 1, 0.0655),
        ("W1", 1, 134),
        ("W2", 16, 130),
        ("W3", 4, 268),
        ("W4", 1, 67),
        ("W5", 8, 17),
        ("W6", 4, 67),
    ],
)
def test_a_workload_reads_the_bytes_of_its_definition(name, num_seqs, megabytes):
    workload = WORKLOADS[name]
    assert workload.num_seqs == num_seqs
    assert workload.kv_bytes / 1e6 == pytest.approx(megabytes, rel=0.02)


def test_w2_is_ragged_within_its_limits():
    lens = WORKLOADS["W2"].seq_lens
    assert len(set(lens)) == 16
    assert 500 <= min(lens) < 1000
    assert 3000 < max(lens) <= 3500
    assert any(n % 16 for n in lens)


@pytest.mark.parametrize("name", ["W1", "W2", "W3", "W4", "W5", "W6"])
def test_pools_in_rotation_exceed_any_cache(name):
    workload = WORKLOADS[name]
    assert workload.num_pools() * workload.kv_bytes >= 512e6
    assert workload.num_pools() >= 2


def test_call_overhead_needs_one_pool():
    assert WORKLOADS["W0"].num_pools() == 1


def test_shape_is_parsed():
    workload = parse_shape("2, 300, 32/8, 128")
    assert workload.seq_lens == (300, 300)
    assert (workload.num_q_heads, workload.num_kv_heads, workload.head_dim) == (32, 8, 128)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2,3", "expected S,context,Hq/Hkv,D"),
        ("1,2,3,4", "expected S,context,Hq/Hkv,D"),
        ("1,-2,4/2,8", "expected S,context,Hq/Hkv,D"),
        ("1,2,4/2,8,", "expected S,context,Hq/Hkv,D"),
        ("0,2,4/2,8", "every number at least 1, got '0,2,4/2,8'"),
        ("1,2,4/0,8", "every number at least 1"),
        ("1,2,3/2,8", "Hkv must divide Hq, got Hq=3, Hkv=2"),
    ],
)
def test_malformed_shape_is_explained(text, message):
    with pytest.raises(ValueError, match=message):
        parse_shape(text)


def test_tables_deal_every_block_once_and_shuffled():
    (step,) = make_steps(Workload("x", (1, 400, 0, 170), 4, 2, 8), 1)
    used = [row[: -(-n // 16)] for row, n in zip(step.block_tables, step.seq_lens, strict=True)]
    order = np.concatenate(used)
    assert sorted(order) == list(range(len(step.k_pool)))
    assert (np.diff(order) == 1).sum() < len(order) / 4
    assert all((row[len(u) :] == -1).all() for row, u in zip(step.block_tables, used, strict=True))


def test_pools_are_aligned_normal_and_all_different():
    steps = make_steps(Workload("x", (4000,), 4, 2, 32), 2)
    pools = [pool for step in steps for pool in (step.k_pool, step.v_pool)]
    for pool in pools:
        assert pool.dtype == ml_dtypes.bfloat16
        assert pool.ctypes.data % 64 == 0
        values = pool.astype(np.float32)
        assert abs(values.mean()) < 0.02
        assert values.std() == pytest.approx(1, abs=0.02)
    bits = [pool.view(np.uint16) for pool in pools]
    assert not any((a == b).mean() > 0.1 for i, a in enumerate(bits) for b in bits[:i])
    assert not np.array_equal(steps[0].block_tables, steps[1].block_tables)


def test_inputs_repeat_from_run_to_run():
    for a, b in zip(make_steps(SMALL, 2), make_steps(SMALL, 2), strict=True):
        for x, y in zip(a.arguments(), b.arguments(), strict=True):
            assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("name", list(WORKLOADS))
@pytest.mark.parametrize("limit", [10**5, 10**7])
def test_cut_keeps_the_batch_and_obeys_the_limit(name, limit):
    workload = WORKLOADS[name]
    cut = workload.cut(limit)
    assert cut.num_seqs == workload.num_seqs
    assert min(cut.seq_lens) >= 1
    floor = 2 * cut.num_seqs * cut.token_bytes  # one token each
    assert cut.kv_bytes <= max(limit, floor)
    assert workload.kv_bytes <= limit or cut.kv_bytes > limit / 2 or cut.kv_bytes == floor


@pytest.mark.parametrize("available", [10**8, 10**9, 10**11])
@pytest.mark.parametrize("effort", [_decode.QUICK, _decode.FULL], ids=["quick", "full"])
@pytest.mark.parametrize("name", list(WORKLOADS))
def test_measuring_takes_at_most_two_fifths_of_the_memory(name, effort, available):
    workload, num_pools = effort.fit(WORKLOADS[name], available)
    assert 1 <= num_pools
    assert num_pools * workload.kv_bytes <= 0.4 * available


def test_enough_memory_cuts_nothing():
    for workload in WORKLOADS.values():
        fitted, num_pools = _decode.FULL.fit(workload, 10**11)
        assert fitted == workload
        assert num_pools == workload.num_pools(_workloads.ROTATION_BYTES)
