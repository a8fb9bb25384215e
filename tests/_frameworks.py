"""What every framework's arrays are tested with: one small case of each option, and its answer."""

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
FORMATS = {
    "bfloat16": BF16,
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
}
S, Hq, Hkv, D, N, B = 3, 4, 2, 16, 12, 4
LENS = np.array([11, 0, 6], np.int32)
TABLES = np.array([[3, 1, 4], [-1, -1, -1], [0, 7, 2147480000]], np.int32)


def pools(kv="bfloat16", seed=0):
    """Draw pools [N, B, Hkv, D]."""
    numbers = np.random.default_rng(seed).standard_normal((2, N, B, Hkv, D))
    return [(x * 32 if kv == "int8" else x).astype(FORMATS[kv]) for x in numbers]


def call(q="bfloat16", kv="bfloat16", seed=0):
    """Draw the arguments of `paged_attention`, all NumPy arrays."""
    queries = np.random.default_rng(seed + 1).standard_normal((S, Hq, D)).astype(FORMATS[q])
    k_pool, v_pool = pools(kv, seed)
    return {
        "q": queries,
        "k_pool": k_pool,
        "v_pool": v_pool,
        "block_tables": TABLES.copy(),
        "seq_lens": LENS.copy(),
    }


def oracle(q, k_pool, v_pool, block_tables, seq_lens, scale=None, sinks=None, window=None):
    """Attend in float64, from the definition; return out [S, Hq, D] and lse [S, Hq]."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for s, h in np.ndindex(out.shape[:2]):
        token = np.arange(seq_lens[s])
        if window is not None:
            token = token[-window:]
        where = block_tables[s, token // B], token % B, h // (Hq // Hkv)
        keys, values = (pool[where].astype(np.float64) for pool in (k_pool, v_pool))
        logits = scale * keys @ q[s, h].astype(np.float64)
        more = [] if sinks is None else [float(sinks[h])]
        weights = np.exp(np.append(logits, more))
        if weights.sum():
            out[s, h] = weights[: len(token)] @ values / weights.sum()
            lse[s, h] = np.log(weights.sum())
    return out, lse


OPTIONS = {
    "plain": {},
    "scaled and capped": {"scale": 0.3, "softcap": 4.0, "sliding_window": 5, "causal": True},
    "by head": {
        "alibi_slopes": np.linspace(0.1, 0.4, Hq, dtype=np.float32),
        "sinks": np.linspace(-1, 1, Hq, dtype=np.float32),
        "k_scale": np.array([0.5, 2], np.float32),
        "v_scale": np.array([3, 0.25], np.float32),
    },
    "by token": {
        "k_scale": np.random.default_rng(3).uniform(0.5, 2, (N, B, Hkv)).astype(np.float32),
        "v_scale": np.random.default_rng(4).uniform(0.5, 2, (N, B, Hkv)).astype(np.float32),
        "seq_starts": np.array([2, 0, 1], np.int32),
    },
    "ragged": {"query_start_loc": np.array([0, 2, 2, 3], np.int64)},
    "numbers": {"k_scale": np.array(0.5, np.float32), "v_scale": np.array(2.0, np.float32)},
}


def bits(array):
    """Return the bytes of a host array, whatever its dtype."""
    return np.ascontiguousarray(array).tobytes()
