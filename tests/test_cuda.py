"""What only the CUDA twin has: device layouts, load paths, its blocks of threads, its launches."""

import warnings

import numpy as np
import pytest
from _bound import assert_same_bits, check_answer, check_state
from _cases import BFLOAT16, Answer, attend, draw, place, tiles
from _on_device import (
    places_of,
    read,
    reads_wide,
    step_cuda,
    to_device,
    twin,
)
from test_layouts import LAYOUTS, wide_integers

import numba_attn
from numba_attn import AttentionState, _arrays, _device, _plan_cuda

pytestmark = pytest.mark.cuda

in_simulator = pytest.mark.skipif(
    not _device.is_simulator(), reason="of the simulator: a device has no such thing"
)


def on_device(q, paged):
    return [to_device(array) for array in (q, *paged)]


def host_answer(out, lse):
    return Answer(_arrays.to_host(out).view(BFLOAT16), _arrays.to_host(lse))


LENS = (37, 0, 1)
DEVICE_LAYOUTS = [layout for layout in LAYOUTS if layout is not wide_integers]  # int32 only


@pytest.mark.parametrize("layout", DEVICE_LAYOUTS, ids=lambda layout: layout.__name__)
def test_device_layouts_are_read_in_place(layout):
    seqs = draw(LENS, num_kv_heads=2, gqa=1, head_dim=8)
    plain = place(seqs, 8)
    expected = attend(numba_attn, seqs, plain, device="cuda")
    check_answer(seqs, expected)
    q, paged = layout(seqs.q, plain)
    out, lse = numba_attn.paged_attention(*on_device(q, paged), return_lse=True)
    assert _device.is_device_array(out)
    assert_same_bits(*zip(host_answer(out, lse), expected, strict=True))


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(8, 8), (64, 64), (136, 8)])
def test_both_load_paths_give_the_same_bits(head_dim, v_head_dim):
    seqs = draw((21,), gqa=1, num_kv_heads=2, head_dim=head_dim, v_head_dim=v_head_dim)
    paged = place(seqs, 4)
    answers = []
    for skip in (0, 1):  # elements past a boundary of 16 bytes
        pools = []
        for pool in paged[:2]:
            room = np.full(pool.size + 8, np.nan, BFLOAT16)
            room[skip : skip + pool.size] = pool.ravel()
            shifted = to_device(room)[skip : skip + pool.size]
            pools.append(shifted.reshape(*pool.shape))
        assert reads_wide(*pools) == (skip == 0)
        rest = [to_device(array) for array in paged[2:]]
        given = (to_device(seqs.q), *pools, *rest)
        answers.append(host_answer(*numba_attn.paged_attention(*given, return_lse=True)))
    check_answer(seqs, answers[0])
    assert_same_bits(*zip(*answers, strict=True))


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "threads"),
    [(1, 1, 32), (13, 9, 64), (20, 33, 128), (8, 130, 128), (260, 3, 128)],
)
def test_blocks_of_one_warp_and_partly_filled_ones(head_dim, v_head_dim, threads):
    """Each lane of a warp has part of a row, and each thread some columns or none."""
    assert _plan_cuda.StepVariant(head_dim, v_head_dim, False).threads == threads
    seqs = draw((18, 1), gqa=1, num_kv_heads=1, head_dim=head_dim, v_head_dim=v_head_dim)
    check_answer(seqs, attend(numba_attn, seqs, place(seqs, 5), device="cuda"))


def test_rows_of_several_splits():
    split = twin().SPLIT
    seqs = draw((2 * split + 17, split), gqa=1, num_kv_heads=1, head_dim=8)
    paged = place(seqs, 24)
    check_answer(seqs, attend(numba_attn, seqs, paged, device="cuda"))


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 31, 32, 33])
def test_rows_that_end_around_a_tile(tokens):
    seqs = draw((tokens,), gqa=1, num_kv_heads=1, head_dim=4)
    check_answer(seqs, attend(numba_attn, seqs, place(seqs, 16), device="cuda"))


def test_device_counts_mean_full_blocks_by_default():
    seqs = draw((12, 8, 0), gqa=1, num_kv_heads=1, head_dim=8)
    q, paged = seqs.q, place(seqs, 4)
    (tile,) = tiles(paged, paged.block_tables.shape[1])
    assert (tile.tile_token_counts == 4 * tile.tile_block_counts).all()
    every_other = np.repeat(tile.tile_block_counts.astype(np.int32), 2)[::2]
    state = AttentionState(*q.shape, device="cuda")
    q, k_pool, v_pool, tables = on_device(q, paged)[:4]
    numba_attn.step_tile(state, q, k_pool, v_pool, tables, to_device(every_other))
    check_state(seqs, [_arrays.to_host(part) for part in (state.m, state.l, state.o)])


@pytest.mark.parametrize("step", [1, -1])
def test_out_is_written_in_place_whatever_its_strides(step):
    seqs = draw((5, 9), gqa=3, num_kv_heads=1, head_dim=8)
    paged = place(seqs, 4)
    out = to_device(np.full((2, 3, 20), 7, np.uint16)[::step, ::step, 4:12])
    result = numba_attn.paged_attention(*on_device(seqs.q, paged), out=out)
    assert result is out
    expected = numba_attn.paged_attention(seqs.q, *paged, device="cuda")
    assert_same_bits((read(out), expected.view(np.uint16)))
    between = np.ones(_arrays.flatten(out).memory.size, bool)
    between[places_of(out)] = False
    assert (_arrays.to_host(_arrays.flatten(out).memory)[between] == 7).all()


def test_device_out_of_a_call_on_the_cpu_may_be_strided():
    seqs = draw((5, 9), gqa=1, num_kv_heads=2, head_dim=8)
    room = to_device(np.full((2, 2, 20), 7, np.uint16))
    out = room[:, :, 4:12]
    given = on_device(seqs.q, place(seqs, 4))
    numba_attn.paged_attention(*given, device="cpu", out=out)
    whole = _arrays.to_host(room)
    expected = numba_attn.paged_attention(seqs.q, *place(seqs, 4)).view(np.uint16)
    assert_same_bits((whole[:, :, 4:12], expected))
    assert (whole[:, :, :4] == 7).all()
    assert (whole[:, :, 12:] == 7).all()


class Foreign:
    """A device array as torch has them: its dtype is no NumPy's, its strides are a method."""

    __cuda_array_interface__ = None

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, "torch.uint16"

    def stride(self):
        raise NotImplementedError


@in_simulator
def test_arrays_of_another_library(monkeypatch):
    monkeypatch.setattr(_device, "as_device_array", lambda x: getattr(x, "array", x))
    seqs = draw((5, 9), gqa=1, num_kv_heads=2, head_dim=8)
    given = [Foreign(array) for array in on_device(seqs.q, place(seqs, 4))]
    out = Foreign(to_device(np.zeros(seqs.q.shape, np.uint16)))
    for device in ("cuda", "cpu"):
        expected = numba_attn.paged_attention(seqs.q, *place(seqs, 4), device=device)
        assert numba_attn.paged_attention(*given, device=device, out=out) is out
        assert_same_bits((_arrays.to_host(out.array).view(BFLOAT16), expected))
    state = AttentionState.like(*given[:3:2])
    assert numba_attn.finalize(state, out=out) is out
    assert not _arrays.to_host(out.array).any()


def filled(num_seqs, seed, device):
    """Make a state of random numbers; its second row is empty, but for o, which is NaN."""
    rng = np.random.default_rng(seed)
    m, l, o = (rng.uniform(1, 3, (num_seqs, 2, *columns)) for columns in ((), (), (40,)))
    m[1], l[1], o[1] = -np.inf, 0, np.nan
    state = AttentionState(*o.shape, device=device)
    flat = np.concatenate([part.ravel() for part in (m, l, o)], dtype=np.float32)
    _arrays.overwrite(state.buffer, flat)
    return state


def test_a_left_fold_of_many_partials():
    """`merge_splits` folds what `starts` gives to each row, and leaves the other rows."""
    starts = np.array([0, 3, 5, 5, 6], np.int32)
    folded = {}
    for name, place_on in (("cpu", np.asarray), ("cuda", to_device)):
        state, partials = filled(4, 1, name), filled(6, 2, name)
        _device.backend(name).merge_splits(state, partials, place_on(starts))
        folded[name] = [_arrays.to_host(part) for part in (state.m, state.l, state.o)]
    before = filled(4, 1, "cpu")
    for found, expected, old in zip(
        folded["cuda"], folded["cpu"], (before.m, before.l, before.o), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert_same_bits((found[2], old[2]))


def test_no_tokens_no_launch(monkeypatch):
    def launch(*args):
        raise AssertionError("launched")

    monkeypatch.setattr(twin(), "launch", launch)
    q, pool = np.zeros((0, 2, 8), np.uint16), np.zeros((3, 4, 1, 8), np.uint16)
    out = numba_attn.paged_attention(q, pool, pool, np.zeros((0, 1), "i4"), [], device="cuda")
    assert out.shape == (0, 2, 8)


@pytest.mark.parametrize("shape", [(0, 4, 1, 8), (3, 4, 1, 8)])
def test_empty_pools_and_tables(shape):
    q, pool = to_device(np.ones((2, 2, 8), np.uint16)), to_device(np.zeros(shape, np.uint16))
    tables, lens = to_device(np.zeros((2, 0), np.int32)), to_device(np.zeros(2, np.int32))
    answer = numba_attn.paged_attention(q, pool, pool, tables, lens, return_lse=True)
    out, lse = host_answer(*answer)
    assert (out.view(np.uint16) == 0).all()
    assert (lse == -np.inf).all()


@pytest.mark.parametrize("head_dims", [(1400, 8), (8, 1400)])
def test_a_head_dim_above_the_limit(head_dims):
    seqs = draw((3,), gqa=1, num_kv_heads=1, head_dim=head_dims[0], v_head_dim=head_dims[1])
    paged = place(seqs, 4)
    text = r"k_pool: tiles of 16 tokens must fit 49152 bytes .* for D = {} in .* Dv = {} in"
    with pytest.raises(ValueError, match=text.format(*head_dims)):
        numba_attn.paged_attention(seqs.q, *paged, device="cuda")


def test_launches_warn_of_nothing_and_leave_the_filters():
    seqs = draw((3,), gqa=1, num_kv_heads=1, head_dim=4)
    infinite = seqs.map(lambda q, keys, values: values[0].__setitem__(1, np.inf))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        attend(numba_attn, infinite, place(infinite, 4), device="cuda")
        assert warnings.filters == before
    assert not seen


def test_kernels_are_compiled_once():
    kernels = step_cuda().simple, step_cuda().split
    for kernel in kernels:
        kernel.cache_clear()
    for tokens, block_size, gqa in ((3, 4, 1), (17, 3, 2), (9, 1000, 3)):
        seqs = draw((tokens,), gqa=gqa, num_kv_heads=1, head_dim=8)
        attend(numba_attn, seqs, place(seqs, block_size), device="cuda")
    assert [kernel.cache_info().misses for kernel in kernels] == [1, 1]


@in_simulator
def test_shared_memory_starts_as_nan():
    import _warp_kernels

    floats, bits = to_device(np.zeros(4, np.float32)), to_device(np.zeros(4, np.uint16))
    _warp_kernels.unwritten[1, 1](floats, bits)
    assert np.isnan(_arrays.to_host(floats)).all()
    assert np.isnan(_arrays.to_host(bits).view(BFLOAT16).astype(float)).all()


@in_simulator
@pytest.mark.parametrize("meet", ["syncthreads", "a warp"])
def test_a_thread_that_fails_ends_the_launch(meet):
    import _warp_kernels

    with pytest.raises(ZeroDivisionError, match="tid=.5, 0, 0"):
        _warp_kernels.failing[1, 32](meet == "a warp", 5)


@in_simulator
def test_a_barrier_does_not_wait_for_threads_that_have_ended():
    import _warp_kernels

    order = to_device(np.zeros(8, np.int32))
    _warp_kernels.some_return[1, 8](order)
    assert _arrays.to_host(order).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


@in_simulator
@pytest.mark.parametrize("side", ["block", "slot", "head"])
def test_pools_of_more_than_2_31_elements(tmp_path, side):
    far = 2**31 + 64
    axis = ["block", "slot", "head"].index(side)
    shape = [2 if i == axis else 1 for i in range(3)] + [8]
    strides = [2 * far if i == axis else 16 for i in range(3)] + [2]
    file = np.memmap(tmp_path / "pool", np.uint16, "w+", shape=(far + 8,))
    pool = np.lib.stride_tricks.as_strided(file, shape, strides)
    rng = np.random.default_rng(0)
    pool[...] = rng.standard_normal(shape).astype(BFLOAT16).view(np.uint16)
    q = rng.standard_normal((1, shape[2], 8)).astype(BFLOAT16).view(np.uint16)
    tables, lens = np.arange(shape[0], dtype=np.int32)[None], np.array([shape[0] * shape[1]], "i4")
    given = [to_device(array) for array in (q, tables, lens)]
    device_pool = type(given[0])(pool)
    out = numba_attn.paged_attention(given[0], device_pool, device_pool, *given[1:])
    expected = numba_attn.paged_attention(q, *[np.array(pool)] * 2, tables, lens, device="cuda")
    assert_same_bits((_arrays.to_host(out), expected))
