"""What a user would pick instead: each contender answers the same decode step.

A contender is prepared once per step (its own K/V layout is not timed) and gives a call that
returns the output [S, Hq, D].
"""

import os
import pathlib

import numpy as np

VLLM_BLOCK_SIZE = 128  # its default on the CPU


def numpy_gather(step):
    """NumPy: gather the blocks, widen to float32, einsum."""
    num_kv_heads, head_dim = step.k_pool.shape[2:]
    queries = step.q.astype(np.float32).reshape(len(step.q), num_kv_heads, -1, head_dim)
    tables = _used_blocks(step)

    def attend_one(q, blocks, length):
        k, v = (
            pool[blocks].reshape(-1, num_kv_heads, head_dim)[:length].astype(np.float32)
            for pool in (step.k_pool, step.v_pool)
        )
        logits = np.einsum("hgd,thd->hgt", q, k, optimize=True) * np.float32(head_dim**-0.5)
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        return np.einsum("hgt,thd->hgd", p, v, optimize=True).reshape(-1, head_dim)

    def run():
        rows = zip(queries, tables, step.seq_lens, strict=True)
        return np.stack([attend_one(*row) for row in rows])

    return run


def torch_sdpa_gather(step):
    """torch: gather the blocks, then SDPA with the query heads of a kv head packed as rows."""
    import torch

    num_kv_heads, head_dim = step.k_pool.shape[2:]
    k_pool, v_pool = _tensor(step.k_pool), _tensor(step.v_pool)
    q = _tensor(step.q).view(len(step.q), num_kv_heads, -1, head_dim)
    tables = [torch.from_numpy(blocks.astype(np.int64)) for blocks in _used_blocks(step)]
    groups = [
        (rows, torch.cat([tables[row] for row in range(rows.start, rows.stop)]), length)
        for rows, length in _equal_lengths(step)
    ]
    out = torch.empty_like(_tensor(step.q))

    def gather(pool, blocks, batch, length):
        rows = pool.index_select(0, blocks).view(batch, -1, num_kv_heads, head_dim)
        return rows[:, :length].transpose(1, 2)

    def run():
        for rows, blocks, length in groups:
            batch = rows.stop - rows.start
            k, v = (gather(pool, blocks, batch, length) for pool in (k_pool, v_pool))
            attended = torch.nn.functional.scaled_dot_product_attention(q[rows], k, v)
            out[rows] = attended.reshape(batch, -1, head_dim)
        return out

    return run


def torch_matmul_contiguous(step):
    """torch: matmul, softmax, matmul in bfloat16 on K/V that are contiguous already (no paging)."""
    import torch

    num_kv_heads, head_dim = step.k_pool.shape[2:]
    q = _tensor(step.q).view(len(step.q), num_kv_heads, -1, head_dim)
    groups = [
        (rows, *(_contiguous(pool, step, rows) for pool in (step.k_pool, step.v_pool)))
        for rows, _ in _equal_lengths(step)
    ]
    out = torch.empty_like(_tensor(step.q))

    def run():
        for rows, k, v in groups:
            logits = torch.matmul(q[rows], k.transpose(-1, -2)).float() * head_dim**-0.5
            p = torch.softmax(logits, -1).to(torch.bfloat16)
            out[rows] = torch.matmul(p, v).reshape(rows.stop - rows.start, -1, head_dim)
        return out

    return run


def vllm_paged(step):
    """Run the CPU kernel of vLLM over its own layout; VLLM_SO is the path of its `_C.abi3.so`."""
    import torch

    ops = _vllm_ops()
    num_kv_heads, head_dim = step.k_pool.shape[2:]
    num_seqs, num_q_heads, _ = step.q.shape
    cache_k, cache_v, tables = _vllm_cache(ops, step)
    q = _tensor(step.q)
    out = torch.empty_like(q)
    lens = torch.from_numpy(step.seq_lens)
    query_starts = torch.arange(num_seqs + 1, dtype=torch.int32)
    sizes = (num_seqs, num_q_heads, num_kv_heads, head_dim)
    options = (lens, torch.bfloat16, query_starts, True, -1, "vec", True, None, "auto")
    plan = ops.get_scheduler_metadata(*sizes, *options)
    scale = head_dim**-0.5

    def run():
        ops.cpu_attention_with_kv_cache(
            *(q, cache_k, cache_v, out, query_starts, lens, scale, True, None, -1, tables),
            *(0.0, plan, None, None, 1.0, 1.0, "auto"),
        )
        return out

    return run


CONTENDERS = {
    "NumPy gather + einsum": numpy_gather,
    "torch gather + SDPA": torch_sdpa_gather,
    "torch matmul, contiguous": torch_matmul_contiguous,
    "vLLM paged": vllm_paged,
}


def available():
    """Return the contenders that can run here, and why the others can't."""
    missing = {}
    try:
        import torch  # noqa: F401 (whether it is there is the question)
    except ImportError:
        missing = dict.fromkeys(CONTENDERS, "torch is not installed (the [bench] extra)")
        del missing["NumPy gather + einsum"]
    else:
        if not os.environ.get("VLLM_SO"):
            missing["vLLM paged"] = "VLLM_SO does not name vLLM's _C.abi3.so"
    return {name: make for name, make in CONTENDERS.items() if name not in missing}, missing


def instruction_sets():
    """Say which instructions each contender that is here was compiled for."""
    found = {"NumPy gather + einsum": "OpenBLAS, its own choice"}
    contenders, _ = available()
    if "torch gather + SDPA" in contenders:
        import torch

        found["torch"] = torch.backends.cpu.get_cpu_capability()
        found["torch"] += ", oneDNN for bfloat16 matmul"
    if "vLLM paged" in contenders:
        library = pathlib.Path(os.environ["VLLM_SO"]).name.split(".")[0]
        built_for = {"_C": "AVX512-BF16", "_C_AVX512": "AVX512", "_C_AVX2": "AVX2"}
        found["vLLM paged"] = f"{built_for.get(library, 'unknown')} ({library})"
    return found


def as_float32(out):
    """Return a contender's output as a NumPy array."""
    return out.float().numpy() if hasattr(out, "float") else np.asarray(out, np.float32)


def _used_blocks(step):
    counts = -(-step.seq_lens // step.k_pool.shape[1])
    return [row[:count] for row, count in zip(step.block_tables, counts, strict=True)]


def _equal_lengths(step):
    """Cut the batch into runs of rows of one length: a dense call takes one length."""
    lens = step.seq_lens.tolist()
    if len(set(lens)) == 1:
        return [(slice(0, len(lens)), lens[0])]
    return [(slice(row, row + 1), length) for row, length in enumerate(lens)]


def _tensor(array):
    """View a bfloat16 array as a torch tensor."""
    import torch

    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def _gather(pool, blocks, length):
    """Copy one sequence's rows, [tokens, Hkv, D]."""
    return pool[blocks].reshape(-1, *pool.shape[2:])[:length]


def _contiguous(pool, step, rows):
    """Copy the rows' tokens to a tensor [rows, Hkv, tokens, D]."""
    tables = _used_blocks(step)
    gathered = [
        _gather(pool, tables[row], step.seq_lens[row]) for row in range(rows.start, rows.stop)
    ]
    return _tensor(np.ascontiguousarray(np.stack(gathered).transpose(0, 2, 1, 3)))


def _vllm_ops():
    """Load vLLM's library; nothing of vLLM is imported."""
    import torch

    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        torch.ops.load_library(os.environ["VLLM_SO"])
    return torch.ops._C


def _vllm_cache(ops, step):
    """Lay a step's K/V out as vLLM does: shuffled blocks of 128 tokens, head-major, K beside V."""
    import torch

    size = VLLM_BLOCK_SIZE
    num_kv_heads, head_dim = step.k_pool.shape[2:]
    counts = -(-step.seq_lens // size)
    order = np.random.default_rng(7).permutation(counts.sum()).astype(np.int32)
    tables = np.zeros((len(counts), counts.max()), np.int32)
    cache = torch.zeros(len(order), num_kv_heads, 2 * size, head_dim, dtype=torch.bfloat16)
    cache_k, cache_v = cache.chunk(2, dim=2)
    ends = np.cumsum(counts)
    for row, blocks in enumerate(_used_blocks(step)):
        tables[row, : counts[row]] = order[ends[row] - counts[row] : ends[row]]
        tokens = np.arange(step.seq_lens[row])
        slots = tables[row, tokens // size].astype(np.int64) * size + tokens % size
        k, v = (
            _tensor(np.ascontiguousarray(_gather(pool, blocks, len(tokens))))
            for pool in (step.k_pool, step.v_pool)
        )
        options = (torch.from_numpy(slots), "vec", 1.0, 1.0, "auto")
        ops.cpu_attn_reshape_and_cache(k, v, cache_k, cache_v, *options)
    return cache_k, cache_v, torch.from_numpy(tables)


def worst_error(out, exact):
    """Return the largest difference from the reference, relative to its row's largest value."""
    exact = np.asarray(exact, np.float64)
    scale = np.abs(exact).max(axis=-1, keepdims=True)
    return float((np.abs(as_float32(out) - exact) / scale).max())
