"""Every head_dim D, ratio G and block size B of the supported range, in pairs."""

import _cases
import pytest
from _checks import check_attention

GQA_RATIOS = (1, 3, 5, 7, 8, 16, 71)
HEAD_DIMS = (1, 8, 20, 40, 64, 80, 96, 112, 128, 192, 256)
BLOCK_SIZES = (1, 3, 5, 8, 16, 17, 64, 256)

# Each value once; G = 71 and G = 16 where the simulator can afford it.
ONCE = (
    (71, 1, 16),
    (16, 8, 1),
    (3, 20, 3),
    (5, 40, 5),
    (7, 64, 8),
    (8, 80, 17),
    (3, 96, 64),
    (1, 112, 256),
    (3, 128, 16),
    (5, 192, 1),
    (1, 256, 3),
)
EXTREMES = tuple((g, d, b) for g in (1, 71) for d in (1, 256) for b in (1, 256))
# For a fixed D the ratio runs through all of G as B does, and for a fixed B as D does.
PAIRS = tuple(
    (GQA_RATIOS[(i + j) % len(GQA_RATIOS)], d, b)
    for i, d in enumerate(HEAD_DIMS)
    for j, b in enumerate(BLOCK_SIZES)
)


@pytest.mark.parametrize(("gqa", "head_dim", "block_size"), ONCE)
def test_each_size_once(backend, gqa, head_dim, block_size):
    num_kv_heads = backend.size(2, 1)
    lens = backend.size((37, 0, 1, 530), (5,) if gqa > 3 else (19,))
    seqs = _cases.draw(lens, gqa=gqa, num_kv_heads=num_kv_heads, head_dim=head_dim)
    check_attention(backend, seqs, block_size)


@pytest.mark.parametrize(("gqa", "head_dim", "block_size"), EXTREMES)
def test_extremes(cpu, gqa, head_dim, block_size):
    seqs = _cases.draw((259, 1), gqa=gqa, num_kv_heads=1, head_dim=head_dim)
    check_attention(cpu, seqs, block_size)


@pytest.mark.slow
@pytest.mark.parametrize(("gqa", "head_dim", "block_size"), PAIRS)
def test_every_pair(cpu, gqa, head_dim, block_size):
    seqs = _cases.draw((70, 19), gqa=gqa, head_dim=head_dim, seed=block_size)
    check_attention(cpu, seqs, block_size)


def test_the_cover_covers():
    axes = (set(GQA_RATIOS), set(HEAD_DIMS), set(BLOCK_SIZES))
    assert [set(values) for values in zip(*ONCE, strict=True)] == list(axes)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert len({(row[a], row[b]) for row in PAIRS}) == len(axes[a]) * len(axes[b])


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(32, 48), (192, 128), (1, 20)])
def test_values_of_another_head_dim(backend, head_dim, v_head_dim):
    lens = backend.size((40, 0, 600), (11,))
    seqs = _cases.draw(lens, head_dim=head_dim, v_head_dim=v_head_dim, num_kv_heads=1)
    check_attention(backend, seqs, 8)


@pytest.mark.parametrize("scale", [1e-3, 0.3, 4.0])
def test_scale(backend, scale):
    seqs = _cases.draw(backend.size((70, 9), (9,)), scale=scale)
    check_attention(backend, seqs, 4)
