"""Front ends under the names that other libraries have for decode attention.

Each takes the other library's arguments in its order, with its shapes and its defaults, and raises
for what it does not take: change the import, keep the call. The arrays may be of any kind that
`numba_attn.paged_attention` takes.
"""

from .flash_attn import flash_attn_with_kvcache
from .flashinfer import (
    block_tables_from_csr,
    merge_state,
    merge_states,
    single_decode_with_kv_cache,
)
from .torch_sdpa import scaled_dot_product_attention
from .vllm import merge_attn_states

__all__ = [
    "block_tables_from_csr",
    "flash_attn_with_kvcache",
    "merge_attn_states",
    "merge_state",
    "merge_states",
    "scaled_dot_product_attention",
    "single_decode_with_kv_cache",
]
