"""What a streamed call is asked for, checked before anything is read."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from . import _arrays, _device, _plan, _run, _validate, _validate_options, _validate_state
from ._call import Options, Tile
from ._run import Inputs
from ._tiles import Tiles
from ._types import Array, HostArray
from .sources import Layout

_UNKNOWN = 1 << 31  # blocks of a source that does not tell their number


class Keys(NamedTuple):
    """What is to be read, and for which queries."""

    source: Any
    layout: Layout
    whole: Tile  # on the host
    sliding_window: int
    causal: bool

    def are_cut_as(self, others: Keys) -> bool:
        """Tell whether the tiles are the same, but of another source."""
        arrays = zip(self.whole[:-1], others.whole[:-1], strict=True)
        return (
            self.layout == others.layout
            and self.whole.num_queries == others.whole.num_queries
            and self[3:] == others[3:]
            and all(x is y or (_given(x, y) and np.array_equal(x, y)) for x, y in arrays)
        )

    def tiles(self, most_blocks: int, device: str) -> Tiles:
        """Cut them into tiles."""
        return Tiles(
            self.whole,
            self.sliding_window,
            self.causal,
            block_size=self.layout.block_size,
            split_tokens=_device.backend(device).SPLIT,
            most_blocks=most_blocks,
        )


def _given(*values: Any) -> bool:
    return all(value is not None for value in values)


class Call(NamedTuple):
    """A checked call."""

    inputs: Inputs  # its pools are empty
    options: Options
    keys: Keys


def check(
    q: Array,
    keys: tuple[Any, Any, Any],
    *,
    query_start_loc: Any,
    tile_token_counts: Any,
    tile_starts: Any,
    seq_starts: Any,
    **options: Any,
) -> Call:
    """Check the arguments of a call, of which `keys` are (source, block_tables, seq_lens).

    Tables and lengths are brought to the host.
    """
    source, block_tables, seq_lens = keys
    layout = Layout.of(source)
    _validate.axes("q", q, "[S, Hq, D] or [S, Q, Hq, D]", 3, 4)
    if (head_dim := tuple(q.shape)[-1]) != layout.head_dim:
        raise ValueError(
            f"source.head_dim: must be D = {head_dim}, the head_dim of q, got "
            f"{layout.head_dim}; check the order of the axes of q"
        )
    inputs = _run.inputs(q, *layout.pools(np.empty(0, np.uint8)), _on_host(query_start_loc))
    num_blocks = getattr(source, "num_blocks", None)
    if num_blocks is not None:
        num_blocks = _validate_state.whole("source.num_blocks", num_blocks, 0)
    else:  # scales by token tell it, too
        scales = (np.shape(x) for x in (options["k_scale"], options["v_scale"]) if x is not None)
        num_blocks = next((shape[0] for shape in scales if len(shape) == 3), _UNKNOWN)
    sizes = inputs.sizes._replace(num_blocks=num_blocks)
    found = _validate_options.options(sizes, **options)
    positions = {"tile_starts": tile_starts, "seq_lens": seq_lens, "seq_starts": seq_starts}
    whole = _whole(sizes, found, _on_host(block_tables), _on_host(tile_token_counts), positions)
    whole = whole._replace(query_starts=inputs.query_starts, num_queries=sizes.num_queries)
    _validate.block_ids("block_tables", whole, found, sizes)
    # The caller may change its arrays while blocks are read ahead.
    arrays = (None if x is None else _arrays.as_int32(x).copy() for x in whole[:-1])
    whole = Tile._make([*arrays, whole.num_queries])
    return Call(inputs, found, Keys(source, layout, whole, found.sliding_window, found.causal))


def check_next(q: Array, then: Any, same: dict[str, Any]) -> Keys:
    """Check what is to be read next; q and the options are those of this call."""
    if not isinstance(then, (tuple, list)) or len(then) != 3:
        raise TypeError(
            f"then: expected (source, block_tables, seq_lens), got {_described(then)}; pass what "
            "the next call will be given"
        )
    try:
        return check(q, tuple(then), **same, k_scale=None, v_scale=None).keys
    except (TypeError, ValueError) as error:
        raise type(error)(f"then: {error}") from error


def _described(value: Any) -> str:
    kind = type(value).__name__
    return f"a {kind} of {len(value)}" if hasattr(value, "__len__") else kind


def _whole(
    sizes: _plan.Sizes, options: Options, block_tables: Any, counts: Any, positions: dict[str, Any]
) -> Tile:
    """Check the tables, and where their tokens stand."""
    if block_tables is None:
        raise TypeError(
            "block_tables: expected integers [S, max_blocks], got None; list the blocks"
        )
    tables = _arrays.integers("block_tables", block_tables)
    _validate.table("block_tables", tables, sizes.num_seqs, "max_blocks")
    given = {name: _on_host(value) for name, value in positions.items()}
    lens = _arrays.integers("seq_lens", given["seq_lens"])
    _validate.per_sequence("seq_lens", lens, sizes.num_seqs)
    name, tokens = "seq_lens", lens
    if given["tile_starts"] is None:
        given["tile_starts"] = np.zeros(sizes.num_seqs, np.int32)
    elif counts is None:
        starts = _arrays.integers("tile_starts", given["tile_starts"])
        _validate.per_sequence("tile_starts", starts, sizes.num_seqs)
        advice = "a tile begins at a token of its sequence, or at its end"
        _validate.lengths_within("tile_starts", starts, "seq_len", lens, advice)
        tokens = lens.astype(np.int64) - starts
    if counts is not None:
        name, tokens = "tile_token_counts", _arrays.integers("tile_token_counts", counts)
        _validate.per_sequence(name, tokens, sizes.num_seqs)
    capacity = tables.shape[1] * sizes.block_size
    advice = "a row of block_tables needs an entry for each block"
    _validate.lengths(name, tokens, "max_blocks * B", capacity, advice)
    tokens = _arrays.as_int32(tokens)
    starts, lens, first = _validate_options.tile_positions(options, sizes, tokens, given)
    return Tile(tables, tokens, starts, lens, first)


def _on_host(value: Any) -> HostArray | Any:
    """Copy what is on a device: blocks are read by the host."""
    return _arrays.to_host(_device.own(value)) if _device.is_device_array(value) else value
