"""What is right: a two-pass softmax over the tokens themselves, wherever they are stored."""

import numpy as np
from _cases import Answer, Sequences


def dense(seqs: Sequences, dtype=np.float64) -> Answer:
    """Evaluate the softmax on the widened tokens: out [queries, Hq, Dv] and lse [queries, Hq].

    In float32 it is the "plain" evaluation of the bound.
    """
    num_q_heads, v_head_dim = seqs.q.shape[-2], seqs.values[0].shape[2]
    out = np.zeros((sum(map(len, seqs.queries)), num_q_heads, v_head_dim), dtype)
    lse = np.full(out.shape[:2], -np.inf, dtype)
    row = 0
    for s, queries in enumerate(seqs.queries):
        q, k, v = (x.astype(dtype) for x in (queries, seqs.keys[s], seqs.values[s]))
        for i, seen in enumerate(seqs.mask(s)):
            distance = np.nonzero(seen)[0] - (len(k) - len(q) + i)
            for h in range(num_q_heads):
                kv = h // (num_q_heads // k.shape[1])
                k_scale, v_scale = (
                    dtype(1.0) if scale is None else scale[s][seen, kv].astype(dtype)
                    for scale in scales(seqs)
                )
                with np.errstate(invalid="ignore"):
                    logits = logits_of(seqs, q[i, h], k[seen, kv], k_scale, h, distance)
                    values = v[seen, kv] * v_scale[..., None]
                    out[row, h], lse[row, h] = softmax(logits, values, sink_of(seqs, h))
            row += 1
    return Answer(out, lse)


def scales(seqs):
    """Return the scales of keys and of values, S x [tokens, Hkv] or None."""
    for common, by_token, rows in (
        (seqs.k_scale, seqs.key_scales, seqs.keys),
        (seqs.v_scale, seqs.value_scales, seqs.values),
    ):
        if common is not None:
            by_token = [np.broadcast_to(np.float32(common), x.shape[:2]) for x in rows]
        yield by_token


def logits_of(seqs, q, k, k_scale, h, distance):
    """Score one query [D] against keys [n, D] that are so far from it [n]."""
    dtype = q.dtype.type
    scale = dtype(1 / np.sqrt(len(q)) if seqs.scale is None else seqs.scale)
    logits = scale * k_scale * (k @ q)
    if seqs.softcap is not None:
        logits = dtype(seqs.softcap) * np.tanh(logits / dtype(seqs.softcap))
    if seqs.alibi_slopes is not None:
        logits = logits + dtype(seqs.alibi_slopes[h]) * distance.astype(dtype)
    return logits


def sink_of(seqs, h):
    return -np.inf if seqs.sinks is None else seqs.sinks[h]


def softmax(logits, values, sink):
    """Weigh values [n, Dv]; a sink is one more logit, with value 0."""
    logits = np.append(logits, logits.dtype.type(sink))
    m = logits.max()
    if m == -np.inf:
        return 0, -np.inf
    p = np.exp(logits - m)
    return p[:-1] @ values / p.sum(), m + np.log(p.sum())
