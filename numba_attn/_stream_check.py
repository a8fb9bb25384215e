"""Attention over a layer on disk in float64, to check a streamed one.

It shares no code with what it checks: NumPy alone, on a plain ``.npy`` that is read in pieces.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from ._check import Check, bound, largest
from ._types import HostArray

_PIECE_BYTES = 1 << 22


def check(
    path: pathlib.Path,
    context: int,
    q: HostArray,
    out: HostArray,
    lse: HostArray,
    *,
    heads: list[int],
    on_progress: Callable[[float], None],
) -> list[Check]:
    """Compare some heads of float32 `out` [Hq, D] and `lse` [Hq] over the first tokens of a file.

    The file is that of a layer in bfloat16, [N, 2, B, Hkv, D], its blocks in the order of the
    tokens; q is [Hq, D]. The bound is that of `_check`.
    """
    exact, plain = ([Softmax(q[head], dtype) for head in heads] for dtype in (float, np.float32))
    done = 0
    for k, v in tokens(path):
        k, v = k[: context - done], v[: context - done]  # [tokens, Hkv, D]
        for head, *pair in zip(heads, exact, plain, strict=True):
            kv_head = head // (len(q) // k.shape[1])
            for softmax in pair:
                softmax.absorb(k[:, kv_head], v[:, kv_head])
        done += len(k)
        on_progress(done / context)
    outs, sums = [], []
    for side in (exact, plain):
        outs.append(np.array([softmax.out for softmax in side]))
        sums.append(np.array([softmax.lse for softmax in side]))
    row = np.abs(outs[0]).max(axis=-1, keepdims=True)
    return [
        _compare("out", out[heads] / row, *(side / row for side in outs)),
        _compare("lse", lse[heads], *sums),
    ]


def _compare(quantity: str, found: HostArray, exact: HostArray, plain: HostArray) -> Check:
    most = bound(np.abs(plain - exact), largest(np.abs(exact)))
    return Check("cpu", "streamed", quantity, largest(np.abs(found - exact)), most)


class Softmax:
    """Attention of one query [D], a piece of its keys and values at a time.

    Values are added token by token, as if all were there: how they come does not show.
    """

    def __init__(self, q: HostArray, dtype: Any) -> None:
        self._q = q.astype(dtype) / np.sqrt(np.array(len(q), dtype))
        self._m: Any = np.array(-np.inf, dtype)  # largest logit
        self._l: Any = np.array(0, dtype)  # sum of exp(logit - m)
        self._o: Any = np.zeros(len(q), dtype)  # sum of exp(logit - m) * v

    def absorb(self, k: HostArray, v: HostArray) -> None:
        """Absorb keys and values [tokens, D]."""
        logits = k.astype(self._q.dtype) @ self._q
        m = np.maximum(self._m, logits.max())
        p, older = np.exp(logits - m), np.exp(self._m - m)
        self._l = older * self._l + p.sum()
        terms = np.concatenate([[older * self._o], p[:, None] * v.astype(p.dtype)])
        self._o = np.add.reduce(terms, axis=0)
        self._m = m

    @property
    def out(self) -> HostArray:
        """Attention so far, [D]."""
        out: HostArray = self._o / self._l
        return out

    @property
    def lse(self) -> float:
        """Log-sum-exp of the logits so far."""
        return float(self._m + np.log(self._l))


def tokens(path: pathlib.Path) -> Iterator[tuple[HostArray, HostArray]]:
    """Read K and V [tokens, Hkv, D] of a layer, some blocks at a time."""
    with open(path, "rb") as file:
        np.lib.format.read_magic(file)
        (left, *shape), _, dtype = np.lib.format.read_array_header_1_0(file)
        size = int(np.prod(shape))
        while left:
            count = min(left, max(1, _PIECE_BYTES // (size * dtype.itemsize)))
            blocks = np.fromfile(file, dtype, count * size).view(ml_dtypes.bfloat16)
            blocks = blocks.reshape(count, *shape)
            k, v = (blocks[:, side].reshape(-1, *shape[2:]) for side in (0, 1))
            yield k, v
            left -= count
