"""From validated arguments to a backend and back: bring arrays over, run, bring the result home."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from . import _arrays, _device, _validate, _validate_options, _validate_state
from ._call import Formats, Options, Tile
from ._plan import Sizes
from ._types import Array
from .state import AttentionState


class Inputs(NamedTuple):
    """Queries and pools as their carriers, and what they are."""

    q: Array
    k_pool: Array
    v_pool: Array
    query_starts: Array | None  # integers [S + 1]
    formats: Formats
    sizes: Sizes
    dtype: np.dtype[Any]  # of q as it came, and of the result


def inputs(q: Array, k_pool: Array, v_pool: Array, query_start_loc: Any) -> Inputs:
    """Check q and the pools."""
    bits, q_format = _arrays.carried("q", q, _arrays.QUERY_FORMATS)
    k_pool, k_format = _arrays.carried("k_pool", k_pool, _arrays.POOL_FORMATS)
    v_pool, v_format = _arrays.carried("v_pool", v_pool, _arrays.POOL_FORMATS)
    starts = None
    if query_start_loc is not None:
        starts = _arrays.integers("query_start_loc", query_start_loc)
    sizes = _validate.attention_sizes(bits, k_pool, v_pool, starts)
    starts = None if starts is None else _arrays.as_int32(starts)
    formats = Formats(q_format, k_format, v_format)
    return Inputs(bits, k_pool, v_pool, starts, formats, sizes, np.dtype(_device.own(q).dtype))


def given_arrays(**arguments: Any) -> dict[str, Any]:
    """Keep the arguments that are arrays or lists of numbers; one number has no device."""
    return {
        name: x
        for name, x in arguments.items()
        if x is not None and (x.shape != () if hasattr(x, "shape") else hasattr(x, "__len__"))
    }


def whole(
    home: str,
    inputs: Inputs,
    options: Options,
    block_tables: Any,
    seq_lens: Any,
    seq_starts: Any,
) -> Tile:
    """Check tables and lengths: the whole of each sequence as one tile."""
    sizes = inputs.sizes
    lens = _arrays.integers("seq_lens", seq_lens)
    if block_tables is None:
        _validate.contiguous(sizes, lens)
        tables = _arrays.bring(home, np.arange(sizes.num_seqs, dtype=np.int32)[:, None])
    else:
        tables = _arrays.integers("block_tables", block_tables)
        _validate.paged(sizes, tables, lens)
    starts = _validate_options.seq_starts(seq_starts, lens, sizes.num_seqs)
    tile = Tile(
        tables,
        _arrays.as_int32(lens),
        seq_starts=starts,
        query_starts=inputs.query_starts,
        num_queries=sizes.num_queries,
    )
    if home == "cpu" and block_tables is not None:
        _validate.block_ids("block_tables", tile, options, sizes)
    return tile


def empty_state(state: AttentionState | None, sizes: Sizes, kind: str) -> AttentionState:
    """Return a caller's state as the identity, or a new one."""
    if state is None:
        heads, dim = sizes.num_q_heads, sizes.v_head_dim
        return AttentionState(sizes.num_seqs, heads, dim, num_queries=sizes.num_rows, device=kind)
    _check_state(state, sizes, kind)
    state.reset()
    return state


def copy_of(state: AttentionState | None, sizes: Sizes, kind: str) -> AttentionState:
    """Return a new state: the identity, or what is in a caller's."""
    if state is not None:
        _check_state(state, sizes, kind)
    copy = empty_state(None, sizes, kind)
    if state is not None:
        _arrays.overwrite(copy.buffer, state.buffer)
    return copy


def _check_state(state: AttentionState, sizes: Sizes, kind: str) -> None:
    _validate_state.is_state("state", state, AttentionState)
    _validate_state.state_fits(state, sizes)
    _validate_state.state_device(state, kind)


def absorb(state: AttentionState, inputs: Inputs, tile: Tile, options: Options) -> None:
    """Run a validated step on the state's device."""
    if state.o.size == 0:
        return
    kind = state.device
    tables = _arrays.as_int32(tile.tables)
    if tables is not tile.tables:
        tile = tile._replace(tables=tables)
    if kind == "cpu" and isinstance(inputs.q, np.ndarray):  # and so is all the rest
        _device.backend(kind).step_tile(state, *inputs[:3], inputs.formats, tile, options)
        return

    def bring(array: Any) -> Any:
        return array if array is None else _arrays.bring(kind, array)

    _device.backend(kind).step_tile(
        state,
        *(bring(x) for x in inputs[:3]),
        inputs.formats,
        Tile._make([*map(bring, tile[:-1]), tile.num_queries]),
        options._replace(
            alibi_slopes=bring(options.alibi_slopes),
            k_scale=bring(options.k_scale),
            v_scale=bring(options.v_scale),
        ),
    )


def finish(
    state: AttentionState,
    home: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    sinks: Array | None,
    return_lse: bool,
    out: Array | None,
) -> Any:
    """Run finalize on the state's device; give the result in `home`, as `shape` and `dtype`."""
    own = _device.own(out)
    in_place = out is not None and home == state.device
    target = own if in_place else _arrays.empty(state.device, shape, _arrays.CARRIERS[name(dtype)])
    lse = _arrays.empty(state.device, tuple(state.m.shape), np.float32) if return_lse else None
    if sinks is not None:
        sinks = _arrays.bring(state.device, sinks)
    if state.o.size:
        carrier = _arrays.as_carrier(target) if in_place else target
        _device.backend(state.device).finalize(state, sinks, carrier, lse, name(dtype))
    if not in_place:
        result = _arrays.bring(home, target)
        expected = _arrays.result_dtype(home, dtype)
        result = result if result.dtype == expected else result.view(expected)
        if out is None:
            out = result
        else:
            _arrays.overwrite(own, result)
    if not return_lse:
        return out
    return out, _arrays.bring(home, lse).reshape(shape[:-1])


def name(dtype: np.dtype[Any]) -> str:
    """Return the number format of a result."""
    found = _arrays.format_of(dtype)
    assert found is not None, "checked before"
    return found
