"""Where a row of the CUDA twin is: its sequence, the keys that it attends to, their scales.

Small arrays come as their addresses and strides in bytes, so that a launch costs no more for those
that are not there: their address is 0.
"""

from typing import NamedTuple

from .. import _arrays, _plan_cuda
from ._jit import cuda_function, shared
from .recurrence import ONE
from .warp import divide, load_float32, load_int32

SPLIT = _plan_cuda.SPLIT_TOKENS


class Places(NamedTuple):
    """Where arrays are: an offset in elements, or an address, and the strides."""

    q: tuple[int, int, int, int]  # of sequences, queries, heads
    k: tuple[int, int, int, int, int]
    v: tuple[int, int, int, int, int]
    table: tuple[int, int, int]
    k_scale: tuple[int, int, int, int]  # in bytes, and so are those below
    v_scale: tuple[int, int, int, int]
    slopes: tuple[int, int]


class Lists(NamedTuple):
    """Lists of int32, one number for each sequence: (address, stride)."""

    token_counts: tuple[int, int]
    starts: tuple[int, int]
    seq_lens: tuple[int, int]
    seq_starts: tuple[int, int]
    query_starts: tuple[int, int]


class Sizes(NamedTuple):
    """What is the same for all rows."""

    num_rows: int
    num_q_heads: int
    gqa: int
    block_size: int
    num_seqs: int
    queries: int  # of each sequence; 1 where they differ
    sliding_window: int
    causal: int


def of_pool(pool, flat):
    """Describe the rows of a pool, of which `flat` is the flattened view."""
    itemsize = pool.dtype.itemsize
    strides = tuple(itemsize * stride for stride in flat.strides[:3])
    return _plan_cuda.Rows(_arrays.address(pool), strides, pool.shape[3], itemsize)


def by_query(place):
    """Return offset and strides by sequence, query and head of q or out, which may lack queries."""
    offset, rows, *queries, heads, _ = place
    return offset, rows, *(queries or (0,)), heads


def locate(array, axes):
    """Return address and byte strides of an array of 4-byte numbers; zeros where there is none.

    Of several axes it may have the last only; the others get stride 0.
    """
    if array is None:
        return (0,) * (1 + axes)
    strides = _plan_cuda.span(array.shape, array.strides, 4).strides
    missing = (0,) * (axes - len(strides))
    return _arrays.address(array), *missing, *(4 * stride for stride in strides)


@shared
def key_range(count, seq_start, seq_len, query, sliding_window, causal):
    """Return the keys that a query attends to, and from where its splits are counted.

    Parameters
    ----------
    count : int
        Tokens of the sequence in this tile; all below are counted from the first of them.
    seq_start, seq_len, query : int
        The sequence's first key and its end, and where the query stands.
    sliding_window, causal : int

    Returns
    -------
    begin, end, origin : int
        In 0..count; begin = end where the query attends to no key of the tile.
    """
    origin = min(max(seq_start, 0), count)
    begin, end = seq_start, min(seq_len, count)
    if sliding_window > 0:
        begin = max(begin, query - sliding_window + 1)
    if causal:
        end = min(end, query + 1)
    begin = min(max(begin, 0), count)
    return begin, max(begin, end), origin


@cuda_function
def offset(where, row, queries, head):
    """Return where a row and head of q or out begin: by sequence, query and head."""
    seq = divide(row, queries)
    return where[0] + seq * where[1] + (row - seq * queries) * where[2] + head * where[3]


@cuda_function
def find(row, lists, sizes):
    """Return the sequence of a row, its `key_range`, and where its query stands in the tile."""
    counts, starts, lens, firsts, query_starts = lists
    seq, queries = divide(row, sizes.queries), sizes.queries
    first_row = seq * queries
    if query_starts[0]:
        seq = _last_at_most(row, query_starts, sizes.num_seqs)
        first_row = load_int32(query_starts[0] + seq * query_starts[1], 0)
        queries = load_int32(query_starts[0] + (seq + 1) * query_starts[1], 0) - first_row
    count = load_int32(counts[0] + seq * counts[1], 0)
    if row < first_row or row >= first_row + queries:
        count = 0  # of no sequence
    start = load_int32(starts[0] + seq * starts[1], 0)
    seq_len = load_int32(lens[0] + seq * lens[1], start + count) - start
    seq_start = load_int32(firsts[0] + seq * firsts[1], 0) - start
    query = seq_len - queries + row - first_row
    begin, end, origin = key_range(
        count, seq_start, seq_len, query, sizes.sliding_window, sizes.causal
    )
    return seq, begin, end, origin, query


@cuda_function
def splits_of(begin, end, origin, skip, most):
    """Return the first split of a range after `skip` of them, and how many: at most so many."""
    first = divide(begin - origin, SPLIT)
    count = divide(end - origin + SPLIT - 1, SPLIT) - first if end > begin else 0
    return first + skip, min(max(count - skip, 0), most)


@cuda_function
def _last_at_most(x, place, count):
    """Return the last i in 0..count - 1 whose number is at most x, in an ascending list; or 0."""
    low, high = 0, count - 1
    while low < high:
        middle = (low + high + 1) >> 1
        if load_int32(place[0] + middle * place[1], 0) <= x:
            low = middle
        else:
            high = middle - 1
    return low


@cuda_function
def scale(place, block, slot, head):
    """Return the scale of a token and head, or 1 where there are no scales."""
    return load_float32(place[0] + block * place[1] + slot * place[2] + head * place[3], ONE)
