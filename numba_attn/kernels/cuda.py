"""The CUDA twin: its host functions, which lay out the work and launch the kernels.

Grids depend on shapes only: lengths that are on the device are read there, and nothing waits.
"""

import threading
import warnings
from typing import NamedTuple

import numpy as np
from numba import cuda

from .. import _arrays, _device, _plan, _plan_cuda
from . import rows_cuda, state_cuda, step_cuda, warp
from ._jit import cuda_kernel
from .state_cuda import MERGE_THREADS
from .warp import WARP

SPLIT = _plan_cuda.SPLIT_TOKENS
PARTIAL_BYTES = 256_000_000
"""Most memory for the partial states of a step; more splits are done in turn."""

MOST_BLOCKS = 8 if warp.SIMULATOR else 4096
"""Of the kernel `split`: blocks beyond the work cost time, and so does making their threads."""

MOST_THREADS = 64 if warp.SIMULATOR else _plan_cuda.MOST_THREADS
"""Of a block: two warps show what four do, in half of the time."""

_launching = threading.Lock()


def step_tile(state, q, k_pool, v_pool, formats, tile, options):
    """Absorb a tile: every split of a row, folded into its state.

    Parameters
    ----------
    state : AttentionState
        float32 m [rows, Hq], l [rows, Hq], o [rows, Hq, Dv]; modified.
    q : [rows, Hq, D] or [S, Q, Hq, D]
    k_pool, v_pool : [N, B, Hkv, D], [N, B, Hkv, Dv]
    formats : Formats
        Of q and the pools.
    tile : Tile
        The keys, int32 on the device.
    options : Options
    """
    if 0 in (q.size, k_pool.size, v_pool.size, tile.tables.size):
        return  # no row, or none can have a token
    call = _prepare(state, q, k_pool, v_pool, formats, tile, options)
    most_splits = _plan_cuda.most_splits(tile.tables.shape[1] * k_pool.shape[1], options)
    name = _plan_cuda.kernel_name(options.kernel, most_splits)
    run = _run_simple if name == "simple" else _run_split
    run(state, call, most_splits)


class _Call(NamedTuple):
    """What the kernels of a step are given."""

    variant: _plan_cuda.StepVariant  # of `simple`
    memory: list  # q, k_pool, v_pool, tables as runs of memory
    where: rows_cuda.Places
    lists: rows_cuda.Lists
    sizes: rows_cuda.Sizes
    factors: tuple  # scale, softcap


def _prepare(state, q, k_pool, v_pool, formats, tile, options):
    """Bring the arguments of a step into the form of the kernels'."""
    arrays = [_arrays.flatten(array) for array in (q, k_pool, v_pool, tile.tables)]
    rows = (
        rows_cuda.of_pool(x, flat) for x, flat in zip((k_pool, v_pool), arrays[1:3], strict=True)
    )
    variant = _plan_cuda.step_variant(*rows, formats, options)._replace(most_threads=MOST_THREADS)
    query_place, *places = ((array.offset, *array.strides) for array in arrays)
    scales = (rows_cuda.locate(x, 3) for x in (options.k_scale, options.v_scale))
    where = rows_cuda.Places(
        rows_cuda.by_query(query_place), *places, *scales, rows_cuda.locate(options.alibi_slopes, 1)
    )
    lists = rows_cuda.Lists(*(rows_cuda.locate(x, 1) for x in tile[1:6]))
    num_rows, num_q_heads = state.m.shape
    sizes = rows_cuda.Sizes(
        num_rows,
        num_q_heads,
        num_q_heads // k_pool.shape[2],
        k_pool.shape[1],
        tile.tables.shape[0],
        q.shape[1] if len(q.shape) == 4 else 1,
        options.sliding_window,
        int(options.causal),
    )
    factors = np.float32(options.scale), np.float32(options.softcap)
    return _Call(variant, [array.memory for array in arrays], where, lists, sizes, factors)


def _run_simple(state, call, most_splits):
    args = (*call.memory, call.where, call.lists, call.sizes, call.factors, state.buffer)
    launch(step_cuda.simple(call.variant), state.m.size, call.variant.threads, *args)


def _run_split(state, call, most_splits):
    """Do the splits of all rows, as many of each at a time as there is memory for."""
    num_rows, num_q_heads, dim = state.o.shape
    gqa = call.sizes.gqa
    variant = _plan_cuda.split_variant(call.variant, gqa, warp.copies_are_asynchronous())
    row_bytes = 4 * num_rows * num_q_heads * (dim + 2)
    most = min(most_splits, max(1, PARTIAL_BYTES // row_bytes))
    most_items = num_rows * most
    items = _scratch(state, "items", np.int32, num_rows + 1 + most_items * step_cuda.ITEM)
    parts = _scratch(state, "parts", np.float32, most * row_bytes // 4)
    groups = _plan.ceil_div(gqa, variant.heads)
    jobs = step_cuda.Jobs(groups, groups * (num_q_heads // gqa), most_items * num_q_heads)
    blocks = min(most_items * jobs.of_item, MOST_BLOCKS)
    args = (*call.memory, call.where, call.sizes, call.factors, items, jobs, parts)
    kernel = step_cuda.split(variant)
    for skip in range(0, most_splits, most):
        launch(step_cuda.list_items, num_rows, WARP, call.lists, call.sizes, skip, most, items)
        launch(kernel, blocks, variant.threads, *args)
        _merge(state, parts, most_items, items)


def _scratch(state, name, dtype, size):
    """Return memory that a state keeps from step to step, so that a captured graph may use it."""
    array = state.scratch.get(name)
    if array is None or array.size < size:
        array = state.scratch[name] = cuda.device_array(size, dtype)
    return array


def merge_splits(state, partials, starts):
    """Fold partial states into `state`, in order: a strict left fold.

    Parameters
    ----------
    state : float32 m [S, Hq], l [S, Hq], o [S, Hq, Dv]; modified.
    partials : float32 m [n, Hq], l [n, Hq], o [n, Hq, Dv]
    starts : int32 [S + 1]
        The partials of sequence s are starts[s] to starts[s + 1].
    """
    if partials.o.size and state.o.size:
        _merge(state, partials.buffer, partials.m.shape[0], starts)


def _merge(state, parts, num_parts, starts):
    threads = min(MERGE_THREADS, WARP * _plan.ceil_div(state.o.shape[2], WARP))
    args = (parts, num_parts, starts, state.buffer, *state.o.shape)
    launch(state_cuda.merge_splits, state.m.size, threads, *args)


def finalize(state, sinks, out, lse, dtype):
    """Write o / l as `dtype` [rows, Hq, Dv] and the log-sum-exp [rows, Hq], sinks included.

    `out` may have the queries of a sequence as an axis: [S, Q, Hq, Dv]. `lse` may be None.
    """
    if state.o.size:
        flat = _arrays.flatten(out)
        where = rows_cuda.by_query((flat.offset, *flat.strides))
        queries = out.shape[1] if len(out.shape) == 4 else 1
        sinks_at = rows_cuda.locate(sinks, 1)
        kernel = state_cuda.finalize(dtype, lse is not None)
        lse = state.buffer if lse is None else lse.reshape(lse.size)  # unused, or by pairs
        args = (state.buffer, state.o.shape, flat.memory, where, queries, sinks_at, lse)
        launch(kernel, state.m.size, WARP, *args)


def reset(state):
    """Return a state to the identity."""
    if state.o.size:
        blocks = _plan.ceil_div(state.buffer.size, MERGE_THREADS)
        launch(state_cuda.reset, blocks, MERGE_THREADS, state.buffer, state.m.size)


def times(counts, factor):
    """Return counts [S] * factor as int32."""
    products = cuda.device_array(counts.shape, np.int32)
    if counts.size:
        flat = _arrays.flatten(counts)
        where = (flat.offset, *flat.strides)
        launch(
            _times, _plan.ceil_div(counts.size, WARP), WARP, flat.memory, where, factor, products
        )
    return products


def launch(kernel, blocks, threads, *args):
    """Launch a kernel on the stream in use; a small grid is no mistake of the user's."""
    with _launching, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Grid size .* low occupancy", Warning)
        ready = configured(kernel, blocks, threads, _device.stream_in_use())
        if warp.SIMULATOR:  # one kernel at a time, and NumPy scalars warn of NaN and inf
            warnings.simplefilter("ignore", RuntimeWarning)
            return ready(*args)
    return ready(*args)


def configured(kernel, blocks, threads, stream):
    """Return a kernel ready to be launched."""
    return kernel[blocks, threads, stream]


@cuda_kernel
def _times(counts, where, factor, products):
    i = cuda.blockIdx.x * WARP + cuda.threadIdx.x
    if i < products.size:
        products[i] = counts[where[0] + i * where[1]] * factor
