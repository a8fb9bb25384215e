"""`flash_attn_with_kvcache` against a dense softmax in float64, over its library's options."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from _dense import attend

from numba_attn.compat import flash_attn_with_kvcache

PAGES = [1, 5, 8, 16, 128, 256, None]
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)


class Caches:
    """Sequences of tokens, in pages or in rows, and queries at their ends."""

    def __init__(self, page, lens, *, sq=1, heads=(4, 1), d=32, dtype=np.float32, new=0, seed=0):
        rng = np.random.default_rng(seed)
        self.lens, self.sq, self.new = np.array(lens, np.int32), sq, new
        total = [n + new for n in lens]

        def draw(*shape):
            return rng.standard_normal(shape).astype(dtype)

        self.q = draw(len(lens), sq, heads[0], d)
        self.k, self.v = ([draw(n, heads[1], d) for n in total] for _ in range(2))
        size = page or max(total) + 3
        columns = max(-(-n // size) for n in total) + 1
        blocks = rng.permutation(len(lens) * columns + 2)[: len(lens) * columns]
        self.tables = blocks.reshape(len(lens), columns).astype(np.int32)
        if page is None:
            self.tables = np.arange(len(lens), dtype=np.int32)[:, None]
        shape = (len(lens) * columns + 2 if page else len(lens), size, heads[1], d)
        self.caches = [np.full(shape, np.nan, dtype) for _ in range(2)]
        for cache, tokens in zip(self.caches, (self.k, self.v), strict=True):
            for s, n in enumerate(lens):
                for t in range(n):
                    cache[self.tables[s, t // size], t % size] = tokens[s][t]
        self.where = {"block_table": self.tables} if page else {}
        if new:
            for name, tokens in (("k", self.k), ("v", self.v)):
                self.where[name] = np.stack([x[-new:] for x in tokens])

    def call(self, **options):
        options = self.where | {"cache_seqlens": self.lens} | options
        return flash_attn_with_kvcache(self.q, *self.caches, return_softmax_lse=True, **options)

    def expected(self, *, causal=False, window_size=(-1, -1), leftpad=None, **options):
        """Return out and lse, by FlashAttention's rule: bottom right, both ends of the window."""
        left, right = window_size
        right = 0 if causal else right
        outs, lses = [], []
        for s, i in itertools.product(range(len(self.lens)), range(self.sq)):
            keys = np.arange(len(self.k[s]))
            position = len(keys) - self.sq + i
            seen = np.ones(len(keys), bool) if left < 0 else keys >= position - left
            seen &= right < 0 or keys <= position + right
            seen &= keys >= (0 if leftpad is None else leftpad[s])
            out, lse = attend(
                self.q[s, i], self.k[s], self.v[s], position=position, keys=seen, **options
            )
            outs.append(out)
            lses.append(lse)
        lse = np.reshape(lses, (len(self.lens), self.sq, -1))
        return np.reshape(outs, self.q.shape), lse.swapaxes(1, 2)

    def check(self, given, **rule):
        out, lse = self.call(**given)
        expected_out, expected_lse = self.expected(**rule)
        assert out.dtype == self.q.dtype
        assert lse.dtype == np.float32
        tolerance = 1e-2 if self.q.dtype == ml_dtypes.bfloat16 else 2e-5
        np.testing.assert_allclose(np.asarray(out, np.float64), expected_out, tolerance, tolerance)
        np.testing.assert_allclose(lse, expected_lse, 2e-5, 2e-5)


@pytest.mark.parametrize("page", PAGES)
def test_pages(page):
    Caches(page, [300, 0, 1, 17]).check({})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sq", [1, 3])
@pytest.mark.parametrize("page", [5, None])
def test_causal_is_bottom_right(page, sq, causal):
    Caches(page, [40, 3, 17], sq=sq).check({"causal": causal}, causal=causal)


@pytest.mark.parametrize("window", [(0, 0), (7, 0), (7, -1), (1000, 0), (-1, 0), (7, 2), (-1, 5)])
@pytest.mark.parametrize("sq", [1, 3])
def test_window(sq, window):
    Caches(16, [40, 3, 17], sq=sq).check({"window_size": window}, window_size=window)


def test_window_and_causal():
    Caches(16, [40, 33], sq=3).check(
        {"window_size": (9, 4), "causal": True}, window_size=(9, 0), causal=True
    )


@pytest.mark.parametrize("softcap", [0.0, 1.5, 30.0])
def test_softcap(softcap):
    Caches(8, [40, 17]).check({"softcap": softcap}, softcap=softcap)


@pytest.mark.parametrize("sq", [1, 3])
def test_alibi(sq):
    given = {"alibi_slopes": SLOPES, "causal": True}
    Caches(8, [40, 17], sq=sq).check(given, slopes=SLOPES, causal=True)


def test_alibi_of_one_sequence():
    Caches(8, [40]).check({"alibi_slopes": SLOPES[None]}, slopes=SLOPES)


def test_scale():
    Caches(8, [40]).check({"softmax_scale": 0.3}, scale=0.3)


@pytest.mark.parametrize("page", [8, None])
def test_leftpad(page):
    leftpad = np.array([3, 0, 17], np.int32)
    Caches(page, [40, 9, 30]).check({"cache_leftpad": leftpad}, leftpad=leftpad)


def test_a_length_for_all():
    Caches(None, [12, 12]).check({"cache_seqlens": 12})


def test_a_full_cache_by_default():
    given = Caches(None, [12, 12])
    given.caches = [np.ascontiguousarray(cache[:, :12]) for cache in given.caches]
    given.check({"cache_seqlens": None})


def test_rows_of_the_cache():
    given = Caches(None, [12, 5, 9])
    rows = np.array([2, 0, 4], np.int32)
    caches = [np.full((5, *cache.shape[1:]), np.nan, cache.dtype) for cache in given.caches]
    for cache, old in zip(caches, given.caches, strict=True):
        cache[rows] = old
    given.caches = caches
    given.check({"cache_batch_idx": rows})


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(("new", "sq"), [(1, 1), (3, 3), (4, 1)])
def test_new_tokens_are_appended_first(page, new, sq):
    given = Caches(page, [14, 0, 7], new=new, sq=sq)
    given.check({"causal": True}, causal=True)
    size = given.caches[0].shape[1]
    for cache, tokens in zip(given.caches, (given.k, given.v), strict=True):
        for s, length in enumerate(given.lens):
            for t in range(length + new):
                np.testing.assert_array_equal(
                    cache[given.tables[s, t // size], t % size], tokens[s][t]
                )
    assert np.isnan(given.caches[0]).sum() == given.caches[0].size - sum(map(np.size, given.k))


def test_bfloat16():
    Caches(16, [300, 17], dtype=ml_dtypes.bfloat16).check({})


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(4, 4), (6, 3), (4, 1)])
@pytest.mark.parametrize("d", [32, 40, 59, 64, 96, 111, 128, 160, 192, 224, 256])
def test_sizes(d, heads):
    for page, causal in itertools.product(PAGES, (False, True)):
        given = Caches(
            page, [300, 0, 17], d=d, heads=heads, sq=1 + causal, dtype=ml_dtypes.bfloat16
        )
        given.check({"causal": causal}, causal=causal)


@pytest.mark.parametrize("page", [8, None])
def test_no_room_for_new_tokens(page):
    given = Caches(page, [5, 4], new=2)
    capacity = given.tables.shape[1] * given.caches[0].shape[1]
    before = [cache.copy() for cache in given.caches]
    with pytest.raises(ValueError, match=f"cache_seqlens.*capacity {capacity}"):
        given.call(cache_seqlens=np.array([5, capacity - 1]))
    for cache, old in zip(given.caches, before, strict=True):
        np.testing.assert_array_equal(cache, old)


@pytest.mark.parametrize("page", [8, None])
def test_new_tokens_of_two_sequences_in_one_place(page):
    given = Caches(page, [12, 12], new=2)
    same = {"block_table": given.tables[[0, 0]]} if page else {"cache_batch_idx": np.array([1, 1])}
    with pytest.raises(ValueError, match="cache_batch_idx or block_table: two new tokens"):
        given.call(**same)


WRONG = [
    ({"rotary_cos": SLOPES}, ValueError, "rotary_cos: no rotation is applied here"),
    ({"rotary_sin": SLOPES}, ValueError, "rotary_sin: no rotation"),
    ({"window_size": 3}, TypeError, "window_size: expected"),
    ({"window_size": (3, 1)}, ValueError, "window_size: to the right it must be 0, -1 or at least"),
    ({"window_size": (1.5, 0)}, TypeError, "window_size: expected an integer"),
    ({"softcap": "no"}, TypeError, "softcap: expected a real number"),
    ({"causal": 1}, TypeError, "causal: expected True or False"),
    ({"alibi_slopes": SLOPES}, ValueError, "alibi_slopes: sq = 3"),
    ({"alibi_slopes": np.stack([SLOPES] * 2)}, ValueError, "alibi_slopes: one set of slopes"),
    ({"alibi_slopes": SLOPES[:2], "causal": True}, ValueError, "alibi_slopes"),
    ({"softmax_scale": "x"}, TypeError, "softmax_scale"),
    ({"cache_batch_idx": np.array([0, 1])}, ValueError, "cache_batch_idx: caches with block_table"),
    ({"block_table": np.zeros((3, 9), np.int32)}, ValueError, "block_table"),
    ({"block_table": np.full((2, 9), 99)}, ValueError, "block_table"),
    ({"cache_seqlens": np.array([400, 1])}, ValueError, "cache_seqlens"),
    ({"cache_seqlens": np.array([1.0, 1.0])}, TypeError, "cache_seqlens"),
    ({"cache_leftpad": np.array([-1, 1])}, ValueError, "cache_leftpad"),
    ({"k": None}, ValueError, "k: new tokens need k, v and cache_seqlens"),
    ({"cache_seqlens": None}, ValueError, "cache_seqlens: new tokens need"),
    ({"v": np.zeros((2, 4, 1, 32), np.float32)}, ValueError, "v: its first two axes"),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG, ids=lambda x: str(x)[:30])
def test_what_is_not_taken(change, error, message):
    """The new tokens that may have been written are taken back."""
    given = Caches(8, [30, 9], new=3, sq=3)
    before = [cache.copy() for cache in given.caches]
    with pytest.raises(error, match=message):
        given.call(**change)
    for cache, old in zip(given.caches, before, strict=True):
        np.testing.assert_array_equal(cache, old)


def test_no_rows_for_the_sequences():
    given = Caches(None, [12, 5])
    given.caches = [cache[:1] for cache in given.caches]
    with pytest.raises(ValueError, match="k_cache: must have a row for each"):
        given.call()
