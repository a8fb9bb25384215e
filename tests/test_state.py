"""AttentionState: the identity, one buffer, and a life between calls."""

import copy
import pickle

import numpy as np
import pytest
from _bound import assert_same_bits, check_state
from _cases import Tile, absorb, draw, place, step, tiles

from numba_attn import AttentionState


def test_a_new_state_is_the_identity(backend):
    state = backend.AttentionState(2, 3, 5)
    m, l, o = backend.read(state)
    assert (m.shape, l.shape, o.shape) == ((2, 3), (2, 3), (2, 3, 5))
    assert (m == -np.inf).all()
    assert (l == 0).all()
    assert (o == 0).all()
    assert (backend.lse(state) == -np.inf).all()
    out, lse = backend.finalize(state, return_lse=True)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


def test_reset_returns_to_the_identity(backend):
    seqs = draw((9, 0))
    paged = place(seqs, 4)
    state = absorb(backend, seqs, paged)
    first = backend.read(state)
    assert state.reset() is None
    assert_same_bits(
        *zip(backend.read(state), backend.read(backend.like(seqs.q, paged.v_pool)), strict=True)
    )
    step(backend, state, seqs, paged, next(tiles(paged, 99)))
    assert_same_bits(*zip(first, backend.read(state), strict=True))


def test_like_takes_its_sizes_from_the_arrays(backend):
    state = backend.like(np.zeros((2, 8, 64), np.uint16), np.zeros((9, 16, 4, 32), np.uint16))
    assert tuple(state.o.shape) == (2, 8, 32)


def test_lse_is_m_plus_log_l(backend):
    state = backend.AttentionState(1, 2, 4)
    backend.write(state, [[2.0, -np.inf]], [[3.0, 0.0]], np.ones((1, 2, 4)))
    np.testing.assert_allclose(backend.lse(state), [[2 + np.log(3), -np.inf]], rtol=1e-6)


def test_twins_keep_float32_views_of_one_buffer(twin):
    state = twin.AttentionState(2, 3, 5)
    assert state.device == twin.name
    assert state.buffer.shape == (2 * 3 * (5 + 2),)
    twin.write(state, np.full((2, 3), 1), np.full((2, 3), 2), np.full((2, 3, 5), 3))
    m, l, o = twin.read(state)
    assert m.dtype == l.dtype == o.dtype == np.float32
    if twin.name == "cpu":
        flat = np.concatenate([m.ravel(), l.ravel(), o.ravel()])
        assert state.buffer.flags.c_contiguous
        assert_same_bits((state.buffer, flat))


def test_a_state_travels_as_its_buffer(cpu):
    """Half of the tokens are absorbed elsewhere; one message brings their state."""
    seqs = draw((40, 9))
    here, there = (
        absorb(cpu, part, place(part, 4)) for part in (seqs.tokens(0, 20), seqs.tokens(20, 40))
    )
    message = there.buffer.tobytes()
    arrived = AttentionState(*seqs.q.shape)
    arrived.buffer[:] = np.frombuffer(message, np.float32)
    cpu.merge(here, arrived)
    check_state(seqs, cpu.read(here))


def test_a_call_works_in_the_state_that_is_given(backend):
    seqs = draw((30, 4), num_kv_heads=1, gqa=2, head_dim=8)
    paged = place(seqs, 16)
    state = backend.AttentionState(*seqs.q.shape)
    backend.write(state, *(np.full(part.shape, 3.0) for part in backend.read(state)))
    out, lse = backend.paged_attention(seqs.q, *paged, state=state, return_lse=True)
    expected, expected_lse = backend.paged_attention(seqs.q, *paged, return_lse=True)
    again, again_lse = backend.finalize(state, return_lse=True)
    assert_same_bits((out, expected), (again, expected))
    assert_same_bits((lse, expected_lse), (again_lse, expected_lse))
    if backend.name != "cuda":  # there, a kernel takes the logarithm, and NumPy that of state.lse
        assert_same_bits((backend.lse(state), expected_lse))


def test_in_place_functions_return_none(backend):
    seqs = draw((9,))
    paged = place(seqs, 4)
    state = backend.like(seqs.q, paged.v_pool)
    args = (paged.block_tables, np.array([2]))
    assert backend.step_tile(state, seqs.q, *paged[:2], *args) is None
    assert backend.merge(state, backend.like(seqs.q, paged.v_pool)) is None


def test_counts_mean_full_blocks_by_default(backend):
    seqs = draw((8,))
    paged = place(seqs, 4)
    a, b = (backend.like(seqs.q, paged.v_pool) for _ in "ab")
    backend.step_tile(a, seqs.q, *paged[:2], paged.block_tables, np.array([2]))
    step(backend, b, seqs, paged, Tile(paged.block_tables, np.array([2]), np.array([8])))
    assert_same_bits(*zip(backend.read(a), backend.read(b), strict=True))


def test_repr_names_sizes_and_device():
    assert repr(AttentionState(2, 3, 5)) == (
        "AttentionState(num_seqs=2, num_q_heads=3, head_dim=5, device='cpu')"
    )


@pytest.mark.parametrize("num_seqs", [0, 1])
def test_no_sequences_are_a_state_too(backend, num_seqs):
    state = backend.AttentionState(num_seqs, 2, 4)
    assert backend.finalize(state).shape == (num_seqs, 2, 4)
    assert backend.lse(state).shape == (num_seqs, 2)


def pickled(state):
    return pickle.loads(pickle.dumps(state))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_is_a_state_of_its_own(copied):
    state = AttentionState(2, 3, 4)
    state.buffer[:] = np.arange(state.buffer.size)
    twin = copied(state)
    assert_same_bits((twin.m, state.m), (twin.l, state.l), (twin.o, state.o))
    for part in (twin.m, twin.l, twin.o):
        assert np.shares_memory(part, twin.buffer)
        assert not np.shares_memory(part, state.buffer)
    twin.reset()
    assert (twin.m == -np.inf).all()
    assert (twin.l == 0).all()
    assert state.l[1, 2] == 11


@pytest.mark.parametrize("name", ["m", "l", "o", "buffer"])
def test_the_arrays_of_a_state_stay(name):
    """Kernels trust their shapes; what is in them may change."""
    with pytest.raises(AttributeError):
        setattr(AttentionState(2, 3, 4), name, np.zeros(1, np.float32))
