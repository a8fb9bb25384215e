"""The kernels of a step, `simple` and `split`, around one and the same recurrence of a split.

`simple`: a block for each query token and query head; it walks the splits of its row and folds
each into the state.

`split`: a block for each split and kv head, so that all of its query heads share what is loaded;
it leaves partial states, which `merge_splits` folds, in order. Which splits there are is a list
that `list_items` makes on the device. There may be more items than blocks: a block takes every
`gridDim`-th.

An item's partial state, and how it is folded, are the same for both, and so are the bits.
"""

import functools
from typing import NamedTuple

import numpy as np

from .. import _plan
from . import rows_cuda, warp
from ._jit import cuda_kernel
from .attend_cuda import SPLIT, Row, allocating, attending
from .state_cuda import fold
from .warp import WARP, cuda

ITEM = 5  # numbers of an item: row, sequence, first token, tokens, place of the query


class Jobs(NamedTuple):
    """How the work of `split` is counted: an item for a split, a job for some of its heads."""

    groups: int  # of the query heads of a kv head, each of as many heads as a block has
    of_item: int  # groups of all kv heads
    pairs: int  # room in the partial states: items * query heads


@functools.cache
def simple(variant):
    """Compile the kernel `simple` for a `_plan_cuda.StepVariant`."""
    allocate, attend = allocating(variant), attending(variant)
    threads, dim = variant.threads, variant.v_head_dim

    def step(q, k_pool, v_pool, tables, where, lists, sizes, factors, state):
        memory, thread = allocate(), cuda.threadIdx.x
        pair = cuda.blockIdx.x
        row = warp.divide(pair, sizes.num_q_heads)
        head = pair - row * sizes.num_q_heads
        seq, begin, end, origin, place = rows_cuda.find(row, lists, sizes)
        if begin == end:
            return
        query = rows_cuda.offset(where.q, row, sizes.queries, head)
        table = where.table[0] + seq * where.table[1]
        work = Row(query, head, 1, warp.divide(head, sizes.gqa), table, place)
        pairs = sizes.num_rows * sizes.num_q_heads
        m, l, o = state[pair], state[pairs + pair], 2 * pairs + pair * dim
        for split in range(begin - ((begin - origin) & (SPLIT - 1)), end, SPLIT):
            low, high = max(split, begin), min(split + SPLIT, end)
            attend(
                memory, q, k_pool, v_pool, tables, where, factors, work,
                sizes.block_size, low, high - low,
            )  # fmt: skip
            m, l = fold(m, l, state, o, memory.m[0], memory.l[0], memory.o, dim, thread, threads)
        if thread == 0:
            state[pair], state[pairs + pair] = m, l

    return cuda_kernel(step, (threads, variant.resident_blocks))


@functools.cache
def split(variant):
    """Compile the kernel `split` for a `_plan_cuda.StepVariant`."""
    allocate, attend = allocating(variant), attending(variant)
    heads, threads = variant.heads, variant.threads
    dim, pitch = variant.v_head_dim, variant.value.pitch
    turns = _plan.ceil_div(heads * dim, threads)

    def step(q, k_pool, v_pool, tables, where, sizes, factors, items, jobs, parts):
        memory, thread = allocate(), cuda.threadIdx.x
        job = cuda.blockIdx.x
        while job < items[sizes.num_rows] * jobs.of_item:  # a range of such steps would divide
            item = warp.divide(job, jobs.of_item)
            kv_head = warp.divide(job - item * jobs.of_item, jobs.groups)
            first = (job - item * jobs.of_item - kv_head * jobs.groups) * heads
            head = kv_head * sizes.gqa + first
            num_heads = min(heads, sizes.gqa - first)
            at = sizes.num_rows + 1 + item * ITEM
            row, seq, begin, count = items[at], items[at + 1], items[at + 2], items[at + 3]
            query = rows_cuda.offset(where.q, row, sizes.queries, head)
            table = where.table[0] + seq * where.table[1]
            work = Row(query, head, num_heads, kv_head, table, items[at + 4])
            attend(
                memory, q, k_pool, v_pool, tables, where, factors, work,
                sizes.block_size, begin, count,
            )  # fmt: skip
            pair = item * sizes.num_q_heads + head
            for turn in range(turns):
                i = thread + turn * threads
                h = warp.divide(i, dim)
                if h < num_heads:
                    parts[2 * jobs.pairs + pair * dim + i] = memory.o[h * pitch + i - h * dim]
            if thread < num_heads:
                m, l = memory.m[thread], memory.l[thread]
                parts[pair + thread], parts[jobs.pairs + pair + thread] = m, l
            job += cuda.gridDim.x

    return cuda_kernel(step, (threads, variant.resident_blocks))


@cuda_kernel
def list_items(lists, sizes, skip, most, items):
    """List the splits of all rows, of each row those after `skip`, at most so many.

    A warp for each row. First come the rows' starts [rows + 1], then the items.
    """
    before = cuda.shared.array(WARP, np.int32)
    row, lane = cuda.blockIdx.x, cuda.threadIdx.x
    own = 0
    for other in range(lane, row, WARP):
        own += rows_cuda.splits_of(other, lists, sizes, skip, most)[1]
    before[lane] = own
    cuda.syncthreads()
    start = 0
    for i in range(WARP):
        start += before[i]
    split, count = rows_cuda.splits_of(row, lists, sizes, skip, most)
    seq, begin, end, origin, place = rows_cuda.find(row, lists, sizes)
    if lane == 0:
        items[row] = start
        if row == sizes.num_rows - 1:
            items[row + 1] = start + count
    for i in range(lane, count, WARP):
        low = origin + (split + i) * SPLIT
        high = min(low + SPLIT, end)
        low = max(low, begin)
        at = sizes.num_rows + 1 + (start + i) * ITEM
        items[at], items[at + 1], items[at + 2] = row, seq, low
        items[at + 3], items[at + 4] = high - low, place
