"""What compiles, and when: ahead of time with `warmup`, never while a sequence grows."""

import numpy as np
import pytest
from _process import run

import numba_attn
from numba_attn._call import Formats
from numba_attn.kernels import cpu

COMPILED = """
import numba_attn, numpy as np
from numba_attn.kernels import cpu
from numba_attn._call import Formats

def compiled():
    attend_items = cpu._attend_items(4, 32, 32, Formats(), 0)
    kernels = [attend_items, cpu._merge_splits, cpu._finalize("bfloat16")]
    return [len(kernel.signatures) for kernel in kernels]

numba_attn.warmup(8, 2, 32)
before = compiled()
assert before == [1, 1, 1], before
"""


def test_warmup_compiles_all_that_a_shape_needs():
    run(
        COMPILED
        + "q, pool = np.zeros((3, 8, 32), 'u2'), np.zeros((9, 5, 2, 32), 'u2')\n"
        + "out = np.empty((3, 2, 8, 32), 'u2')[:, 1]\n"
        + "table, lens = np.arange(9).reshape(3, 3), np.array([15, 0, 7])\n"
        + "pool.setflags(write=False)\n"
        + "numba_attn.paged_attention(q, pool, pool[::-1], table, lens, out=out, return_lse=True)\n"
        + "a, b = (numba_attn.AttentionState.like(q, pool) for _ in range(2))\n"
        + "numba_attn.step_tile(a, q, pool, pool, table, np.array([3, 0, 2]))\n"
        + "numba_attn.merge(b, a)\n"
        + "numba_attn.finalize(b, return_lse=True)\n"
        + "assert compiled() == before, compiled()\n"
    )


def test_nothing_compiles_while_a_contiguous_cache_grows():
    run(
        COMPILED
        + "q = np.zeros((1, 8, 32), 'u2')\n"
        + "for length in range(1000, 1065):\n"
        + "    cache = np.zeros((1, length, 2, 32), 'u2')\n"
        + "    numba_attn.paged_attention(q, cache, cache, None, [length])\n"
        + "assert compiled() == before, compiled()\n"
    )


def test_one_kernel_serves_all_block_sizes():
    for block_size in (1, 3, 16, 100):
        q, pool = np.zeros((1, 8, 32), "u2"), np.zeros((3, block_size, 2, 32), "u2")
        numba_attn.paged_attention(q, pool, pool, [[2, 0, 1]], [3 * block_size])
    assert len(cpu._attend_items(4, 32, 32, Formats(), 0).signatures) == 1


def test_what_moves_from_step_to_step_compiles_nothing():
    """Windows, starts, sinks, scales by head, several queries: run-time values all."""
    run(
        COMPILED
        + "pool, table = np.zeros((9, 5, 2, 32), 'u2'), np.arange(9).reshape(1, 9)\n"
        + "for n in (1, 2, 5):\n"
        + "    q = np.zeros((1, n, 8, 32), 'u2')\n"
        + "    options = dict(sliding_window=n, sinks=np.zeros(8), k_scale=1 / n, causal=n > 1)\n"
        + "    numba_attn.paged_attention(q, pool, pool, table, [40], seq_starts=[n], **options)\n"
        + "assert compiled() == before, compiled()\n"
        + "assert cpu._attend_items.cache_info().currsize == 1\n"
    )


def test_warmup_of_a_quantised_model_with_softcap():
    run(
        "import numba_attn, ml_dtypes, numpy as np\n"
        "from numba_attn.kernels import cpu\n"
        "numba_attn.warmup(8, 2, 32, dtype='float16', kv_dtype='int8', softcap=True)\n"
        "q, pool = np.zeros((1, 8, 32), 'f2'), np.zeros((3, 5, 2, 32), 'i1')\n"
        "options = dict(softcap=30.0, k_scale=0.1)\n"
        "numba_attn.paged_attention(q, pool, pool, [[2, 0, 1]], [11], **options)\n"
        "assert cpu._attend_items.cache_info().currsize == 1\n"
        "assert cpu._finalize.cache_info().currsize == 1\n"
    )


def test_warmup_of_append():
    run(
        "import numba_attn, numpy as np\n"
        "from numba_attn.kernels import append_cpu\n"
        "numba_attn.warmup(8, 2, 32)\n"
        "compiled = [f for f in vars(append_cpu).values() if getattr(f, 'signatures', None)]\n"
        "assert compiled\n"
        "before = [len(f.signatures) for f in compiled]\n"
        "k, pool = np.zeros((3, 2, 32), 'f4'), np.zeros((3, 5, 2, 32), 'i1')\n"
        "numba_attn.append_kv(k, k, pool, pool.copy(), [4, -1, 7], k_scale=0.1, v_scale=0.2)\n"
        "assert [len(f.signatures) for f in compiled] == before\n"
    )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((8, 3, 32), "multiple of Hkv"), ((0, 1, 32), "num_q_heads"), ((8, 2, 0), "head_dim")],
)
def test_wrong_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        numba_attn.warmup(*sizes)
