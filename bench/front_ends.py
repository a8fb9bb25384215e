"""What a front end, or a tensor of torch, costs over the plain call: W0, in microseconds.

    python bench/front_ends.py

One sequence of 16 tokens, 32/8 heads, head_dim 128, in bfloat16; in bursts, in turn, in one
process. Rows of torch where it is installed.
"""

import argparse
import importlib.util
import statistics
import sys

import ml_dtypes
import numpy as np

import numba_attn
from numba_attn import _machine, _measure, compat

HEADS, KV_HEADS, DIM, TOKENS = 32, 8, 128, 16


def main(arguments=None):
    """Print a row per call: its median, its minimum, and what they are over the plain call's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="in all (default 10)")
    options = parser.parse_args(arguments)
    print(f"CPU: {_machine.cpu_name()}, {numba_attn.get_num_threads()} threads")
    numbers = arrays()
    calls = calls_of("", numbers)
    if importlib.util.find_spec("torch"):
        tensors = [tensor(x) for x in numbers]
        calls |= calls_of(", torch", tensors) | {"operator of torch": operator_of(tensors)}
    times = _measure.in_turn(
        {name: [call] for name, call in calls.items()}, options.seconds, burst=50
    )
    plain = times["paged_attention"]
    for name, found in times.items():
        figures = [
            (1e6 * of(found), 1e6 * (of(found) - of(plain))) for of in (statistics.median, min)
        ]
        (median, over), (least, least_over) = figures
        print(
            f"{name:36} median {median:6.1f} us ({over:+5.1f}), "
            f"minimum {least:6.1f} us ({least_over:+5.1f})"
        )
    return 0


def arrays():
    """Return q, K, V, a table and lengths."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, HEADS, DIM)).astype(ml_dtypes.bfloat16)
    k, v = rng.standard_normal((2, 1, TOKENS, KV_HEADS, DIM)).astype(ml_dtypes.bfloat16)
    return q, k, v, np.zeros((1, 1), np.int32), np.array([TOKENS], np.int32)


def tensor(array):
    """Return a tensor of the array's memory."""
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def operator_of(given):
    """Return the same attention by the operator that `torch.compile` keeps in its graph."""
    from numba_attn.integrations import torch_op

    return lambda: torch_op.paged_attention(*given)


def calls_of(kind, given):
    """Return the same attention by each function that has it."""
    q, k, v, table, lens = given
    four = q[:, None]
    query, key, value = q[:, :, None], k.swapaxes(1, 2), v.swapaxes(1, 2)
    calls = {
        "paged_attention": lambda: numba_attn.paged_attention(q, k, v, table, lens),
        "flash_attn_with_kvcache": lambda: compat.flash_attn_with_kvcache(
            four, k, v, cache_seqlens=lens, block_table=table, causal=True
        ),
        "single_decode_with_kv_cache": lambda: compat.single_decode_with_kv_cache(q[0], k[0], v[0]),
        "scaled_dot_product_attention": lambda: compat.scaled_dot_product_attention(
            query, key, value, enable_gqa=True
        ),
    }
    return {name + kind: call for name, call in calls.items()}


if __name__ == "__main__":
    sys.exit(main())
