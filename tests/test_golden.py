"""Answers of an independent per-token implementation (tests/golden/README.md), tile by tile."""

import pathlib
from typing import NamedTuple

import numpy as np
import pytest
from _bound import half_ulp, normalise
from _cases import BFLOAT16

GOLDEN = sorted((pathlib.Path(__file__).parent / "golden").glob("*.npz"))


class Golden(NamedTuple):
    q: np.ndarray
    k_pool: np.ndarray
    v_pool: np.ndarray
    tile_blocks: np.ndarray
    tile_block_counts: np.ndarray
    m: np.ndarray
    l: np.ndarray
    o: np.ndarray
    out: np.ndarray

    def tiny(self):
        """Keep the first head and some 40 tokens; `out` goes with the cut."""
        heads = slice(1)
        num_tiles = max(1, 40 // (self.k_pool.shape[1] * self.tile_blocks.shape[2]))
        whole = num_tiles >= len(self.m)
        return Golden(
            self.q[:, heads],
            self.k_pool[:, :, :1],
            self.v_pool[:, :, :1],
            self.tile_blocks[:num_tiles],
            self.tile_block_counts[:num_tiles],
            self.m[:num_tiles, :, heads],
            self.l[:num_tiles, :, heads],
            self.o[:num_tiles, :, heads],
            self.out[:, heads] if whole else self.out[:0],
        )


def load(path, backend):
    with np.load(path) as arrays:
        golden = Golden(**arrays)
    return golden.tiny() if backend.tiny else golden


def row_magnitude(values):
    return np.abs(values).max(axis=-1, keepdims=True)


def check_tile(state_arrays, golden, tile, tolerance):
    ours = normalise(state_arrays)
    theirs = normalise((golden.m[tile], golden.l[tile], golden.o[tile]))
    empty = golden.l[tile] == 0
    assert (ours.lse[empty] == -np.inf).all()
    assert (ours.out[empty] == 0).all()
    lse = theirs.lse[~empty]
    assert (np.abs(ours.lse[~empty] - lse) <= 2e-6 * np.abs(lse)).all()
    assert (np.abs(ours.out - theirs.out) <= tolerance * row_magnitude(theirs.out)).all()


def check_out(bits, golden_bits):
    assert (bits == golden_bits).mean() >= 0.998
    ours, theirs = (x.view(BFLOAT16).astype(np.float64) for x in (bits, golden_bits))
    ulp = 2 * half_ulp(theirs)
    assert (np.abs(ours - theirs) <= ulp + 1e-5 * row_magnitude(theirs)).all()


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_state_after_every_tile(backend, path):
    golden = load(path, backend)
    tolerance = 2e-5 if path.stem == "large_logits" else 5e-6
    state = backend.like(golden.q, golden.v_pool)
    for tile, (blocks, counts) in enumerate(
        zip(golden.tile_blocks, golden.tile_block_counts, strict=True)
    ):
        backend.step_tile(state, golden.q, golden.k_pool, golden.v_pool, blocks, counts)
        check_tile(backend.read(state), golden, tile, tolerance)
    out, lse = backend.finalize(state, dtype=np.uint16, return_lse=True)
    if len(golden.out):
        check_out(out, golden.out)
    np.testing.assert_allclose(
        lse, normalise((golden.m[-1], golden.l[-1], golden.o[-1])).lse, rtol=2e-6
    )


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_one_call(backend, path):
    golden = load(path, backend)
    tables, lens = whole_tables(golden)
    out, lse = backend.paged_attention(
        golden.q, golden.k_pool, golden.v_pool, tables, lens, return_lse=True
    )
    last = normalise((golden.m[-1], golden.l[-1], golden.o[-1]))
    np.testing.assert_allclose(lse, last.lse, rtol=2e-6)
    if len(golden.out):
        check_out(out, golden.out)


def whole_tables(golden):
    """Join the tiles' valid entries into one table a row."""
    rows = [
        np.concatenate([b[s, : c[s]] for b, c in zip(*golden[3:5], strict=True)])
        for s in range(len(golden.q))
    ]
    tables = np.full((len(rows), max(map(len, rows))), -1, np.int32)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row)] = row
    return tables, np.array([len(row) for row in rows]) * golden.k_pool.shape[1]


def test_all_ten_files_are_here():
    assert len(GOLDEN) == 10
