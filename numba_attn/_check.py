"""Hold a device's answers against the float64 reference, within the package's error bound.

The bound is twice the error of a plain float32 evaluation of the same inputs, and a few roundings:
``|x - ref| <= 2 max|plain - ref| + 8 * 2^-24 * max(1, max|ref|)``. Outputs are measured in units of
their row's largest magnitude; half a bfloat16 ulp is allowed beyond it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import _arrays, api, folding, reference
from ._plan import ceil_div
from ._workloads import Step, Workload, make_steps
from .state import AttentionState

Float64Array = npt.NDArray[np.float64]

_EPS = 2.0**-24
_TILE_BLOCKS = 3

RAGGED = Workload("check", (0, 1, 17, 700, 1030), 32, 8, 128)
TINY = Workload("check", (0, 5, 19), 4, 2, 8, block_size=4)
"""For the simulator, which runs each CUDA thread as a Python thread."""


class Answer(NamedTuple):
    """Attention before it is rounded, and its log-sum-exp."""

    out: Float64Array  # [S, Hq, Dv]
    lse: Float64Array  # [S, Hq]


@dataclasses.dataclass(frozen=True)
class Check:
    """One comparison with the reference."""

    device: str
    way: str
    quantity: str
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        """Tell whether it holds; NaN does not."""
        return self.error <= self.bound

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "FAIL"
        return (
            f"{self.device:5} {self.way:13} {self.quantity:4} {verdict:4} "
            f"error {self.error:.1e}, bound {self.bound:.1e}"
        )


def check_device(device: str, workload: Workload, *, kernel: str = "auto") -> Iterator[Check]:
    """Run a workload on a device in one call and tile by tile; compare both with the reference."""
    (step,) = make_steps(workload, 1)
    out, lse = api.paged_attention(*step.arguments(), return_lse=True, device=device, kernel=kernel)
    yield from check_answer(device, "one call", step, out, lse)
    state = _tile_by_tile(device, step, kernel)
    out, lse = folding.finalize(state, return_lse=True, dtype=np.uint16)
    out = _arrays.to_host(out).view(step.q.dtype)
    yield from check_answer(device, "tile by tile", step, out, _arrays.to_host(lse))


def check_answer(device: str, way: str, step: Step, out: Any, lse: Any) -> Iterator[Check]:
    """Compare bfloat16 `out` [S, Hq, D] and float32 `lse` [S, Hq] with the reference."""
    exact, plain = _reference(step), _plain(step)
    values = np.asarray(out, np.float64)
    row = np.abs(exact.out).max(axis=-1, keepdims=True)
    unit = np.where(row == 0, 1, row)
    excess = np.maximum(np.abs(values - exact.out) - _half_ulp(values), 0) / unit
    most = bound(np.abs(plain.out - exact.out) / unit, 1.0)
    yield Check(device, way, "out", largest(excess), most)

    lse = np.asarray(lse, np.float64)
    kept = exact.lse != -np.inf
    most = bound(np.abs(plain.lse[kept] - exact.lse[kept]), largest(np.abs(exact.lse[kept])))
    error = largest(np.abs(lse[kept] - exact.lse[kept]))
    yield Check(device, way, "lse", error if (lse[~kept] == -np.inf).all() else np.inf, most)


def part(step: Step, out: Any, lse: Any, tokens: int) -> tuple[Step, Any, Any]:
    """Take the first sequence and as many kv heads as keep the reference to about `tokens`.

    The oracle is slow; a step's heads and sequences are computed alike.
    """
    length = max(1, int(step.seq_lens[0]))
    num_kv_heads = step.k_pool.shape[2]
    gqa = step.q.shape[1] // num_kv_heads
    kept = min(num_kv_heads, max(1, tokens // (length * gqa)))
    first = num_kv_heads - kept  # the last heads: the furthest from where pointers begin
    heads, kv_heads = slice(first * gqa, None), slice(first, None)
    subset = Step(
        step.q[:1, heads],
        step.k_pool[:, :, kv_heads],
        step.v_pool[:, :, kv_heads],
        step.block_tables[:1],
        step.seq_lens[:1],
    )
    return subset, out[:1, heads], lse[:1, heads]


def _tile_by_tile(device: str, step: Step, kernel: str) -> AttentionState:
    """Absorb a step's cache a few blocks at a time."""
    num_seqs, num_q_heads, _ = step.q.shape
    block_size, _, head_dim = step.v_pool.shape[1:]
    state = AttentionState(num_seqs, num_q_heads, head_dim, device=device)
    tile_tokens = _TILE_BLOCKS * block_size
    for tile in range(ceil_div(int(step.seq_lens.max()), tile_tokens)):
        tokens = np.clip(step.seq_lens - tile * tile_tokens, 0, tile_tokens)
        api.step_tile(
            state,
            step.q,
            step.k_pool,
            step.v_pool,
            step.block_tables[:, tile * _TILE_BLOCKS : (tile + 1) * _TILE_BLOCKS],
            -(-tokens // block_size),
            tile_token_counts=tokens,
            kernel=kernel,
        )
    return state


def _reference(step: Step) -> Answer:
    """Evaluate in float64."""
    state = reference.AttentionState.like(step.q, step.v_pool)
    counts = -(-step.seq_lens // step.k_pool.shape[1])
    arguments = (step.q, step.k_pool, step.v_pool, step.block_tables, counts)
    reference.step_tile(state, *arguments, tile_token_counts=step.seq_lens)
    return Answer(*reference.finalize(state, dtype=np.float64, return_lse=True))


def _plain(step: Step) -> Answer:
    """Evaluate the two-pass softmax in float32, as one would without knowing better."""
    num_seqs, num_q_heads, head_dim = step.q.shape
    block_size, num_kv_heads = step.k_pool.shape[1:3]
    gqa = num_q_heads // num_kv_heads
    scale = np.float32(1 / np.sqrt(head_dim))
    answer = Answer(np.zeros(step.q.shape), np.full((num_seqs, num_q_heads), -np.inf))
    for s, length in enumerate(step.seq_lens.tolist()):
        blocks = step.block_tables[s, : ceil_div(length, block_size)]
        q = step.q[s].astype(np.float32)  # [Hq, D]
        k, v = (  # [tokens, Hkv, D]
            pool[blocks].reshape(-1, num_kv_heads, head_dim)[:length].astype(np.float32)
            for pool in (step.k_pool, step.v_pool)
        )
        for h in range(num_q_heads if length else 0):
            logits = scale * (k[:, h // gqa] @ q[h])
            m = logits.max()
            p = np.exp(logits - m)
            answer.out[s, h] = p @ v[:, h // gqa] / p.sum()
            answer.lse[s, h] = m + np.log(p.sum())
    return answer


def bound(plain_error: Float64Array, magnitude: float) -> float:
    """Return the largest error that holds, of values up to a magnitude."""
    return 2 * largest(plain_error) + 8 * _EPS * max(1.0, magnitude)


def largest(values: Float64Array) -> float:
    """Return the largest of some values, 0 of none; NaN if one is."""
    return float(np.max(values, initial=0.0))


def _half_ulp(values: Float64Array) -> Float64Array:
    """Return half the distance between bfloat16 neighbours of `values`."""
    _, exponent = np.frexp(np.where(np.isfinite(values), values, 0))
    half: Float64Array = np.ldexp(0.5, np.maximum(exponent, -125) - 8)
    return half
