"""Kernels that try the functions of `kernels.shares`, which work on tuples in registers.

Numbers come from global memory and go back there; `run_all` tries several functions in one kernel.
"""

import functools

import numpy as np
from numba import cuda

from numba_attn import _arrays
from numba_attn.kernels import shares, warp
from numba_attn.kernels._jit import cuda_function, cuda_kernel
from numba_attn.kernels._shares import sums_given
from numba_attn.kernels.warp import WARP

SENTINEL = 77
MOST_SUMS = 8


def reader(count):
    """Return the function that makes a tuple of numbers, so far apart."""
    if count == 1:
        return cuda_function(lambda numbers, at, stride: (numbers[at],))
    rest = reader(count - 1)
    return cuda_function(
        lambda numbers, at, stride: (numbers[at],) + rest(numbers, at + stride, stride)
    )


def _all_of(functions):
    first, *others = functions
    if not others:
        return first
    rest = _all_of(others)

    @cuda_function
    def both(numbers, found, lane):
        first(numbers, found, lane)
        rest(numbers, found, lane)

    return both


def _run_all(functions):
    run = _all_of(functions)

    @cuda_kernel
    def run_all(numbers, found):
        run(numbers, found, cuda.threadIdx.x)

    return run_all


@functools.cache
def sum_rows(lanes):
    """Sum 1 to 8 numbers of each lane: found [8, WARP, 8]."""

    def summing(count):
        sums, given, read = shares.row_sums(lanes, count), sums_given(lanes, count), reader(count)
        place = (count - 1) * WARP * MOST_SUMS

        @cuda_function
        def run(numbers, found, lane):
            to = place + lane * MOST_SUMS
            shares.scatter(found, to, 1, given, sums(read(numbers, lane * MOST_SUMS, 1)))

        return run

    return _run_all([summing(count) for count in range(1, MOST_SUMS + 1)])


@functools.cache
def exchange(lanes, count):
    """Find the largest of some lanes, and sum columns: found [WARP, 1 + count]."""
    largest, sum_columns, read = shares.lanes_max(lanes), shares.column_sums(lanes), reader(count)

    @cuda_kernel
    def run(numbers, found):
        lane = cuda.threadIdx.x
        to = lane * (1 + count)
        found[to] = largest(numbers[lane * count])
        shares.scatter(found, to + 1, 1, count, sum_columns(read(numbers, lane * count, 1)))

    return run


@functools.cache
def multiply(heads, columns):
    """Try dots, weigh and rescaler: found [heads], [heads, columns], [heads, columns]."""
    read_o, read_v, read_weights = reader(heads * columns), reader(columns), reader(heads)
    rescale, size = shares.rescaler(columns), heads * columns

    @cuda_kernel
    def run(numbers, found):
        o, v = read_o(numbers, 0, 1), read_v(numbers, size, 1)
        weights = read_weights(numbers, size + columns, 1)
        shares.scatter(found, 0, 1, heads, shares.dots(o, v))
        shares.scatter(found, heads, 1, size, shares.weigh(o, weights, v))
        shares.scatter(found, heads + size, 1, size, rescale(o, weights))

    return run


@cuda_kernel
def gather_fold(numbers, found, places, a, b):
    """Gather `count` numbers from `start`, and fold them into the first: found [2 + WARP]."""
    start, stride, count = places[0], places[1], places[2]
    gathered = shares.gather(numbers, start, stride, count)
    found[0] = shares.left_fold(numbers[0], gathered, a, b)
    shares.scatter(found, 2, 1, WARP, gathered)


@cuda_kernel
def scatter(numbers, found, places):
    start, stride, count = places[0], places[1], places[2]
    shares.scatter(found, start, stride, count, shares.gather(numbers, 0, 1, WARP))


@functools.cache
def load_shares(name, deal, rows):
    """Load each lane's share of rows that begin at the second one: found [lanes, share]."""
    load, count = shares.loader(name, deal, rows), rows * deal.parts * deal.width
    dtype, size, lanes, first = (
        _arrays.CARRIERS[name],
        (rows + 1) * deal.pitch,
        deal.lanes,
        deal.pitch,
    )

    @cuda_kernel
    def run(numbers, found):
        memory = cuda.shared.array(size, dtype, alignment=16)
        lane = cuda.threadIdx.x
        for i in range(lane, size, WARP):
            memory[i] = numbers[i]
        cuda.syncthreads()
        if lane < lanes:
            shares.scatter(found, lane * count, 1, count, load(memory, first, lane))

    return run


@functools.cache
def add_shares(deal, rows):
    """Add each lane's share of rows to those in memory: found [rows, pitch]."""
    add, count = shares.adder(deal), rows * deal.parts * deal.width
    read, size, lanes = reader(count), rows * deal.pitch, deal.lanes

    @cuda_kernel
    def run(numbers, found):
        memory = cuda.shared.array(size, np.float32, alignment=16)
        lane = cuda.threadIdx.x
        for i in range(lane, size, WARP):
            memory[i] = found[i]
        cuda.syncthreads()
        if lane < lanes:
            add(memory, read(numbers, lane * count, 1), lane)
        cuda.syncthreads()
        for i in range(lane, size, WARP):
            found[i] = memory[i]

    return run


@functools.cache
def copy_rows(name, deal, variant):
    """Copy two tiles of rows, the second one cut short, to a ring: found [2, tile, pitch]."""
    copy, dtype = shares.copier(name, deal, variant), _arrays.CARRIERS[name]
    wait_for_first, wait_for_all = warp.waiter(1), warp.waiter(0)
    asynchronous, threads, tile = variant.asynchronous, variant.threads, variant.tile
    size, sentinel = 2 * tile * deal.pitch, dtype.type(SENTINEL)
    half, most_rows = size // 2, 2 * tile

    @cuda_kernel
    def run(pool, offsets, count, found):
        ring = cuda.shared.array(size, dtype, alignment=16)
        rows = cuda.shared.array(most_rows, np.int64)
        thread = cuda.threadIdx.x
        for i in range(thread, size, threads):
            ring[i] = sentinel
        for i in range(thread, count, threads):
            rows[i] = offsets[i]
        cuda.syncthreads()
        for slot in range(2):
            copy(ring, slot, pool, rows, slot * tile, count, thread)
            if asynchronous:
                warp.end_copies()
        if asynchronous:
            wait_for_first()
        cuda.syncthreads()
        for i in range(thread, half, threads):
            found[i] = ring[i]
        if asynchronous:
            wait_for_all()
        cuda.syncthreads()
        for i in range(half + thread, size, threads):
            found[i] = ring[i]

    return run
