"""Attention of one query by a dense softmax in float64, for what other libraries' calls promise."""

import math

import numpy as np

LN2 = math.log(2)
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def one(length=50):
    """Draw q [4, 32], k and v [length, 1, 32]."""
    return draw(4, 32), draw(length, 1, 32, seed=1), draw(length, 1, 32, seed=2)


def attend(q, k, v, *, scale=None, softcap=0.0, slopes=None, position=None, keys=None):
    """Return out [Hq, Dv] and the natural lse [Hq] of q [Hq, D] over k [L, Hkv, D], v.

    `position` of the query (the last key's by default), `keys`: which of the L are attended to.
    """
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    group = q.shape[0] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))  # [L, Hq, D]
    s = np.einsum("hd,lhd->hl", q, k) * (q.shape[1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * np.tanh(s / softcap)
    position = len(k) - 1 if position is None else position
    if slopes is not None:
        s = s + np.asarray(slopes, np.float64)[:, None] * (np.arange(len(k)) - position)
    if keys is not None:
        s = np.where(keys, s, -np.inf)
    m = s.max(axis=1, keepdims=True, initial=-np.inf)
    if not np.isfinite(m).all():
        return np.zeros((len(q), v.shape[2])), np.full(len(q), -np.inf)
    p = np.exp(s - m)
    out = np.einsum("hl,lhd->hd", p, v) / p.sum(axis=1)[:, None]
    return out, m[:, 0] + np.log(p.sum(axis=1))
