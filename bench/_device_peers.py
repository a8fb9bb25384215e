"""What a user would pick instead on a GPU: each peer answers the same decode steps.

A peer is given a step on the host and on the device, and returns a function that launches it on
torch's current stream and gives the output of each group of rows, in order. Its own layout of K/V
is made before.
"""

import contextlib

import contenders
import numpy as np
from _device_arrays import Bits
from _device_graph import torch_graph


def tensor(array):
    """View bfloat16 bits on the device as a torch tensor."""
    import torch

    return torch.as_tensor(Bits(array, "<i2"), device="cuda").view(torch.bfloat16)


def _contiguous(pool, step, rows):
    """Copy the rows' tokens together: [rows, tokens, Hkv, D]."""
    import torch

    num_blocks = -(-int(step.seq_lens[rows.start]) // pool.shape[1])
    blocks = torch.as_tensor(step.block_tables[rows, :num_blocks].astype(np.int64)).cuda()
    tokens = pool[blocks].reshape(len(blocks), -1, *pool.shape[2:])
    return tokens[:, : int(step.seq_lens[rows.start])].contiguous()


def _sdpa(step, on_device, packed, backend=None):
    """SDPA on contiguous K/V [rows, Hkv, tokens, D]; `packed`: a kv head's queries as rows."""
    import torch

    q, k_pool, v_pool = map(tensor, on_device.arguments()[:3])
    num_kv_heads, head_dim = k_pool.shape[2:]
    heads = (num_kv_heads, -1) if packed else (-1, 1)
    q = q.view(len(q), *heads, head_dim)
    groups = [
        (
            q[rows],
            *(_contiguous(p, step, rows).transpose(1, 2).contiguous() for p in (k_pool, v_pool)),
        )
        for rows, _ in contenders._equal_lengths(step)
    ]
    options = {} if packed else {"enable_gqa": True}

    def run():
        chosen = contextlib.nullcontext()
        if backend is not None:
            chosen = torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend))
        with chosen:
            attend = torch.nn.functional.scaled_dot_product_attention
            return [attend(*group, **options) for group in groups]

    return run


def sdpa_gqa(step, on_device):
    """Torch SDPA with enable_gqa."""
    return _sdpa(step, on_device, packed=False)


def sdpa_packed(step, on_device):
    """Torch SDPA with the query heads of a kv head packed as rows."""
    return _sdpa(step, on_device, packed=True)


def sdpa_flash(step, on_device):
    """Run the same with torch's FlashAttention by name."""
    return _sdpa(step, on_device, packed=True, backend="FLASH_ATTENTION")


def flash_attention(step, on_device):
    """flash_attn_with_kvcache on contiguous caches: its pages have 256 tokens or more."""
    import torch
    from flash_attn import flash_attn_with_kvcache

    q, k_pool, v_pool = map(tensor, on_device.arguments()[:3])
    longest = int(step.seq_lens.max())
    caches = []
    for pool in (k_pool, v_pool):
        cache = torch.zeros(len(q), longest, *pool.shape[2:], dtype=pool.dtype, device="cuda")
        for row, length in enumerate(step.seq_lens.tolist()):
            cache[row, :length] = _contiguous(pool, step, slice(row, row + 1))[0]
        caches.append(cache)
    lens = torch.as_tensor(step.seq_lens).cuda()
    return lambda: [flash_attn_with_kvcache(q[:, None], *caches, cache_seqlens=lens)]


def flashinfer(step, on_device):
    """FlashInfer's paged decode on the very pools."""
    import torch
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    q, k_pool, v_pool = map(tensor, on_device.arguments()[:3])
    block_size, num_kv_heads, head_dim = k_pool.shape[1:]
    blocks = contenders._used_blocks(step)
    starts = np.cumsum([0, *map(len, blocks)], dtype=np.int32)
    last = (step.seq_lens - 1) % block_size + 1
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    numbers = [
        torch.as_tensor(x.astype(np.int32)).cuda() for x in (starts, np.concatenate(blocks), last)
    ]
    sizes = (q.shape[1], num_kv_heads, head_dim, block_size)
    wrapper.plan(*numbers, *sizes, q_data_type=q.dtype, kv_data_type=k_pool.dtype)
    return lambda: [wrapper.run(q, (k_pool, v_pool))]


PEERS = {
    "SDPA gqa": sdpa_gqa,
    "SDPA packed": sdpa_packed,
    "SDPA flash": sdpa_flash,
    "FlashAttention": flash_attention,
    "FlashInfer": flashinfer,
}


def prepare(name, steps, on_device, stream):
    """Make a peer ready for some steps.

    Returns
    -------
    replay : callable
        One call for each step, as a graph where it can be one.
    how : str
        As of `_device_graph.captured`.
    out : float32 [S, Hq, D]
        Its answer to the first step.
    """
    import torch

    theirs = torch.cuda.ExternalStream(int(stream))
    with torch.cuda.stream(theirs), torch.no_grad():
        runs = [PEERS[name](*pair) for pair in zip(steps, on_device, strict=True)]
        outs = [out.reshape(-1, *steps[0].q.shape[1:]) for out in runs[0]()]

    def run():
        with torch.cuda.stream(theirs), torch.no_grad():
            for one in runs:
                one()

    out = torch.cat(outs).float().cpu().numpy()
    torch.cuda.synchronize()
    try:
        replay = torch_graph(run, stream)
        replay()
        torch.cuda.synchronize()
    except Exception as error:  # not all that torch calls can be captured
        return run, f"launches: {type(error).__name__} {error}".splitlines()[0], out
    return replay, "graph", out
