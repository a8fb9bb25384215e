"""What shows a fault of the CUDA kernels in the simulator, in seconds; a process of its own.

Each case runs with both kernels, and with the threads of a block in order and in reverse: a thread
that runs ahead reads what others have yet to write, and overwrites what they have yet to read.
Sizes are small: splits of 64 tokens, rings of two tiles or one, a few blocks that take many jobs.
"""

import importlib

import numpy as np
from _bound import assert_same_bits, check_answer
from _cases import attend, draw, place
from _process import stay_on_one_core
from numba import cuda

import numba_attn
from numba_attn import AttentionState, _arrays, _device, _plan_cuda

_plan_cuda.SPLIT_TOKENS = 64  # before the kernels are imported
_plan_cuda.RING_BYTES = 2048
_plan_cuda.HEADS_AT_ONCE = 3
_plan_cuda._MAX_SHARES = 48
twin = _device.backend("cuda")
simulator = importlib.import_module("numba_attn.kernels._simulator")
twin.MOST_BLOCKS = 3
twin.MERGE_THREADS = twin.state_cuda.MERGE_THREADS = 64
WHOLE = twin.PARTIAL_BYTES
FORMATS = "float32", "bfloat16", "bfloat16"  # answers are not rounded


def poisoned(shape, dtype):
    """Stand in for `cuda.device_array`, which may give what the call before has left there."""
    bits = np.full(shape, -1, f"i{np.dtype(dtype).itemsize}")
    return cuda.to_device(bits.view(dtype))


cuda.device_array = poisoned


def check(seqs, block_size, partial_bytes=WHOLE):
    """Check both kernels against the bound, and that their bits are the same."""
    twin.PARTIAL_BYTES = partial_bytes
    paged = place(seqs, block_size)
    simple, split = (
        attend(numba_attn, seqs, paged, device="cuda", kernel=name) for name in ("simple", "split")
    )
    check_answer(seqs, simple)
    assert_same_bits(*zip(simple, split, strict=True))


def padded_rows():
    """Two groups of heads, the last of which is cut; rows end in a lane's piece."""
    dims = {"head_dim": 12, "v_head_dim": 6, "dtypes": FORMATS}
    check(draw((0, 35), gqa=7, num_kv_heads=1, k_scale=1.5, v_scale=0.5, **dims), 4)


def copies_in_time():
    """A window and starts, so that splits are cut at either end; tiles come on their own."""
    options = {"k_scale": (1.5, 0.5), "v_scale": (0.5, 2.0), "alibi_slopes": (0.1, 0.02)}
    options |= {"starts": (5, 0), "sliding_window": 60}
    seqs = draw((85, 7), gqa=3, num_kv_heads=2, head_dim=16, dtypes=FORMATS, **options)
    assert reads_wide(seqs)
    check(seqs, 4)


def several_rounds():
    """There is memory for one partial state of each row at a time; scales are by token."""
    formats = "float32", "float8_e4m3fn", "float8_e4m3fn"
    seqs = draw((5, 150, 70), gqa=1, num_kv_heads=1, head_dim=4, dtypes=formats, token_scales=True)
    check(seqs, 8, partial_bytes=1)


def long_rows():
    """A row is dealt to all lanes of a warp, and more than once; two warps add up o."""
    dims = {"head_dim": 260, "v_head_dim": 132, "dtypes": "float32", "v_scale": 3.0}
    check(draw((20,), gqa=1, num_kv_heads=1, **dims), 8)


def many_partials():
    """More partials than a warp has lanes, more columns than a block has threads."""
    sizes = 1, 66
    rng, starts = np.random.default_rng(0), np.array([0, 35, 35, 75], np.int32)
    (m, l, o), parts = (
        [rng.uniform(1, 3, (n, *sizes[: 1 + last])) for last in (0, 0, 1)] for n in (3, 75)
    )
    m[2], l[2], o[2] = -np.inf, 0, np.nan  # the last row, which begins with 33 empty partials
    for part, nothing in zip(parts, (-np.inf, 0, np.nan), strict=True):
        part[35 + np.arange(33)] = nothing
        part[3] = nothing
    state, partials = (on_device(*arrays) for arrays in ((m, l, o), parts))
    twin.merge_splits(state, partials, cuda.to_device(starts))
    for row, (begin, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        every = [
            np.concatenate([x[row : row + 1], part[begin:end]])
            for x, part in zip((m, l, o), parts, strict=True)
        ]
        largest = every[0].max(axis=0)
        weights = np.exp(every[0] - largest)
        sums = [(np.nan_to_num(x).T * weights.T).T.sum(axis=0) for x in every[1:]]
        for found, expected in zip((state.m, state.l, state.o), (largest, *sums), strict=True):
            np.testing.assert_allclose(_arrays.to_host(found)[row], expected, rtol=1e-5)


CASES = copies_in_time, padded_rows, several_rounds, long_rows, many_partials


def reads_wide(seqs):
    return all(x[0].dtype.itemsize * x[0].shape[2] % 16 == 0 for x in (seqs.keys, seqs.values))


def on_device(m, l, o):
    """Make a state."""
    state = AttentionState(*o.shape, device="cuda")
    _arrays.overwrite(state.buffer, np.concatenate([m.ravel(), l.ravel(), o.ravel()]).astype("f4"))
    return state


def first_failure(likely=""):
    """Name the first case that fails, the order of threads and the error; or return "none".

    The one that is likely to fail is tried first. An error of another kind is none of a kernel
    that computes something else, and goes up.
    """
    stay_on_one_core()
    for case in sorted(CASES, key=lambda case: case.__name__ != likely):
        for order in (1, -1):
            simulator.ORDER = order
            try:
                case()
            except (AssertionError, IndexError, RuntimeError) as error:
                return f"{case.__name__}, {order:+}: {type(error).__name__}"
    return "none"
