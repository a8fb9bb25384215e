"""The input contract of `append_kv`, and its messages; the rest is in `_validate`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from . import _arrays, _device, _validate, _validate_options
from ._types import Array, HostArray

QUANTISED = ("float8_e4m3fn", "float8_e5m2", "int8")
"""The formats that scales are computed for."""


class Write(NamedTuple):
    """New rows of one pool, ready for a backend."""

    tokens: Array  # [T, Hkv, D], carrier
    pool: Array  # [N, B, Hkv, D], carrier
    slots: Array  # integers [T]
    formats: tuple[str, str]  # of tokens and pool
    scale: Array | None  # float32 [Hkv] or [N, B, Hkv]
    computed: bool  # the scale is written


def writes(
    tokens: dict[str, Any],
    pools: dict[str, Any],
    slot_mapping: Any,
    scales: dict[str, Any],
    compute_scales: Any,
) -> list[Write]:
    """Check the arguments of a call; return what is to be written.

    Parameters
    ----------
    tokens, pools, scales : dict
        By argument name: those of K, then those of V. No values and no pool for them: K only.
    """
    _validate.flag("compute_scales", compute_scales)
    sides = list(zip(tokens, pools, scales, strict=True))
    if tokens["v"] is None or pools["v_pool"] is None:
        _without_values(tokens["v"], pools["v_pool"], scales["v_scale"])
        del sides[1]
    bits, formats = {}, {}
    for name, pool_name, _ in sides:
        bits[name], source = _arrays.carried(name, tokens[name], _arrays.QUERY_FORMATS)
        bits[pool_name], target = _arrays.carried(pool_name, pools[pool_name], _arrays.POOL_FORMATS)
        formats[name] = source, target
        _shapes(name, bits[name], pool_name, bits[pool_name])
    _same_tokens(bits)
    num_blocks, block_size = bits["k_pool"].shape[:2]
    slots = _slots(slot_mapping, bits["k"].shape[0], num_blocks, block_size)
    factors = {}
    for name, pool_name, scale_name in sides:
        shape, target = tuple(bits[pool_name].shape[:3]), formats[name][1]
        if compute_scales:
            factors[scale_name] = _computed(scale_name, scales[scale_name], shape, target)
        else:
            factors[scale_name] = _given(scale_name, scales[scale_name], shape, slots)
    if compute_scales and all(scale is None for scale in factors.values()):
        raise ValueError(
            f"compute_scales: needs a pool of {', '.join(QUANTISED)}, got "
            f"{', '.join(target for _, target in formats.values())}; other pools need no scales"
        )
    written = {pool_name for _, pool_name, _ in sides} | (set(factors) if compute_scales else set())
    _written_apart(written, bits | factors | {"slot_mapping": slot_mapping})
    return [
        Write(bits[name], bits[pool], slots, formats[name], factors[scale], bool(compute_scales))
        for name, pool, scale in sides
    ]


def _without_values(v: Any, v_pool: Any, v_scale: Any) -> None:
    """Check that all arguments of V are None."""
    given = {"v": v, "v_pool": v_pool, "v_scale": v_scale}
    if any(x is not None for x in given.values()):
        names = " and ".join(name for name, x in given.items() if x is not None)
        raise ValueError(
            f"v: v and v_pool must be given together, got {names} alone; pass both, or None for "
            "both (and for v_scale) to write keys only"
        )


def _shapes(name: str, tokens: Array, pool_name: str, pool: Array) -> None:
    """Check new rows [T, Hkv, D] against their pool [N, B, Hkv, D]."""
    dim = "Dv" if name == "v" else "D"
    _validate.rows(name, tokens, f"[T, Hkv, {dim}]", 3)
    _validate.rows(pool_name, pool, f"[N, B, Hkv, {dim}]", 4)
    expected = tuple(pool.shape[2:])
    if tuple(tokens.shape[1:]) != expected:
        raise ValueError(
            f"{name}: expected shape [T, Hkv, {dim}] with Hkv, {dim} = {expected} as in "
            f"{pool_name}, got {tuple(tokens.shape)}; check the order of the axes"
        )


def _same_tokens(bits: dict[str, Array]) -> None:
    """Check that V has the tokens of K, and the slots."""
    if "v" not in bits:
        return
    if bits["v"].shape[0] != bits["k"].shape[0]:
        raise ValueError(
            f"v: its first axis must be T = {len(bits['k'])}, that of k, got {len(bits['v'])}; "
            "pass the key and the value of each token"
        )
    expected, got = (tuple(bits[name].shape[:3]) for name in ("k_pool", "v_pool"))
    if got != expected:
        raise ValueError(
            f"v_pool: its first three axes [N, B, Hkv] must be those of k_pool, {expected}, got "
            f"{got}; a head-major pool is passed as a transposed view"
        )


def _slots(slot_mapping: Any, num_tokens: int, num_blocks: int, block_size: int) -> Array:
    """Check the slots [T]; return host ones as int64."""
    if _device.is_device_array(slot_mapping):
        slots = _device.as_device_array(slot_mapping)
        if slots.dtype not in (np.int32, np.int64):
            raise TypeError(
                f"slot_mapping: a device array must be int32 or int64, got {slots.dtype}; convert "
                "it on the device"
            )
    else:
        slots = _arrays.integers("slot_mapping", slot_mapping)
    if tuple(slots.shape) != (num_tokens,):
        raise ValueError(
            f"slot_mapping: expected shape [T] = ({num_tokens},), one slot per token of k, got "
            f"{tuple(slots.shape)}; pass -1 for a token that is not to be written"
        )
    if not isinstance(slots, np.ndarray):
        return slots
    bad = (slots < -1) | (slots >= num_blocks * block_size)
    if np.count_nonzero(bad):
        token = int(np.argmax(bad))
        raise ValueError(
            f"slot_mapping: must be from 0 to N * B - 1 = {num_blocks * block_size - 1}, or -1 to "
            f"skip, got {int(slots[token])} for token {token}; a slot is block * B + place in the "
            "block"
        )
    slots = np.ascontiguousarray(slots, np.int64)
    if num_tokens > 1:
        _distinct(slots)
    return slots


def _distinct(slots: HostArray) -> None:
    """Check that no two tokens have one slot."""
    ordered = np.sort(slots)
    repeated = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    if np.count_nonzero(repeated):
        slot = int(ordered[1:][repeated][0])
        tokens = np.flatnonzero(slots == slot)[:2].tolist()
        raise ValueError(
            f"slot_mapping: each slot may come once, got {slot} for tokens {tokens[0]} and "
            f"{tokens[1]}; pass -1 for the one that is not to be written"
        )


def _given(name: str, value: Any, shape: tuple[int, int, int], slots: Array) -> Array | None:
    """Return the scale to divide by as float32 [Hkv] or [N, B, Hkv], or None."""
    scale = _validate_options.pool_scale(name, value, shape)
    if isinstance(scale, np.ndarray):
        used = scale
        if len(scale.shape) == 3:
            used = scale[np.divmod(slots[slots >= 0], shape[1])]
        good = (used > 0) & (used < np.inf)
        if not good.all():
            raise ValueError(
                f"{name}: must be positive and finite where a token is written, got "
                f"{used[~good][0]}; stored value x scale = value"
            )
    return scale


def _computed(name: str, scale: Any, shape: tuple[int, int, int], target: str) -> Array | None:
    """Check an array that computed scales are written to, float32 [N, B, Hkv]."""
    if target not in QUANTISED:
        if scale is not None:
            raise ValueError(
                f"{name}: none is computed for a pool of {target}, got {type(scale).__name__}; "
                "pass None"
            )
        return None
    if _device.is_device_array(scale):
        scale = _device.as_device_array(scale)
    is_array = hasattr(scale, "dtype") and hasattr(scale, "strides")
    if not is_array or scale.dtype != np.float32 or isinstance(scale, np.ma.MaskedArray):
        came = scale.dtype if is_array else type(scale).__name__
        raise TypeError(
            f"{name}: with compute_scales, expected a float32 array to write to, got {came}; "
            "allocate it with numpy.ones"
        )
    if tuple(scale.shape) != shape:
        raise ValueError(
            f"{name}: with compute_scales, expected shape [N, B, Hkv] = {shape}, got "
            f"{tuple(scale.shape)}; each token and kv head has a scale of its own"
        )
    return np.asarray(scale) if isinstance(scale, np.ndarray) else scale


def _written_apart(written: set[str], arrays: dict[str, Any]) -> None:
    """Check that what is written is writable, and shares no element with another array."""
    others = dict(arrays)
    for name in sorted(written):
        array = others.pop(name)
        if isinstance(array, np.ndarray):
            _validate.writable_apart(name, array, others)
