"""Merge is a commutative monoid: (-inf, 0, 0) is its identity, and order and grouping are free."""

import numpy as np
import pytest
from _bound import assert_same_bits, check_close, check_state, normalise
from _cases import absorb, draw, place


def parts_of(backend, seqs, cuts):
    """Attend to consecutive pieces of a batch, one state each."""
    edges = [0, *cuts, max(seqs.lens)]
    pieces = [seqs.tokens(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    return [absorb(backend, piece, place(piece, 4)) for piece in pieces]


def assert_same_state(backend, a, b):
    assert_same_bits(*zip(backend.read(a), backend.read(b), strict=True))


def signed_zeros(backend):
    """Make a state in which a zero's sign would be lost by arithmetic."""
    state = backend.AttentionState(2, 3, 5)
    o = np.full((2, 3, 5), -0.0)
    o[..., 1::2] = 0.5
    backend.write(state, np.full((2, 3), 2.5), np.ones((2, 3)), o)
    return state


def test_empty_with_empty_is_empty(backend):
    a, b = (backend.AttentionState(2, 3, 5) for _ in "ab")
    backend.merge(a, b)
    assert_same_state(backend, a, b)
    m, l, o = backend.read(a)
    assert (m == -np.inf).all()
    assert (l == 0).all()
    assert (o == 0).all()


def test_empty_is_the_identity_on_both_sides(backend):
    x = signed_zeros(backend)
    left, right = backend.AttentionState(2, 3, 5), backend.copy(x)
    backend.merge(left, x)
    backend.merge(right, backend.AttentionState(2, 3, 5))
    assert_same_state(backend, left, x)
    assert_same_state(backend, right, x)


def test_what_an_empty_state_holds_in_o_does_not_matter(backend):
    x, dirt = signed_zeros(backend), backend.AttentionState(2, 3, 5)
    backend.write(dirt, np.full((2, 3), -np.inf), np.zeros((2, 3)), np.full((2, 3, 5), np.nan))
    merged = backend.copy(x)
    backend.merge(merged, dirt)
    assert_same_state(backend, merged, x)
    backend.merge(dirt, x)
    assert_same_state(backend, dirt, x)


def test_other_is_left_as_it_is(backend):
    seqs = draw((9,))
    a, b = parts_of(backend, seqs, [4])
    before = backend.read(b)
    backend.merge(a, b)
    assert_same_bits(*zip(before, backend.read(b), strict=True))


def test_commutative(backend):
    seqs = draw(backend.size((90, 50, 3), (9, 3)))
    a, b = parts_of(backend, seqs, [backend.size(41, 4)])
    ab, ba = backend.copy(a), backend.copy(b)
    backend.merge(ab, b)
    backend.merge(ba, a)
    check_close(seqs, normalise(backend.read(ab)), normalise(backend.read(ba)))
    check_state(seqs, backend.read(ab))


def test_associative(backend):
    seqs = draw(backend.size((90, 50, 3), (9, 3)))
    a, b, c = parts_of(backend, seqs, backend.size([20, 60], [2, 6]))
    left, bc = backend.copy(a), backend.copy(b)
    backend.merge(left, b)
    backend.merge(left, c)
    backend.merge(bc, c)
    right = backend.copy(a)
    backend.merge(right, bc)
    check_close(seqs, normalise(backend.read(left)), normalise(backend.read(right)))
    check_state(seqs, backend.read(left))


def test_far_apart_maxima(backend):
    """The smaller side vanishes without a NaN, in both orders."""
    near, far = backend.AttentionState(1, 1, 2), backend.AttentionState(1, 1, 2)
    backend.write(near, [[3000.0]], [[2.0]], [[[4.0, -4.0]]])
    backend.write(far, [[-3000.0]], [[5.0]], [[[1.0, 1.0]]])
    for a, b in ((near, far), (far, near)):
        both = backend.copy(a)
        backend.merge(both, b)
        assert_same_state(backend, both, near)


def test_64_parts_are_as_good_as_one(backend):
    seqs = draw(backend.size((640,), (32,)), num_kv_heads=1)
    step = max(seqs.lens) // backend.size(64, 8)
    state, *rest = parts_of(backend, seqs, range(step, max(seqs.lens), step))
    for part in rest:
        backend.merge(state, part)
    check_state(seqs, backend.read(state))


def test_lse_is_in_natural_logarithms(backend):
    seqs = draw((5,), num_kv_heads=1)
    seqs = seqs.map(lambda q, _, __: q.fill(0))
    state = absorb(backend, seqs, place(seqs, 4))
    expected = np.full((1, 2), np.log(5.0))
    np.testing.assert_allclose(backend.lse(state), expected, rtol=1e-6)
    np.testing.assert_allclose(backend.finalize(state, return_lse=True)[1], expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "uint16"])
def test_finalize_leaves_the_state_as_it_is(backend, dtype):
    seqs = draw((9, 0))
    state = absorb(backend, seqs, place(seqs, 4))
    before = backend.read(state)
    first = backend.finalize(state, dtype=dtype)
    second = backend.finalize(state, dtype=dtype)
    assert first.dtype == dtype
    assert_same_bits((first, second), *zip(before, backend.read(state), strict=True))
