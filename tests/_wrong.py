"""Wrong arguments, and the text of the error: (changes, error, text) each.

A change is a value or a function of the valid arguments; `several` gives a dict of changes.
"""

from __future__ import annotations

import _arguments as make
import numpy as np
from _arguments import BF16, B, D, Dv, Hq, S
from _wrong_options import LAUNCH, OPTIONS, POSITIONS, SINKS, WHOLE, kind, value
from _wrong_stream import SOURCE, STREAM

from numba_attn import AttentionState


def row_1(*ids, dtype):
    return np.array([[3, 1, 4], [*ids, 0]], dtype)


NAMES = ("q", "k_pool", "v_pool")
DTYPES = ("uint8", "int16", "int32", "float64", ">u2", ">f4", "bool", "object")
SUPPORTED = {name: "bfloat16, float16, float32, float8_e4m3fn, float8_e5m2, int8" for name in NAMES}
SUPPORTED["q"] = "bfloat16, float16, float32"
FLOAT32 = "scale: must be positive and finite in float32, got "

Q_AXES = "3 or 4 axes [S, Hq, D] or [S, Q, Hq, D]"
INPUTS = [  # of paged_attention and step_tile alike
    kind("q: expected a NumPy array or a CUDA array, got list; convert it with", q=[[1.0]]),
    kind("q: expected a NumPy array or a CUDA array, got NoneType; convert it", q=None),
    kind("q: expected a NumPy array or a CUDA array, got uint16; convert it", q=np.uint16(3)),
    kind("k_pool: expected a NumPy array or a CUDA array, got MaskedArray", k_pool=np.ma.ones(3)),
    *(
        kind(
            f"{name}: expected dtype {SUPPORTED[name]} (or bfloat16 bits as uint16), got "
            f"{np.dtype(dtype)}; convert it with .",
            **{name: lambda g, name=name, dtype=dtype: np.zeros(vars(g)[name].shape, dtype)},
        )
        for name in NAMES
        for dtype in DTYPES
    ),
    kind("q: expected dtype bfloat16, float16, float32 (or", q=lambda g: g.q.astype("int8")),
    value(f"q: expected {Q_AXES}, got shape (); reshape it", q=np.zeros((), BF16)),
    value(f"q: expected {Q_AXES}, got shape (4, 8); reshape it", q=lambda g: g.q[0]),
    value("q: Q must be at least 1, got Q = 0 in shape (2, 0, 4", q=lambda g: g.q[:, None][:, :0]),
    value("k_pool: expected 4 axes [N, B, Hkv, D], got shape (4, 2", k_pool=lambda g: g.k_pool[0]),
    value(
        "v_pool: expected 4 axes [N, B, Hkv, Dv], got shape (5, 4, 2, 6, 1)",
        v_pool=lambda g: g.v_pool[..., None],
    ),
    value(
        "q: the last axis of [S, Hq, D] or [S, Q, Hq, D] must be contiguous (stride 2 bytes), got "
        "strides (128, 32, 4); copy it with numpy.ascontiguousarray",
        q=lambda g: make.every_other_column(g.q),
    ),
    value("q: the last axis of", q=lambda g: np.broadcast_to(g.q[..., :1], (S, Hq, D))),
    value("k_pool: the last axis of [N, B, Hkv, D] must", k_pool=lambda g: g.k_pool[..., ::-1]),
    value("v_pool: the last axis of [N, B, Hkv, Dv] must", v_pool=lambda g: g.v_pool[..., ::-1]),
    *(
        value(
            f"{name}: the data must be aligned to 2 bytes, got an unaligned view; copy it",
            **{name: lambda g, name=name: make.unaligned(vars(g)[name])},
        )
        for name in NAMES
    ),
    value("q: Hq must be at least 1, got Hq = 0 in shape (2, 0, 8); only", q=lambda g: g.q[:, :0]),
    value("q: D must be at least 1, got D = 0", q=lambda g: g.q[..., :0]),
    value("k_pool: B must be at least 1, got B = 0", k_pool=lambda g: g.k_pool[:, :0]),
    value("k_pool: Hkv must be at least 1, got Hkv = 0", k_pool=lambda g: g.k_pool[:, :, :0]),
    value("v_pool: Dv must be at least 1, got Dv = 0", v_pool=lambda g: g.v_pool[..., :0]),
    value(
        "k_pool: its last axis must be D = 8, the head_dim of q, got 7 (k_pool (5, 4, 2, 7), q (2, "
        "4, 8)); check the order of the axes",
        k_pool=lambda g: g.k_pool[..., :7],
    ),
    value(
        "v_pool: its first three axes [N, B, Hkv] must be those of k_pool, (5, 4, 2), got (4, 4, "
        "2); a head-major pool is passed as a transposed view",
        v_pool=lambda g: g.v_pool[1:],
    ),
    value("v_pool: its first three axes", v_pool=lambda g: g.v_pool.swapaxes(1, 2)),
    value(
        "q: Hq must be a multiple of Hkv, got Hq = 3 and Hkv = 2; check the numbers of heads of q",
        q=lambda g: g.q[:, :3],
    ),
    kind("scale: expected a real number or None, got str; pass a float", scale="1"),
    kind("scale: expected a real number or None, got bool", scale=True),
    kind("scale: expected a real number or None, got bool", scale=np.True_),
    kind("scale: expected a real number or None, got complex", scale=1j),
    kind("scale: expected a real number or None, got ndarray", scale=np.ones(1)),
    value(FLOAT32 + "0.0; None stands for 1 / sqrt(D) = 0.353553", scale=0),
    value(FLOAT32 + "nan", scale=np.nan),
    value(FLOAT32 + "nan", scale=np.float16("nan")),
    value(FLOAT32 + "-0.5", scale=np.float32(-0.5)),
    value(FLOAT32 + "inf", scale=np.inf),
    value(FLOAT32 + "inf", scale=10**400),
    value(FLOAT32 + "1e-46", scale=1e-46),
    value(FLOAT32 + "1e+39", scale=1e39),
]

LENGTHS = [(-1, "i1"), (13, "u1"), (2**31, "i8"), (2**32 + 5, "i8"), (-(2**63), "i8")]
LENGTHS += [(2**63 + 5, "u8"), (2**64 - 1, "u8"), (-2, ">i4")]
IDS = [(5, "i4"), (-1, "i1"), (200, "u1"), (2**32 + 1, "i8"), (-(2**63), "i8")]
IDS += [(2**31, "u8"), (2**64 - 1, "u8"), (-2, ">i4")]

PAGED = [
    value(
        "block_tables: expected shape [S, max_blocks] with S = 2, a row per sequence of q, got (); "
        "pass a row of block ids for each sequence",
        block_tables=3,
    ),
    value("S = 2, a row per sequence of q, got (2,); pass", block_tables=[3, 1]),
    value("S = 2, a row per sequence of q, got (1, 2); pass", block_tables=[[3, 1]]),
    value(
        "block_tables: expected rows of one length, got a ragged list; pad its rows (entries past",
        block_tables=[[3, 1, 4], [0, 2]],
    ),
    kind("block_tables: expected integers (int32), got float64", block_tables=np.ones((S, 3))),
    kind("block_tables: expected integers (int32), got <U5", block_tables="table"),
    kind("seq_lens: expected integers (int32), got object; convert it with", seq_lens=None),
    kind("seq_lens: expected integers (int32), got object", seq_lens=[2**70, 5]),
    kind("seq_lens: expected integers (int32), got float64", seq_lens=[9.0, 5.0]),
    kind("seq_lens: expected integers (int32), got bool", seq_lens=[True, False]),
    kind(
        "seq_lens: expected integers (int32), got a masked array; pass array.filled(...)",
        seq_lens=np.ma.masked_array([9, 5], [0, 1]),
    ),
    value("seq_lens: expected shape [S] = (2,), one per sequence of q, got (); pass", seq_lens=9),
    value("got (1,); pass one number for each sequence", seq_lens=[9]),
    value("seq_lens: expected shape [S] = (2,)", seq_lens=[[9], [5]]),
    value(
        "seq_lens: must be from 0 to max_blocks * B = 12 (and fit int32), got 13 in row 0; a row "
        "of block_tables needs ceil(seq_len / B) entries",
        seq_lens=[13, 5],
    ),
    *(
        value(f"got {bad} in row 1; a row of block_tables", seq_lens=np.array([9, bad], dtype))
        for bad, dtype in LENGTHS
    ),
    value(
        "block_tables: ids in use must be from 0 to N - 1 = 4 (and fit int32), got 5 in row 0, "
        "entry 2 (tokens 0 to 9 are in use); pass ids of blocks in k_pool, or a shorter length",
        block_tables=[[3, 1, 5], [0, 2, -1]],
    ),
    *(
        value(f"int32), got {bad} in row 1, entry 1", block_tables=row_1(0, bad, dtype=dtype))
        for bad, dtype in IDS
    ),
    value(
        "(and fit int32), got 2147483648 in row 1, entry 0 (tokens 0 to 1 are in", make.huge_pool
    ),
    value(
        "block_tables: None means contiguous caches, one block per sequence, so k_pool must have "
        "N = S = 2 blocks, got N = 5; pass block_tables for a paged pool",
        block_tables=None,
    ),
    value("seq_lens: expected shape [S] = (5,)", make.contiguous_caches, seq_lens=[1]),
    value(
        "seq_lens: must be from 0 to the capacity B = 4 (and fit int32), got 5 in row 4; a "
        "contiguous cache holds B tokens of a sequence",
        make.contiguous_caches,
        seq_lens=[B, B, B, B, B + 1],
    ),
    value("device: expected one of 'auto', 'cpu', 'cuda', got 'gpu'", device="gpu"),
    value("device: expected one of 'auto', 'cpu', 'cuda', got None", device=None),
    value("device: expected one of 'auto', 'cpu', 'cuda', got array(", device=np.zeros(2)),
    kind("return_lse: expected True or False, got ndarray; arr", return_lse=np.zeros((S, Hq))),
    ({"device": "cuda"}, RuntimeError, "device='cuda' is not available: no driver here. Install "),
    kind("out: expected a NumPy array or a CUDA array, got list; allocate it with", out=[[1]]),
    kind(
        "out: expected a NumPy array or a CUDA array, got MaskedArray",
        out=lambda g: np.ma.masked_array(g.out),
    ),
    value(
        "out: expected shape (2, 4, 6), that of q with Dv, got (4, 6); resh", out=lambda g: g.out[0]
    ),
    value("shape (2, 4, 6), that of q with Dv, got (2, 4, 8)", out=np.zeros((S, Hq, D), BF16)),
    kind(
        "out: expected dtype bfloat16, that of the result, got float32; allocate it with this",
        out=np.zeros((S, Hq, Dv), np.float32),
    ),
    kind("dtype bfloat16, that of the result, got uint16", out=np.zeros((S, Hq, Dv), np.uint16)),
    kind("dtype uint16, that of the result, got bfloat16", q=lambda g: g.q.view(np.uint16)),
    value("out: the last axis of [..., Hq, Dv]", out=lambda g: make.every_other_column(g.out)),
    value("out: the data must be aligned to 2 bytes", out=lambda g: make.unaligned(g.out)),
    value(
        "out: must be writable, got a read-only array; pass a copy of it",
        out=lambda g: make.read_only(g.out),
    ),
    value(
        "out: its elements must lie apart, got strides (0, 12, 2) for shape (2, 4, 6); pass an",
        out=lambda g: make.one_row_repeated(g.out),
    ),
    value("out: must not overlap q, got a view of its memory; pass", make.out_over_the_end_of_q),
    value("out: must not overlap k_pool", out=lambda g: g.k_pool[:2, :, 0, :Dv]),
    value("out: must not overlap v_pool", out=lambda g: g.v_pool[1:3, :, 1]),
    value("out: must not overlap seq_lens", make.out_over_the_lengths),
    value(
        "all arrays must be on one device: k_pool, v_pool, block_tables, seq_lens, out are on a "
        "CUDA device, q on the host; copy the ones over (numba.cuda.to_device, .copy_to_host)",
        lambda g: make.on_device(g) | {"q": g.q},
    ),
    kind(
        "q: expected dtype bfloat16, float16, float32 (or bfloat16 bits as uint16), got int64",
        lambda g: make.on_device(g, q=np.int64),
    ),
    kind(
        "seq_lens: a device array must be int32, got int64; convert it on the device",
        lambda g: make.on_device(g, seq_lens=np.int64),
    ),
]

TILE = [
    kind("state: expected an AttentionState, got NoneType; make one with Attent", state=None),
    value(
        "state: expected [queries, Hq, Dv] = (2, 4, 6) from q and v_pool, got (2, 4, 8); make one "
        "with AttentionState.like(q, v_pool)",
        state=lambda g: AttentionState(S, Hq, D),
    ),
    value("tile_blocks: expected shape [S, T] with S = 2, a row per", tile_blocks=[3, 1]),
    value("tile_block_counts: expected shape [S] = (2,), one per", tile_block_counts=[3]),
    value("tile_token_counts: expected shape [S] = (2,), one per", tile_token_counts=[12]),
    kind("tile_token_counts: expected integers (int32), got flo", tile_token_counts=[1.0, 2.0]),
    value(
        "tile_block_counts: must be from 0 to the tile capacity T = 3 (and fit int32), got 4 in "
        "row 1; tile_blocks needs a column for each block of a row",
        tile_block_counts=[3, 4],
    ),
    value("the tile capacity T = 3 (and fit int32), got -1 in row 0", tile_block_counts=[-1, 2]),
    value(
        "tile_token_counts: must be from 0 to count * B = 8, got 9 in row 1; pass fewer tokens, or "
        "more blocks",
        tile_token_counts=[1, 9],
    ),
    value("from 0 to count * B = 12, got -1 in row 0", tile_token_counts=[-1, 2]),
    value("got 18446744073709551615 in row 1", tile_token_counts=np.array([1, 2**64 - 1], "u8")),
    value(
        "tile_block_counts: must be from 0 to the largest count * B = 2147483647 (and fit int32), "
        "got 2147483648 in row 1; pass smaller tiles",
        make.huge_tile,
    ),
    value(
        "tile_blocks: ids in use must be from 0 to N - 1 = 4", tile_blocks=row_1(0, -1, dtype="i4")
    ),
]

MERGE = [
    kind("state: expected an AttentionState, got int", state=1),
    kind("other: expected an AttentionState, got NoneType", other=None),
    value(
        "other: must be a state of other keys, got `state` itself, whose keys would count twice; "
        "pass a state over disjoint keys",
        other=lambda g: g.state,
    ),
    value(
        "other: expected [queries, Hq, Dv] = (2, 4, 6) as in state, got (2, 4, 8); pass a state of "
        "the same queries",
        other=lambda g: AttentionState(S, Hq, D),
    ),
    value(
        "other: must be on the device of state, 'cpu', got one on 'cuda'; make both on one device",
        other=lambda g: make.on_device_by_name(g.other),
    ),
    value("stream: only what runs on a CUDA device has one, got int", stream=7),
    kind(
        "stream: expected a stream of Numba, cuda.core, torch or CuPy, or its pointer as an int, "
        "got str; make one with numba.cuda.stream()",
        state=lambda g: make.on_device_by_name(g.state),
        stream="default",
    ),
]

FINALIZE = [
    kind("state: expected an AttentionState, got int", state=1),
    kind("return_lse: expected True or False, got int", return_lse=1),
    kind(
        "dtype: expected bfloat16, float16, float32 or uint16 (bfloat16 bits), got int8", dtype="i1"
    ),
    kind("or uint16 (bfloat16 bits), got float64; convert with .astype", dtype=None),
    kind("or uint16 (bfloat16 bits), got 'no dtype'", dtype="no dtype"),
    kind("out: expected dtype uint16, that of the result, got bfloat16", dtype="uint16"),
    kind("out: expected a NumPy array or a CUDA array, got list", out=[[0]]),
    value("out: expected shape (2, 4, 6), that of q with Dv, got (1,", out=lambda g: g.out[:1]),
    value("out: must be writable, got a read-only", out=lambda g: make.read_only(g.out)),
    value("out: must not overlap sinks", make.sinks_in_out, dtype="float32"),
    value(
        "out: must not overlap state, got a view of its memory; pass an array of its own",
        out=lambda g: g.state.buffer.view(BF16)[: S * Hq * Dv].reshape(S, Hq, Dv),
    ),
    value(
        "out: must be on the device of state, 'cpu', got an array on 'cuda'; allocate it there, or",
        out=lambda g: make.FakeDeviceArray(g.out),
    ),
]

STATE = [
    kind("num_seqs: expected an integer, got float; pass an int", num_seqs=2.0),
    kind("num_q_heads: expected an integer, got bool", num_q_heads=True),
    value("num_seqs: must be at least 0, got -1; pass the size of", num_seqs=-1),
    value("num_queries: must be at least 0, got -1; pass the size of", num_queries=-1),
    kind("num_queries: expected an integer, got str", num_queries="2"),
    value("num_q_heads: must be at least 1, got 0", num_q_heads=0),
    value("head_dim: must be at least 1, got 0", head_dim=0),
    value("device: expected one of 'auto', 'cpu', 'cuda', got 'tpu'", device="tpu"),
    ({"device": "cuda"}, RuntimeError, "device='cuda' is not available: no driver here. Install"),
]

LIKE = [
    kind(
        "q: expected an array [S, Hq, D] or [S, Q, Hq, D], got list; convert it with numpy.asarray",
        q=[[1]],
    ),
    value(f"q: expected {Q_AXES}, got shape (3,)", q=np.zeros(3)),
    value("v_pool: expected 4 axes [N, B, Hkv, Dv], got shape (3,)", v_pool=np.zeros(3)),
]

WARMUP = [
    kind("num_kv_heads: expected an integer, got float; pass an int", num_kv_heads=2.0),
    value("v_head_dim: must be at least 1, got 0; pass the size of", v_head_dim=0),
    value("head_dim: must be at least 1, got -8", head_dim=-8),
    value("num_q_heads: Hq must be a multiple of Hkv, got Hq = 3 and Hkv = 2", num_q_heads=3),
    kind("dtype: expected bfloat16, float16, float32 or uint16", dtype="int8"),
    kind("kv_dtype: expected bfloat16, float16, float32, float8_e4m3fn", kv_dtype="int16"),
    kind("softcap: expected True or False, got float", softcap=2.0),
]

THREADS = [
    kind("num_threads: expected an integer, got float; pass an int", num_threads=2.0),
    kind("num_threads: expected an integer, got str", num_threads="2"),
    value("num_threads: must be at least 1, got 0; 1 is the calling thread alone", num_threads=0),
]

VARIABLE = "NUMBA_ATTN_NUM_THREADS"
ENVIRONMENT = [
    value(
        f"{VARIABLE}: must be a whole number, at least 1, got {text!r}; unset", **{VARIABLE: text}
    )
    for text in ("0", "-1", "2.0", "all", " ")
]

TABLES = {
    "paged_attention": INPUTS + OPTIONS + LAUNCH + PAGED + WHOLE,
    "step_tile": INPUTS + OPTIONS + LAUNCH + TILE + POSITIONS,
    "merge": MERGE,
    "finalize": FINALIZE + SINKS,
    "AttentionState": STATE,
    "AttentionState.like": LIKE,
    "warmup": WARMUP,
    "stream_attention": STREAM,
    "ArraySource": SOURCE,
    "set_num_threads": THREADS,
    "_threads._default_num_threads": ENVIRONMENT,
}
CASES = [(function, *case) for function, cases in TABLES.items() for case in cases]
