"""What the API hands to a backend: validated, on the state's device, ready to run."""

from __future__ import annotations

from typing import Any, NamedTuple

from ._types import Array, LongArray

KERNELS = "auto", "simple", "split"
"""What a CUDA step may run."""


class Formats(NamedTuple):
    """The number formats of a call, by dtype name; arrays carry their bits (`_arrays.CARRIERS`)."""

    q: str = "bfloat16"
    k: str = "bfloat16"
    v: str = "bfloat16"


class Tile(NamedTuple):
    """The keys of one step, and where they and the queries stand; arrays are int32.

    A *row* is one query token of the batch. Query i of a sequence with Q queries stands at position
    ``seq_len - Q + i``.
    """

    tables: Array  # [S, T]
    token_counts: Array  # [S], tokens of each sequence in this tile
    starts: Array | None = None  # [S], position of the tile's first token; None: 0
    seq_lens: Array | None = None  # [S]; None: the tile ends the sequence
    seq_starts: Array | None = None  # [S], the first position attended to; None: 0
    query_starts: Array | None = None  # [S + 1], the rows of each sequence; None: Q each
    num_queries: int = 1  # Q; 0 with query_starts


class Options(NamedTuple):
    """What shapes the logits and values; an option that is off is 0, False or None."""

    scale: float
    softcap: float = 0.0
    sliding_window: int = 0  # keys, the query's own included
    causal: bool = True
    alibi_slopes: Array | None = None  # float32 [Hq]
    k_scale: Array | None = None  # float32 [Hkv] or [N, B, Hkv]
    v_scale: Array | None = None
    kernel: str = "auto"  # of CUDA: "simple", "split", or what suits

    def token_scales(self) -> bool:
        """Tell whether each token has scales of its own."""
        return is_by_token(self.k_scale) or is_by_token(self.v_scale)


def is_by_token(scale: Array | None) -> bool:
    """Tell scales [N, B, Hkv] from those by head, and from none."""
    return scale is not None and len(scale.shape) == 3


def with_scales_of(options: Options, ids: LongArray) -> Options:
    """Pick the scales of blocks, where each token has its own."""

    def pick(scale: Any) -> Any:
        return scale[ids] if is_by_token(scale) else scale

    return options._replace(k_scale=pick(options.k_scale), v_scale=pick(options.v_scale))
