"""The resumable state of an attention: what has been absorbed so far."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from . import (
    _arrays,
    _device,
    _frameworks,
    _partials,
    _validate,
    _validate_options,
    _validate_state,
)
from ._types import Array, HostArray


class AttentionState:
    """Running softmax attention ``(m, l, o)`` of a batch; starts as the identity (no keys seen).

    Float32 and unnormalised: ``m`` is the largest logit seen, ``l`` the sum of ``exp(s - m)`` and
    ``o`` the sum of ``exp(s - m) * v``. It survives between calls, so that keys and values may
    come a tile at a time, from anywhere; states over disjoint keys combine with `merge`.

    Parameters
    ----------
    num_seqs, num_q_heads, head_dim : int
        S, Hq and Dv (the head_dim of v).
    num_queries : int, optional
        Query tokens of the batch in all, by default one for each sequence.
    device : {"cpu", "cuda"}
        Where the state lives; it decides where `step_tile`, `merge` and `finalize` run.

    Attributes
    ----------
    m, l : float32 [num_queries, Hq]
    o : float32 [num_queries, Hq, Dv]
    buffer : float32 [num_queries * Hq * (Dv + 2)]
        The contiguous memory that ``m``, ``l`` and ``o`` are views of, in this order: one message,
        one copy.
    device : str
    framework : {None, "torch", "jax", "cupy"}
        Whose arrays `finalize`, `to_partial` and `lse` return, those of `like` and `from_partial`;
        None: NumPy's (on a device, Numba's), as ``m``, ``l``, ``o`` and ``buffer`` always are.

    Raises
    ------
    ValueError
        If a size is negative, or Hq or Dv is 0.
    RuntimeError
        If the device is not available.

    References
    ----------
    Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023.

    Examples
    --------
    >>> import numba_attn
    >>> state = numba_attn.AttentionState(num_seqs=2, num_q_heads=8, head_dim=64)
    >>> state.o.shape, float(state.m[0, 0]), float(state.l[0, 0])
    ((2, 8, 64), -inf, 0.0)
    """

    def __init__(
        self,
        num_seqs: int,
        num_q_heads: int,
        head_dim: int,
        *,
        num_queries: int | None = None,
        device: str = "cpu",
    ) -> None:
        num_seqs, num_queries, num_q_heads, head_dim = _validate_state.positive_sizes(
            num_seqs=num_seqs,
            num_queries=num_seqs if num_queries is None else num_queries,
            num_q_heads=num_q_heads,
            head_dim=head_dim,
        )
        self.device: str = _device.resolve(device, home="cpu")
        self.framework: str | None = None
        rows = num_queries * num_q_heads
        self.scratch: dict[str, Array] = {}  # of a backend: what a step needs again and again
        self._buffer: Array = _arrays.empty(self.device, (rows * (head_dim + 2),), np.float32)
        self._m: Array = self._buffer[:rows].reshape(num_queries, num_q_heads)
        self._l: Array = self._buffer[rows : 2 * rows].reshape(num_queries, num_q_heads)
        self._o: Array = self._buffer[2 * rows :].reshape(num_queries, num_q_heads, head_dim)
        self._clear()

    # Kernels trust these shapes: what is in the arrays may change, the arrays may not.
    buffer = property(operator.attrgetter("_buffer"), doc="All of it, float32, contiguous.")
    m = property(operator.attrgetter("_m"), doc="Running maximum of the logits, [queries, Hq].")
    l = property(operator.attrgetter("_l"), doc="Running sum of exp(s - m), [queries, Hq].")
    o = property(operator.attrgetter("_o"), doc="Running sum of exp(s - m) * v, [queries, Hq, Dv].")

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle by value: the arrays stay views of one buffer."""
        host = _arrays.to_host(self.buffer)
        return _restore, (tuple(self.o.shape), self.device, host, self.framework)

    @classmethod
    @_frameworks.taking_arrays("q")
    def like(cls, q: Array, v_pool: Array) -> AttentionState:
        """Make a state that fits queries and values, on the device they are on.

        Parameters
        ----------
        q : [S, Hq, D], [S, Q, Hq, D] or [num_queries, Hq, D]
        v_pool : [N, B, Hkv, Dv]

        Returns
        -------
        AttentionState
            With a row for each query token; empty.

        Examples
        --------
        >>> import numpy as np
        >>> from numba_attn import AttentionState
        >>> q, v_pool = np.zeros((2, 8, 64), np.uint16), np.zeros((9, 16, 4, 32), np.uint16)
        >>> AttentionState.like(q, v_pool).o.shape
        (2, 8, 32)
        """
        _validate.axes("q", q, "[S, Hq, D] or [S, Q, Hq, D]", 3, 4)
        _validate.axes("v_pool", v_pool, "[N, B, Hkv, Dv]", 4)
        home = _device.home(q=q, v_pool=v_pool)
        rows = math.prod(q.shape[:-2])
        return cls(q.shape[0], tuple(q.shape)[-2], v_pool.shape[3], num_queries=rows, device=home)

    @classmethod
    @_frameworks.taking_arrays("out", writes=())
    def from_partial(cls, out: Array, lse: Array, *, base: str = "e") -> AttentionState:
        """Make a state of the partial result of another kernel, to `merge` it with others.

        Parameters
        ----------
        out : float [num_queries, Hq, Dv] or [S, Q, Hq, Dv]
            Normalised output over some of the keys, in any float dtype; uint16 is taken as bfloat16
            bits.
        lse : float [num_queries, Hq] or [S, Q, Hq]
            Log-sum-exp of the logits of these keys, without a sink. Where it is -inf or +inf no key
            has been seen, and `out` is ignored.
        base : {"e", "2"}
            Base of the logarithm: "e" for FlashAttention and vLLM, "2" for FlashInfer.

        Returns
        -------
        AttentionState
            On the device of the arrays, which are copied.

        Raises
        ------
        ValueError, TypeError
            For other shapes, dtypes and bases.

        Examples
        --------
        >>> import numpy as np
        >>> from numba_attn import AttentionState, finalize, merge
        >>> out = np.array([[[1.0, 2.0]]], np.float32)
        >>> state = AttentionState.from_partial(out, np.array([[3.0]]), base="2")
        >>> merge(state, AttentionState.from_partial(-out, np.array([[1.0]]), base="2"))
        >>> print(finalize(state, dtype=np.float32).round(3))  # weights 8 and 2
        [[[0.6 1.2]]]
        """
        home = _device.home(out=out, lse=lse)
        parts = _partials.to_parts(out, lse, base)
        state = cls(*parts.o.shape, device=home)
        _arrays.overwrite(state.buffer, np.concatenate([part.ravel() for part in parts]))
        return state

    @_frameworks.taking_arrays("self")
    def to_partial(self, *, base: str = "e") -> tuple[Array, Array]:
        """Return the result so far, for another kernel to merge; the state is left as it is.

        Parameters
        ----------
        base : {"e", "2"}
            Base of the logarithm: "e" for FlashAttention and vLLM, "2" for FlashInfer.

        Returns
        -------
        out : float32 [num_queries, Hq, Dv]
            ``o / l``; 0 where no key has been seen.
        lse : float32 [num_queries, Hq]
            Log-sum-exp of the logits, without any sink; -inf where no key has been seen.

        Raises
        ------
        ValueError
            For another base.

        Examples
        --------
        >>> import numpy as np
        >>> from numba_attn import AttentionState
        >>> state = AttentionState(1, 1, 2)
        >>> state.m[:], state.l[:], state.o[:] = 0.0, 8.0, 4.0
        >>> out, lse = state.to_partial(base="2")
        >>> out.tolist(), lse.tolist()
        ([[[0.5, 0.5]]], [[3.0]])
        """
        _partials.log_of(base)
        out = _arrays.empty(self.device, tuple(self.o.shape), np.float32)
        lse = _arrays.empty(self.device, tuple(self.m.shape), np.float32)
        if self.o.size:
            _device.backend(self.device).finalize(self, None, out, lse, "float32")
        if base != "e":
            lse = _arrays.bring(self.device, _partials.in_base(_arrays.to_host(lse), base))
        return out, lse

    @_frameworks.taking_arrays("self")
    @_device.streamed
    def reset(self, *, stream: Any = None) -> None:
        """Return to the identity ``(-inf, 0, 0)``, in place.

        Parameters
        ----------
        stream : optional
            Where to launch on CUDA, as in `paged_attention`.
        """
        _validate_options.launch(self.device, "auto", stream)
        self._clear()

    def _clear(self) -> None:
        if self.device == "cuda":
            _device.backend("cuda").reset(self)
        else:
            self.buffer.fill(0)
            self.m.fill(-np.inf)

    @property
    @_frameworks.taking_arrays("self")
    def lse(self) -> Array:
        """Log-sum-exp of the logits, ``m + log(l)``: float32 [num_queries, Hq]; -inf if empty."""
        m, l = _arrays.to_host(self.m), _arrays.to_host(self.l)
        with np.errstate(divide="ignore", invalid="ignore"):
            lse = np.where(l == 0, np.float32(-np.inf), m + np.log(l))
        return _arrays.bring(self.device, lse)

    def __repr__(self) -> str:
        sizes = dict(zip(("num_seqs", "num_q_heads", "head_dim"), self.o.shape, strict=True))
        text = ", ".join(f"{name}={size}" for name, size in sizes.items())
        return f"AttentionState({text}, device={self.device!r})"


def _restore(
    shape: tuple[int, int, int], device: str, buffer: HostArray, framework: str | None
) -> AttentionState:
    """Make a state again from what `AttentionState.__reduce__` kept."""
    state = AttentionState(*shape, device=device)
    state.framework = framework
    _arrays.overwrite(state.buffer, buffer)
    return state
