"""Wrong options, and the text of the error: (changes, error, text) each; see `_wrong`."""

from __future__ import annotations

import numpy as np
from _arguments import FakeDeviceArray, Hq, on_device, on_device_by_name, out_in_state

from numba_attn import AttentionState


def value(text, several=None, **changes):
    return changes | ({"several": several} if several else {}), ValueError, text


def kind(text, several=None, **changes):
    return changes | ({"several": several} if several else {}), TypeError, text


SLOPES = np.ones(Hq, np.float32)
OPTIONS = [  # of paged_attention and step_tile alike
    kind("softcap: expected a real number or None, got str; pass a float", softcap="30"),
    value("softcap: must be positive and finite in float32, got 0.0; None stands", softcap=0),
    value("softcap: must be positive and finite in float32, got inf", softcap=np.inf),
    kind("sliding_window: expected an integer or None, got float; pass", sliding_window=4.0),
    kind("sliding_window: expected an integer or None, got bool", sliding_window=True),
    value(
        "sliding_window: must be at least 1, the query's own key, got 0; None stands for no window",
        sliding_window=0,
    ),
    kind("causal: expected True or False, got NoneType", causal=None),
    value("alibi_slopes: expected shape [Hq] = (4,), one per query head, got (", alibi_slopes=0.5),
    value("one per query head, got (2,); pass one number for each head of q", alibi_slopes=[1, 2]),
    kind("alibi_slopes: expected floats (float32), got <U4", alibi_slopes="none"),
    kind(
        "alibi_slopes: expected floats (float32), got a masked array; pass array.filled(...)",
        alibi_slopes=np.ma.ones(Hq),
    ),
    value("alibi_slopes: must be finite, got [1.0, nan", alibi_slopes=[1, np.nan, 1, 1]),
    value("alibi_slopes: must be finite, got [-inf, 1.0", alibi_slopes=[-np.inf, 1, 1, 1]),
    value("alibi_slopes: must be finite, got [inf, ", alibi_slopes=[1e39, 1, 1, 1]),
    value(
        "k_scale: expected a number, [Hkv] = (2,) or [N, B, Hkv] = (5, 4, 2), got shape (4,); pass "
        "one scale for each kv head, or one for each token",
        k_scale=np.ones(4),
    ),
    value("v_scale: expected a number, [Hkv] = (2,) or [N, B,", v_scale=np.ones((4, 5, 2))),
    value("k_scale: must be positive and finite in float32, got -1.0; None", k_scale=-1),
    value("v_scale: must be positive and finite in float32, got nan", v_scale=np.float32("nan")),
    kind("k_scale: expected a real number or None, got bool", k_scale=True),
    kind("v_scale: expected floats (float32), got <U1", v_scale="1"),
    kind("k_scale: expected floats (float32), got bool", k_scale=np.ones(2, bool)),
    kind(
        "k_scale: a device array must be float32, got float64; convert it on the device",
        on_device,
        k_scale=FakeDeviceArray(np.ones(2)),
    ),
    value(
        "all arrays must be on one device: k_scale are on a CUDA device, q, k_pool",
        k_scale=FakeDeviceArray(np.ones(2)),
    ),
    value("query_start_loc: expected shape [S + 1], got (); pass where the", query_start_loc=2),
    value("query_start_loc: expected shape [S + 1], got (0,)", query_start_loc=[]),
    kind("query_start_loc: expected integers (int32), got float64", query_start_loc=[0.0, 2.0]),
    value(
        "query_start_loc: must rise from 0 to the 2 rows of q, got [0, 1, 3]; pass the running sum "
        "of the queries of each sequence",
        query_start_loc=[0, 1, 3],
    ),
    value("from 0 to the 2 rows of q, got [0, 3, 2]", query_start_loc=[0, 3, 2]),
    value("from 0 to the 2 rows of q, got [1, 1, 2]", query_start_loc=[1, 1, 2]),
    value(
        "q: expected 3 axes [tokens, Hq, D] (with query_start_loc), got shape (2, 1, 4, 8)",
        q=lambda g: g.q[:, None],
        query_start_loc=[0, 1, 2],
    ),
]

LAUNCH = [  # of paged_attention and step_tile alike
    value("kernel: expected one of 'auto', 'simple', 'split', got 'fast'", kernel="fast"),
    value("kernel: expected one of 'auto', 'simple', 'split', got None", kernel=None),
    value("kernel: only CUDA has a choice, got 'split'; leave it 'auto' here", kernel="split"),
    value("stream: only what runs on a CUDA device has one, got int; leave it None here", stream=7),
]

WHOLE = [  # of paged_attention
    kind("state: expected an AttentionState, got int", state=1),
    value("state: expected [queries, Hq, Dv] = (2, 4, 6)", state=AttentionState(3, 4, 6)),
    value(
        "state: must be on the device of the call, 'cpu', got one on 'cuda'; make one with "
        "AttentionState(..., device='cpu')",
        state=lambda g: on_device_by_name(AttentionState(2, 4, 6)),
    ),
    value("out: must not overlap state, got a view of its memory", out_in_state),
    value("seq_starts: must be from 0 to seq_len = 9, got 10 in row 0; the", seq_starts=[10, 0]),
    value("seq_starts: must be from 0 to seq_len = 5, got -1 in row 1", seq_starts=[0, -1]),
    value("seq_starts: expected shape [S] = (2,), one per sequence", seq_starts=[0]),
    kind("seq_starts: expected integers (int32), got float64", seq_starts=[0.0, 1.0]),
    value(
        "ids in use must be from 0 to N - 1 = 4 (and fit int32), got -1 in row 0, entry 1 (tokens "
        "7 to 9 are in use)",
        block_tables=[[-1, -1, 4], [0, 2, -1]],
        seq_starts=[7, 0],
    ),
    value(
        "got -1 in row 1, entry 0 (tokens 3 to 5 are in use)",
        block_tables=[[-1, 1, 4], [-1, 2, -1]],
        sliding_window=2,
    ),
]

POSITIONS = [  # of step_tile
    value(
        "tile_starts: must be given with sliding_window, got None; pass the position of each "
        "tile's first token as tile_starts, and whole lengths as seq_lens",
        sliding_window=3,
    ),
    value("seq_lens: must be given with sliding_win", sliding_window=3, tile_starts=[0, 0]),
    value("tile_starts: must be given with alibi_slopes, got None", alibi_slopes=SLOPES),
    value("tile_starts: must be given with seq_starts, got None", seq_starts=[0, 0]),
    value(
        "tile_starts: must be given with several queries (causal), got None",
        query_start_loc=[0, 1, 2],
    ),
    value("tile_starts: must be from 0 to 2^31 - 1 = 2147483647 (and fit", tile_starts=[-1, 0]),
    value("2^31 - 1 with the tile's tokens = 2147483647", tile_starts=[2**31 - 3, 0]),
    value("tile_starts: expected shape [S] = (2,)", tile_starts=[0]),
    kind("tile_starts: expected integers (int32), got float64", tile_starts=[0.5, 1]),
    value("seq_lens: expected shape [S] = (2,)", seq_lens=[[12, 8]]),
    value("seq_lens: must be from 0 to 2^31 - 1", seq_lens=[12, -8]),
    value(
        "tile_starts: must be from 0 to seq_len (tile_start + tokens may not pass it) = 11, got 12 "
        "in row 0; pass the whole length of each sequence, or fewer tokens",
        tile_starts=[0, 0],
        seq_lens=[11, 8],
    ),
    value(
        "seq_starts: must be from 0 to seq_len = 8, got 9 in row 1",
        tile_starts=[0, 0],
        seq_lens=[12, 8],
        seq_starts=[0, 9],
    ),
    value("seq_starts: must be from 0 to seq_len", tile_starts=[0, 0], seq_starts=[0, -9]),
]

SINKS = [  # of finalize
    value("sinks: expected shape [Hq] = (4,), one per query head, got (3,)", sinks=[1, 2, 3]),
    value("sinks: must be finite, got [nan, 0.0", sinks=[np.nan, 0, 0, 0]),
    value("sinks: must be finite, got [0.0, inf", sinks=[0, np.inf, 0, 0]),
    kind("sinks: expected floats (float32), got object", sinks=[None] * Hq),
]
