"""What any right implementation passes, as functions of a backend.

`test_twins.py` runs them on every implementation, `test_mutants.py` on faulty ones.
"""

import numpy as np
from _bound import assert_same_bits, check_answer, check_state
from _cases import absorb, attend, draw, finish, place, tiles


def check_attention(backend, seqs, block_size, blocks_per_tile=3):
    """Check one call, and the same tile by tile, against the bound."""
    paged = place(seqs, block_size)
    if not backend.tiny:  # the tiles take long enough there
        check_answer(seqs, attend(backend, seqs, paged))
    state = absorb(backend, seqs, paged, tiles(paged, blocks_per_tile))
    check_state(seqs, backend.read(state))
    check_answer(seqs, finish(backend, seqs, state))


def ragged(backend):
    seqs = draw(backend.size((70, 0, 1, 16, 530), (20, 0)), num_kv_heads=2)
    check_attention(backend, seqs, 16)


def full_blocks(backend):
    seqs = draw(backend.size((64, 32), (16, 8)), seed=1)
    check_attention(backend, seqs, 8)


def growing_logits(backend):
    """Each token outweighs those before it: the maximum moves all the time, by thousands."""

    def grow(q, keys, values):
        for k in keys:
            k *= np.linspace(1, 60, len(k)).astype(k.dtype)[:, None, None]
        q *= q.dtype.type(40)

    seqs = draw(backend.size((90, 33), (20,)), num_kv_heads=1).map(grow)
    check_attention(backend, seqs, 16, blocks_per_tile=1)


def logits_far_below_0(backend):
    def far(q, keys, values):
        q.fill(64)
        for k in keys:
            k[:] -= k.dtype.type(64)

    seqs = draw((20, 3), head_dim=128, num_kv_heads=1).map(far)
    check_attention(backend, seqs, 8)


def a_nan_logit(backend):
    def spoil(q, keys, values):
        keys[0][3, 0, 0] = np.nan

    check_attention(backend, draw((20, 3)).map(spoil), 8)


def an_empty_side(backend):
    """Merge with an empty state copies the other side: a zero's sign shows the difference."""
    x = backend.AttentionState(1, 2, 5)
    o = np.full((1, 2, 5), -0.0)
    o[..., 1::2] = 0.5
    backend.write(x, np.full((1, 2), 2.5), np.ones((1, 2)), o)
    left, right = backend.AttentionState(1, 2, 5), backend.copy(x)
    backend.merge(left, x)
    backend.merge(right, backend.AttentionState(1, 2, 5))
    for merged in (left, right):
        assert_same_bits(*zip(backend.read(merged), backend.read(x), strict=True))


def a_window_for_each_query(backend):
    lens = backend.size((70, 5, 2), (14, 2))
    seqs = draw(lens, num_kv_heads=1, queries=3, sliding_window=6)
    check_attention(backend, seqs, 4, blocks_per_tile=2)


def queries_that_see_all_keys(backend):
    seqs = draw((9, 3), num_kv_heads=1, queries=(2, 1), causal=False)
    check_attention(backend, seqs, 4, blocks_per_tile=2)


def a_start(backend):
    lens, starts = backend.size(((70, 33, 5), (30, 33, 0)), ((14, 5), (9, 5)))
    seqs = draw(lens, num_kv_heads=1, starts=starts, alibi_slopes=(0.5, 0.1))
    check_attention(backend, seqs, 4, blocks_per_tile=2)


def sinks(backend):
    seqs = draw(backend.size((70, 3), (9, 3)), num_kv_heads=1, sinks=(4.0, -1.0))
    check_attention(backend, seqs, 4, blocks_per_tile=1)
    check_answer(seqs, attend(backend, seqs, place(seqs, 4)))


def a_softcap(backend):
    seqs = draw((20, 3), num_kv_heads=1, softcap=1.0, sliding_window=5, k_scale=3.0)
    check_attention(backend, seqs, 4, blocks_per_tile=2)


def a_bias(backend):
    seqs = draw((20, 3), num_kv_heads=1, alibi_slopes=(0.5, 0.1), queries=2)
    check_attention(backend, seqs, 4, blocks_per_tile=2)


def pool_scales(backend):
    sizes = {"num_kv_heads": 2, "gqa": backend.size(2, 1)}
    seqs = draw((9, 3), k_scale=(0.5, 2.0), v_scale=(3.0, 0.1), **sizes)
    check_attention(backend, seqs, 4)


def every_option(backend):
    lens, starts, queries = backend.size(
        ((70, 33, 530), (30, 0, 3), (3, 0, 2)), ((9, 5), (3, 0), (2, 1))
    )
    options = {"softcap": 20.0, "alibi_slopes": (0.3, 0.02), "sinks": (1.0, 2.0)}
    options |= {"starts": starts, "queries": queries, "sliding_window": 12, "token_scales": True}
    check_attention(backend, draw(lens, num_kv_heads=1, scale=0.3, **options), 4)


CHECKS = (
    ragged,
    full_blocks,
    growing_logits,
    logits_far_below_0,
    a_nan_logit,
    an_empty_side,
    a_window_for_each_query,
    queries_that_see_all_keys,
    a_start,
    sinks,
    a_softcap,
    a_bias,
    pool_scales,
    every_option,
)


def failures(backend):
    """Name the checks that a backend fails."""
    failed = []
    for check in CHECKS:
        try:
            check(backend)
        except AssertionError:
            failed.append(check.__name__)
    return failed
