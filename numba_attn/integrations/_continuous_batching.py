"""Continuous batching in transformers (``generate_batch``): attention over its paged cache.

Batches of decode steps alone come with a block table, which is read in place. Others come with
keys and values gathered, one sequence after the other: their tokens are blocks of one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers.generation.continuous_batching import continuous_api, initialization
from transformers.generation.continuous_batching.cache import (
    ATTN_TYPE_TO_ALLOCATOR,
    group_layers_by_attn_type,
)

from .. import paged_attention

ARGUMENTS = frozenset(
    {
        "block_table",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "k_cache",
        "logits_indices",
        "logits_processor_args",
        "max_length_k",
        "max_length_q",
        "read_index",
        "v_cache",
        "write_index",
    }
)
"""What transformers passes for a batch, besides a layer's own keywords."""


class Batch(NamedTuple):
    """Where the sequences of a batch begin, and the paged cache where they are not gathered."""

    query_starts: torch.Tensor  # int32 [S + 1]
    key_starts: torch.Tensor  # int32 [S + 1]
    block_table: torch.Tensor | None  # int32 [S, max_blocks]
    k_cache: torch.Tensor | None  # [N, B, Hkv, D]
    v_cache: torch.Tensor | None  # [N, B, Hkv, Dv]


def is_batch(keywords: dict[str, Any]) -> bool:
    """Tell whether a layer's keywords are of continuous batching."""
    return "write_index" in keywords


def take(keywords: dict[str, Any]) -> Batch:
    """Take what is of continuous batching out of a layer's keywords."""
    taken = {name: keywords.pop(name) for name in ARGUMENTS & set(keywords)}
    return Batch(
        taken["cu_seq_lens_q"],
        taken["cu_seq_lens_k"],
        *(taken.get(name) for name in ("block_table", "k_cache", "v_cache")),
    )


@torch.compiler.disable
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: Batch,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attend with the queries of all sequences, one after the other.

    Parameters
    ----------
    query : [1, Hq, tokens, D]
    key, value : [1, Hkv, keys, D], [1, Hkv, keys, Dv]
        Gathered from the cache, or with a block table those of the new tokens alone.
    batch : Batch
    options : dict

    Returns
    -------
    out : [1, tokens, Hq, Dv]
    """
    num_rows = int(batch.query_starts[-1])
    query, key, value = (x.detach() for x in (query, key, value))
    q = query[0].transpose(0, 1)[:num_rows]  # [rows, Hq, D]
    new_keys, new_values = (x[0].transpose(0, 1) for x in (key, value))  # [keys, Hkv, D]
    lens = torch.diff(batch.key_starts)
    sinks = options.get("s_aux")
    chosen: dict[str, Any] = {
        "scale": options.get("scaling"),
        "softcap": options.get("softcap"),
        "sliding_window": options.get("sliding_window"),
        "sinks": None if sinks is None else sinks.detach(),
    }
    if batch.block_table is not None:
        assert batch.k_cache is not None
        assert batch.v_cache is not None
        tables = batch.block_table[:num_rows]
        lens = lens[:num_rows]
        _store(new_keys, batch.k_cache, tables, lens)
        _store(new_values, batch.v_cache, tables, lens)
        out = paged_attention(q, batch.k_cache, batch.v_cache, tables, lens, **chosen)
    else:
        places = torch.arange(int(lens.max()), dtype=torch.int32, device=lens.device)
        tables = batch.key_starts[:-1, None] + places  # of blocks of one token
        pools = new_keys[:, None], new_values[:, None]
        starts = batch.query_starts
        out = paged_attention(q, *pools, tables, lens, query_start_loc=starts, **chosen)
    padding = query.shape[2] - num_rows  # of a compiled batch
    return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, padding))[None]


def _store(
    rows: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, lens: torch.Tensor
) -> None:
    """Store each sequence's newest key or value [S, Hkv, D] at the end of its blocks."""
    last = (lens - 1).long()
    block_size = cache.shape[1]
    blocks = tables.gather(1, (last // block_size)[:, None])[:, 0].long()
    cache[blocks, last % block_size] = rows[: len(lens)]


def allow(name: str) -> None:
    """Let continuous batching use an attention function, with block tables where they can be.

    transformers has a fixed list of names for both: the two functions that hold it are wrapped.
    """
    switch = continuous_api.ContinuousBatchingManager.switch_to_cb_friendly_attn
    ensure = initialization.ensure_decode_fast_path_is_available
    if hasattr(switch, "numba_attn"):
        return

    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation != name:
            switch(self, model, *args, **kwargs)

    def ensure_decode_fast_path_is_available(config: Any, cb_config: Any, requested: bool) -> None:
        if config._attn_implementation != name or not _has_block_tables(config):
            ensure(config, cb_config, requested)

    _replace(continuous_api.ContinuousBatchingManager, switch_to_cb_friendly_attn)
    _replace(initialization, ensure_decode_fast_path_is_available)


def _has_block_tables(config: Any) -> bool:
    kinds = group_layers_by_attn_type(config)
    return all(ATTN_TYPE_TO_ALLOCATOR[kind].supports_block_table for kind in kinds)


def _replace(owner: Any, function: Any) -> None:
    function.numba_attn = True
    setattr(owner, function.__name__, function)
