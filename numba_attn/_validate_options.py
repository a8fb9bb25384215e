"""The input contract of the options, and its messages; the rest is in `_validate`."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from . import _arrays, _device, _validate
from ._call import KERNELS, Options
from ._plan import Sizes
from ._types import Array, HostArray

_INT32_MAX = int(np.iinfo(np.int32).max)
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FLOAT32_MIN = float(np.finfo(np.float32).smallest_subnormal)


def options(
    sizes: Sizes,
    *,
    scale: Any,
    softcap: Any,
    sliding_window: Any,
    causal: Any,
    alibi_slopes: Any,
    k_scale: Any,
    v_scale: Any,
    kernel: str,
) -> Options:
    """Check the options of a step; arrays stay on the device that they are on."""
    _validate.flag("causal", causal)
    pool_rows = sizes.num_blocks, sizes.block_size, sizes.num_kv_heads
    default = 1.0 / math.sqrt(sizes.head_dim)
    return Options(
        scale=default
        if scale is None
        else _positive("scale", scale, f"1 / sqrt(D) = {default:.6g}"),
        softcap=0.0 if softcap is None else _positive("softcap", softcap, "no cap"),
        sliding_window=_window(sliding_window),
        causal=bool(causal),
        alibi_slopes=per_head("alibi_slopes", alibi_slopes, sizes.num_q_heads),
        k_scale=pool_scale("k_scale", k_scale, pool_rows),
        v_scale=pool_scale("v_scale", v_scale, pool_rows),
        kernel=kernel,
    )


def launch(kind: str, kernel: Any, stream: Any) -> None:
    """Check how a call is to run; the CPU has one kernel, and no streams."""
    if not isinstance(kernel, str) or kernel not in KERNELS:
        raise ValueError(
            f"kernel: expected one of {', '.join(map(repr, KERNELS))}, got {kernel!r}; leave it "
            "'auto'"
        )
    if kind == "cpu" and kernel != "auto":
        raise ValueError(f"kernel: only CUDA has a choice, got {kernel!r}; leave it 'auto' here")
    if stream is not None:
        if kind == "cpu":
            raise ValueError(
                f"stream: only what runs on a CUDA device has one, got {type(stream).__name__}; "
                "leave it None here"
            )
        _device.as_stream(stream)


def _positive(name: str, value: Any, none: str) -> float:
    """Return a positive float that float32 holds."""
    real = isinstance(value, numbers.Real) or type(value).__name__ == "bfloat16"
    if isinstance(value, bool) or not real:
        raise TypeError(
            f"{name}: expected a real number or None, got {type(value).__name__}; pass a float"
        )
    try:
        number = float(value)
    except OverflowError:  # an int or a fraction beyond float64
        number = math.inf
    if not _FLOAT32_MIN <= number <= _FLOAT32_MAX:
        raise ValueError(
            f"{name}: must be positive and finite in float32, got {number}; None stands for {none}"
        )
    return number


def _window(value: Any) -> int:
    """Return the window in keys, 0 for none."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(
            f"sliding_window: expected an integer or None, got {type(value).__name__}; pass an int"
        )
    if value < 1:
        raise ValueError(
            f"sliding_window: must be at least 1, the query's own key, got {value}; None stands "
            "for no window"
        )
    return min(int(value), _INT32_MAX)


def per_head(name: str, values: Any, num_q_heads: int) -> Array | None:
    """Return one float32 for each query head, or None; only a sink may be -inf."""
    if values is None:
        return None
    array = _arrays.floats(name, values)
    if tuple(array.shape) != (num_q_heads,):
        raise ValueError(
            f"{name}: expected shape [Hq] = ({num_q_heads},), one per query head, got "
            f"{tuple(array.shape)}; pass one number for each head of q"
        )
    if isinstance(array, np.ndarray):
        allowed = np.isfinite(array) | (array == (-np.inf if name == "sinks" else 0))
        if not allowed.all():
            raise ValueError(
                f"{name}: must be finite, got {array.tolist()}; check the model's weights"
            )
    return array


def pool_scale(name: str, value: Any, pool_rows: tuple[int, int, int]) -> Array | None:
    """Return the scale of a pool [N, B, Hkv, ...] as float32 [Hkv] or [N, B, Hkv], or None."""
    if value is None:
        return None
    is_list = not hasattr(value, "shape") and hasattr(value, "__len__")
    if not is_list and getattr(value, "shape", ()) == ():
        number = _positive(name, value[()] if hasattr(value, "shape") else value, "1")
        return np.full(pool_rows[2], number, np.float32)
    array = _arrays.floats(name, value)
    shapes = pool_rows[2:], pool_rows
    if tuple(array.shape) not in shapes:
        raise ValueError(
            f"{name}: expected a number, [Hkv] = {shapes[0]} or [N, B, Hkv] = {shapes[1]}, got "
            f"shape {tuple(array.shape)}; pass one scale for each kv head, or one for each token"
        )
    return array


def seq_starts(starts: Any, lens: HostArray | None, num_seqs: int) -> Array | None:
    """Return the first position of each sequence, int [S], or None."""
    if starts is None:
        return None
    array = _arrays.integers("seq_starts", starts)
    _validate.per_sequence("seq_starts", array, num_seqs)
    if isinstance(array, np.ndarray):
        most = lens if isinstance(lens, np.ndarray) else np.full(num_seqs, _INT32_MAX)
        advice = "the position of the first key, counted from the start of the table"
        _validate.lengths_within("seq_starts", array, "seq_len", most, advice)
    return _arrays.as_int32(array)


def tile_positions(
    options: Options, sizes: Sizes, tokens: Array, given: dict[str, Any]
) -> tuple[Array | None, ...]:
    """Check where a tile stands; return tile_starts, seq_lens and seq_starts, [S] or None each.

    Parameters
    ----------
    options : Options
    sizes : Sizes
    tokens : int [S]
        Tokens of each sequence in the tile.
    given : dict
        The three arguments as they came.
    """
    _positions_given(options, sizes, given)
    found: dict[str, Array] = {}
    for name in ("tile_starts", "seq_lens"):
        value = given[name]
        if value is not None:
            found[name] = _arrays.integers(name, value)
            _validate.per_sequence(name, found[name], sizes.num_seqs)
    starts, lens = found.get("tile_starts"), found.get("seq_lens")
    ends = tokens
    if isinstance(starts, np.ndarray) and isinstance(tokens, np.ndarray):
        advice = "a position is a token's place in its sequence"
        _validate.lengths("tile_starts", starts, "2^31 - 1", _INT32_MAX, advice)
        ends = starts.astype(np.int64) + tokens
        advice = "positions must fit int32"
        _validate.lengths(
            "tile_starts", ends, "2^31 - 1 with the tile's tokens", _INT32_MAX, advice
        )
    if isinstance(lens, np.ndarray) and isinstance(ends, np.ndarray):
        _validate.lengths("seq_lens", lens, "2^31 - 1", _INT32_MAX, "positions must fit int32")
        advice = "pass the whole length of each sequence, or fewer tokens"
        rule = "seq_len (tile_start + tokens may not pass it)"
        _validate.lengths_within("tile_starts", ends, rule, lens, advice)
    first = seq_starts(given["seq_starts"], lens, sizes.num_seqs)
    return tuple(x if x is None else _arrays.as_int32(x) for x in (starts, lens, first))


def _positions_given(options: Options, sizes: Sizes, given: dict[str, Any]) -> None:
    """Check that a tile's positions were given where an option needs them."""
    several = options.causal and sizes.num_queries != 1
    needs = {
        "sliding_window": options.sliding_window > 0,
        "alibi_slopes": options.alibi_slopes is not None,
        "several queries (causal)": several,
    }
    reasons = [what for what, needed in needs.items() if needed]
    missing = [name for name in ("tile_starts", "seq_lens") if given[name] is None]
    if not reasons and given["seq_starts"] is not None and given["tile_starts"] is None:
        reasons, missing = ["seq_starts"], ["tile_starts"]
    if reasons and missing:
        raise ValueError(
            f"{missing[0]}: must be given with {reasons[0]}, got None; pass the position of each "
            "tile's first token as tile_starts, and whole lengths as seq_lens"
        )
