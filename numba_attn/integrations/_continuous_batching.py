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
    chosen = _paged_options(options)
    num_rows = int(batch.query_starts[-1])
    query, key, value = (x.detach()[0].transpose(0, 1) for x in (query, key, value))
    run = _over_gathered if batch.block_table is None else _over_blocks
    out = run(query[:num_rows], key, value, batch, chosen)
    padding = len(query) - num_rows  # of a compiled batch
    return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, padding))[None]


def _paged_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return a layer's options by the names of `numba_attn.paged_attention`."""
    here = {"scaling": "scale", "softcap": "softcap", "sliding_window": "sliding_window"}
    chosen = {here[name]: value for name, value in options.items() if name in here}
    if "s_aux" in options:
        chosen["sinks"] = options["s_aux"].detach()
    others = {name: value for name, value in options.items() if name not in {*here, "s_aux"}}
    if others.pop("is_causal", True) and not others.pop("dropout", 0.0) and not others:
        return chosen
    raise ValueError(
        "numba_attn: continuous batching takes causal attention with scaling, softcap, "
        f"sliding_window and s_aux, got {', '.join(sorted(set(options) - {*here, 's_aux'}))}; drop "
        "what is not needed, or use attn_implementation='paged|eager'"
    )


def _over_gathered(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Batch,
    chosen: dict[str, Any],
) -> torch.Tensor:
    """Attend over keys [tokens, Hkv, D] of one sequence after the other: blocks of one token."""
    lens = torch.diff(batch.key_starts)
    places = torch.arange(int(lens.max()), dtype=torch.int32, device=lens.device)
    tables = batch.key_starts[:-1, None] + places
    out: torch.Tensor = paged_attention(
        q,
        keys[:, None],
        values[:, None],
        tables,
        lens,
        query_start_loc=batch.query_starts,
        **chosen,
    )
    return out


def _over_blocks(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Batch,
    chosen: dict[str, Any],
) -> torch.Tensor:
    """Store the newest keys [S, Hkv, D] in the paged cache, and attend over it: a decode step."""
    _, key_starts, tables, k_cache, v_cache = batch
    assert tables is not None
    assert k_cache is not None
    assert v_cache is not None
    tables, lens = tables[: len(q)], torch.diff(key_starts)[: len(q)]  # the rest is padding
    last = (lens - 1).long()
    block_size = k_cache.shape[1]
    blocks = tables.gather(1, (last // block_size)[:, None])[:, 0].long()
    k_cache[blocks, last % block_size] = keys[: len(q)]
    v_cache[blocks, last % block_size] = values[: len(q)]
    out: torch.Tensor = paged_attention(q, k_cache, v_cache, tables, lens, **chosen)
    return out


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
