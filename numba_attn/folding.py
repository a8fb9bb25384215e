"""What is done with states alone: merge and finalize."""

from __future__ import annotations

from typing import Any

from . import (
    _arrays,
    _device,
    _frameworks,
    _plan,
    _run,
    _validate,
    _validate_options,
    _validate_state,
)
from ._types import Array
from .state import AttentionState


@_frameworks.taking_arrays("state")
@_device.streamed
def merge(state: AttentionState, other: AttentionState, *, stream: Any = None) -> None:
    """Merge another state over disjoint keys into `state`, which is modified.

    An empty state is the identity: the other side survives bit for bit.

    Parameters
    ----------
    state : AttentionState
        Modified in place.
    other : AttentionState
        Same shape, same device; left as it is.
    stream : optional
        As in `paged_attention`.

    Raises
    ------
    ValueError
        If the states have different shapes or devices, or are one and the same.
    TypeError
        If one is no `AttentionState`.

    References
    ----------
    Milakov & Gimelshein, "Online normalizer calculation for softmax", 2018.

    Examples
    --------
    >>> import numba_attn
    >>> a, b = (numba_attn.AttentionState(1, 2, 4) for _ in range(2))
    >>> b.m[:], b.l[:], b.o[:] = 0.5, 2.0, 1.0
    >>> numba_attn.merge(a, b)
    >>> a.m.tolist(), a.l.tolist()
    ([[0.5, 0.5]], [[2.0, 2.0]])
    """
    _validate_state.is_state("state", state, AttentionState)
    _validate_state.is_state("other", other, AttentionState)
    _validate_options.launch(state.device, "auto", stream)
    _validate_state.states_merge(state, other)
    starts = _arrays.bring(state.device, _plan.one_each(state.m.shape[0]))
    _device.backend(state.device).merge_splits(state, other, starts)


@_frameworks.taking_arrays("state")
@_device.streamed
def finalize(
    state: AttentionState,
    *,
    sinks: Any = None,
    dtype: Any = "bfloat16",
    return_lse: bool = False,
    out: Array | None = None,
    stream: Any = None,
) -> Any:
    """Normalise a state into the attention output ``o / l``; the state is left as it is.

    Parameters
    ----------
    state : AttentionState
    sinks : float [Hq], optional
        One more logit per head, with value 0, counted here only; the state never includes it.
    dtype : dtype
        bfloat16, float16, float32, or uint16 for the bits of bfloat16. On a CUDA device a bfloat16
        result carries its bits either way.
    return_lse : bool
        Return also the log-sum-exp: ``state.lse``, with `sinks` the sink included.
    out : array [num_queries, Hq, Dv], optional
        Array of `dtype`, on the state's device, to write the result into.
    stream : optional
        As in `paged_attention`.

    Returns
    -------
    out : [num_queries, Hq, Dv]
        Rounded to nearest even; 0 for an empty row.
    lse : float32 [num_queries, Hq]
        Only with ``return_lse``.

    Raises
    ------
    ValueError, TypeError
        If `out` has another shape, dtype or device, or `dtype` is not supported.

    Examples
    --------
    >>> import numba_attn
    >>> state = numba_attn.AttentionState(1, 2, 4)
    >>> numba_attn.finalize(state).tolist()[0][0]
    [0.0, 0.0, 0.0, 0.0]
    """
    _validate_state.is_state("state", state, AttentionState)
    _validate.flag("return_lse", return_lse)
    _validate_options.launch(state.device, "auto", stream)
    dtype = _validate.known_dtype("dtype", dtype, _arrays.QUERY_FORMATS)
    sinks = _validate_options.per_head("sinks", sinks, state.m.shape[1])
    if out is not None:
        _validate_state.out_device(_device.home(out=out), state.device)
        expected = _arrays.result_dtype(state.device, dtype)
        given = {"state": state.buffer, "sinks": sinks}
        _validate.out(out, tuple(state.o.shape), expected, given)
    return _run.finish(state, state.device, tuple(state.o.shape), dtype, sinks, return_lse, out)
