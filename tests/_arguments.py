"""Valid arguments of every public function, and ways to spoil them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

import numba_attn
from numba_attn import AttentionState

BF16 = np.dtype(ml_dtypes.bfloat16)
S, Hq, Hkv, D, Dv, N, B = 2, 4, 2, 8, 6, 5, 4


def valid(function):
    """Make valid arguments of a public function."""
    rng = np.random.default_rng(7)
    q, k_pool, v_pool = (
        rng.standard_normal(shape).astype(BF16)
        for shape in [(S, Hq, D), (N, B, Hkv, D), (N, B, Hkv, Dv)]
    )
    inputs = {"q": q, "k_pool": k_pool, "v_pool": v_pool}
    tables = np.array([[3, 1, 4], [0, 2, -1]], np.int32)
    lens, counts = np.array([9, 5], np.int32), np.array([3, 2], np.int32)
    out = np.full((S, Hq, Dv), 7, BF16)
    state, other = _filled_state(rng), _filled_state(rng)
    streamed = {"source": numba_attn.ArraySource(k_pool, v_pool), "resident_blocks": 2}
    return {
        "paged_attention": inputs | {"block_tables": tables, "seq_lens": lens, "out": out},
        "step_tile": inputs | {"state": state, "tile_blocks": tables, "tile_block_counts": counts},
        "merge": {"state": state, "other": other},
        "finalize": {"state": state, "out": out},
        "AttentionState": {"num_seqs": S, "num_q_heads": Hq, "head_dim": Dv},
        "AttentionState.like": {"q": q, "v_pool": v_pool},
        "warmup": {"num_q_heads": Hq, "num_kv_heads": Hkv, "head_dim": D, "v_head_dim": Dv},
        "stream_attention": streamed
        | {"q": q, "block_tables": tables, "seq_lens": lens, "out": out, "prefetch": 1},
        "ArraySource": {"k_pool": k_pool, "v_pool": v_pool},
        "set_num_threads": {"num_threads": numba_attn.get_num_threads()},
        "_threads._default_num_threads": {},
    }[function]


def _filled_state(rng):
    state = AttentionState(S, Hq, Dv)
    state.m[:], state.l[:] = rng.standard_normal((2, S, Hq))
    state.o[:] = rng.standard_normal((S, Hq, Dv))
    return state


class FakeDeviceArray:
    """What `_device.is_device_array` takes for an array on a GPU."""

    def __init__(self, like, dtype=None):
        self.shape, self.strides = like.shape, like.strides
        self.dtype = np.dtype(dtype or (np.uint16 if like.dtype == BF16 else like.dtype))
        self.__cuda_array_interface__ = {}


def on_device(given, **dtypes):
    """Replace every array by one that looks like a device's."""
    arrays = {name: a for name, a in vars(given).items() if isinstance(a, np.ndarray)}
    return {name: FakeDeviceArray(a, dtypes.get(name)) for name, a in arrays.items()}


def on_device_by_name(state):
    state.device = "cuda"
    return state


def unaligned(array):
    raw = np.zeros(array.nbytes + 1, np.uint8)[1:]
    return raw.view(array.dtype).reshape(array.shape)


def every_other_column(array):
    return array.repeat(2, -1)[..., ::2]


def read_only(array):
    array.flags.writeable = False
    return array


def one_row_repeated(out):
    return np.lib.stride_tricks.as_strided(out, strides=(0, *out.strides[1:]))


def out_over_the_end_of_q(given):
    packed = np.zeros((S, Hq, D + Dv), BF16)
    return {"q": packed[:, :, :D], "out": packed[:, :, D - 1 : D - 1 + Dv]}


def out_over_the_lengths(given):
    given.out[:] = 0
    return {"seq_lens": given.out.view(np.int16)[:, 0, 0]}


def sinks_in_out(given):
    out = np.zeros((S, Hq, Dv), np.float32)
    return {"out": out, "sinks": out[0, 0, :Hq]}


def out_in_state(given):
    state = AttentionState(S, Hq, Dv)
    return {"out": state.buffer.view(BF16)[: S * Hq * Dv].reshape(S, Hq, Dv), "state": state}


def contiguous_caches(given):
    return {"block_tables": None, "q": given.q[[0, 1, 0, 1, 0]], "seq_lens": [1, 2, 3, 4, 0]}


def huge_tile(given):
    """Make a tile of 2^31 tokens, in a pool that takes no memory."""
    pool = np.lib.stride_tricks.as_strided(np.zeros(D, BF16), (1, 2**30, Hkv, D), (0, 0, 0, 2))
    tile = {"tile_blocks": np.zeros((S, 2), np.int32), "tile_block_counts": [1, 2]}
    return {"k_pool": pool, "v_pool": pool[..., :Dv]} | tile


def huge_pool(given):
    """Address a block past int32, in a pool that takes no memory."""
    pool = np.lib.stride_tricks.as_strided(np.zeros(D, BF16), (2**33, B, Hkv, D), (0, 0, 0, 2))
    tables = np.array([[2**31 - 1], [2**31]])
    return {"k_pool": pool, "v_pool": pool[..., :Dv], "block_tables": tables, "seq_lens": [1, 1]}
