"""Write new tokens into a paged KV cache."""

from __future__ import annotations

from typing import Any

from . import _arrays, _device, _frameworks, _run, _validate_append
from ._types import Array


@_frameworks.taking_arrays("k", writes=("k_pool", "v_pool"))
def append_kv(
    k: Array,
    v: Array | None,
    k_pool: Array,
    v_pool: Array | None,
    slot_mapping: Any,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    compute_scales: bool = False,
) -> None:
    """Write new tokens into their slots of the pools, which are modified.

    Numbers are converted to the pools' dtypes, rounded to nearest even; with a scale they are
    divided by it first, in float32. Without one, equal dtypes are copied bit by bit.

    Parameters
    ----------
    k, v : [T, Hkv, D], [T, Hkv, Dv]
        Keys and values of T tokens, each in bfloat16, float16 or float32; any strides with a
        contiguous last axis. uint16 is taken as bfloat16 bits.
    k_pool, v_pool : [N, B, Hkv, D], [N, B, Hkv, Dv]
        As in `paged_attention`; modified. Where the values are a part of the keys (MLA), pass None
        for `v` and `v_pool`.
    slot_mapping : int [T]
        Where each token goes: ``block * B + place in the block``; -1: nowhere. No slot may come
        twice. The contents of a device array are not checked: slots outside the pool are skipped.
    k_scale, v_scale : float, [Hkv] or [N, B, Hkv], optional
        What the numbers are divided by: stored value x scale = value.
    compute_scales : bool
        For pools of float8 or int8: divide each token's row of each kv head by a scale of its own,
        ``max |row| / largest number of the dtype`` (1 for a row of zeros), which is written to
        `k_scale` and `v_scale`, float32 [N, B, Hkv]. Other pools take None.

    Raises
    ------
    ValueError
        For shapes and values outside the rules above; nothing has been written then.
    TypeError
        For wrong dtypes and kinds of arguments.
    RuntimeError
        If the arrays are on a device that is not available.

    Notes
    -----
    float8 and int8 saturate: what is beyond their largest number, inf too, becomes that number. NaN
    stays NaN in float8, and becomes 0 in int8. A computed scale is at least 2^-126.

    References
    ----------
    Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", 2023.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, numba_attn
    >>> k, v = np.random.default_rng(0).standard_normal((2, 3, 2, 64)).astype(np.float32)
    >>> k_pool, v_pool = np.zeros((2, 10, 16, 2, 64), ml_dtypes.float8_e4m3fn)
    >>> k_scale, v_scale = np.ones((2, 10, 16, 2), np.float32)
    >>> slots = [7 * 16 + 15, 2 * 16, -1]  # the last place of block 7, the first of block 2
    >>> numba_attn.append_kv(
    ...     k, v, k_pool, v_pool, slots, k_scale=k_scale, v_scale=v_scale, compute_scales=True
    ... )
    >>> stored = k_pool[2, 0].astype(np.float32) * k_scale[2, 0, :, None]
    >>> bool(np.abs(stored - k[1]).max() < 0.07 * np.abs(k[1]).max())
    True
    """
    tokens = {"k": k, "v": v}
    pools = {"k_pool": k_pool, "v_pool": v_pool}
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    given = _run.given_arrays(**tokens, **pools, slot_mapping=slot_mapping, **scales)
    kind = _device.resolve("auto", _device.home(**given))
    backend = _device.backend(f"append_{kind}")
    for write in _validate_append.writes(tokens, pools, slot_mapping, scales, compute_scales):
        if write.scale is not None:  # a number is an array on the host
            write = write._replace(scale=_arrays.bring(kind, write.scale))
        backend.append(*write)
