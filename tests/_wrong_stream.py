"""Wrong arguments of streaming, and the text of the error; see `_wrong`."""

from __future__ import annotations

from types import SimpleNamespace

import _arguments as make
import numpy as np
from _arguments import S
from _wrong_options import kind, value

from numba_attn import AttentionState


def source_but(**changes):
    """Change attributes of a source; None takes one away."""

    def change(given):
        names = ("block_size", "num_kv_heads", "head_dim", "dtype", "read", "num_blocks")
        found = {name: getattr(given.source, name) for name in names} | changes
        return SimpleNamespace(**{name: x for name, x in found.items() if x is not None})

    return change


STREAM = [
    value("resident_blocks: must be at least 1, got 0", resident_blocks=0),
    kind("resident_blocks: expected an integer, got float; pass an int", resident_blocks=1.5),
    kind("resident_blocks: expected an integer, got bool", resident_blocks=True),
    value("prefetch: must be at least 0, got -1", prefetch=-1),
    kind("source: expected block_size, num_kv_heads, head_dim, dtype and read", source=None),
    kind(
        "got SimpleNamespace without dtype, read; arrays are wrapped by ArraySource(k_",
        source=source_but(dtype=None, read=None),
    ),
    value("source.block_size: must be at least 1, got 0", source=source_but(block_size=0)),
    kind("source.head_dim: expected an integer, got float", source=source_but(head_dim=8.0)),
    kind("source.dtype: expected bfloat16, float16, float32", source=source_but(dtype="int16")),
    value(
        "source.head_dim: must be D = 8, the head_dim of q, got 4", source=source_but(head_dim=4)
    ),
    value("q: Hq must be a multiple of Hkv, got Hq = 4", source=source_but(num_kv_heads=3)),
    value("block_tables: expected shape [S, max_blocks] with S = 2", block_tables=[1, 2]),
    kind("block_tables: expected integers [S, max_blocks], got None", block_tables=None),
    value("block_tables: ids in use must be from 0 to N - 1 = 4", block_tables=[[0, 1, 5]] * S),
    value(
        "block_tables: ids in use must be from 0 to N - 1 = 2147483647 (and fit int32), got -1",
        source=source_but(num_blocks=None),
        block_tables=[[0, 1, -1]] * S,
    ),
    value("seq_lens: expected shape [S] = (2,)", seq_lens=[9]),
    value("seq_lens: must be from 0 to 2^31", seq_lens=[2**31, 1], tile_token_counts=[1, 1]),
    value("seq_lens: must be from 0 to max_blocks * B = 12 (and fit", seq_lens=[9, 13]),
    value("tile_starts: must be from 0 to seq_len = 9, got 10 in row 0", tile_starts=[10, 0]),
    value("tile_starts: expected shape [S] = (2,)", tile_starts=[1]),
    value("tile_token_counts: expected shape [S] = (2,)", tile_token_counts=[1]),
    value("tile_token_counts: must be from 0 to max_blocks * B = 12", tile_token_counts=[13, 1]),
    value(
        "tile_starts: must be from 0 to seq_len (", tile_starts=[0, 0], tile_token_counts=[10, 1]
    ),
    kind("then: expected (source, block_tables, seq_lens), got int; pass", then=3),
    kind("then: expected (source, block_tables, seq_lens), got a tuple of 2", then=(1, 2)),
    value(
        "then: seq_lens: must be from 0 to max_blocks * B = 12 (and fit int32), got 13 in row 0",
        then=lambda g: (g.source, g.block_tables, [13, 1]),
    ),
    kind("state: expected an AttentionState, got int", state=3),
    value("state: expected [queries, Hq, Dv] = (2, 4, 6)", state=AttentionState(S, 4, 5)),
    value(
        "state: must be on the device of the call, 'cpu', got one on 'cuda'",
        state=lambda g: make.on_device_by_name(AttentionState(S, 4, 6)),
    ),
    value("out: must not overlap state", several=make.out_in_state),
    value("out: expected shape (2, 4, 6)", out=np.zeros((2, 4, 8), make.BF16)),
    value("sinks: expected shape [Hq] = (4,)", sinks=[1.0]),
    value("sliding_window: must be at least 1", sliding_window=0),
    value("kernel: only CUDA has a choice, got 'split'", kernel="split"),
    value("device: expected one of", device="gpu"),
    kind("return_lse: expected True or False", return_lse=1),
]

SOURCE = [
    kind("k_pool: expected a NumPy array or a CUDA array, got list", k_pool=[1.0]),
    kind(
        "k_pool: expected a NumPy array, got a CUDA array; pass it to paged_attention",
        k_pool=lambda g: make.FakeDeviceArray(g.k_pool),
    ),
    kind("v_pool: expected dtype bfloat16", v_pool=lambda g: g.v_pool.astype(np.float64)),
    value("k_pool: expected 4 axes [N, B, Hkv, D]", k_pool=lambda g: g.k_pool[0]),
    value("v_pool: its first three axes [N, B, Hkv]", v_pool=lambda g: g.v_pool[:, :2]),
]
