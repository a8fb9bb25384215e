"""Shapes and lengths -> work items, in plain ints and int32 arrays; no Numba, testable alone.

The cut depends on token counts only, never on the device, the threads, the batch or the block
size: that is what makes results bit-identical across all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ._types import IntArray

SPLIT_TOKENS = 512
"""Tokens of one work item, counted from the first token of the call's range."""

GROUP_TOKENS = 16
"""Tokens absorbed at a time (one maximum, one rescale), counted from the split's start."""


class Sizes(NamedTuple):
    """The sizes of one call, in the letters of the field."""

    num_seqs: int  # S
    num_q_heads: int  # Hq
    num_kv_heads: int  # Hkv
    head_dim: int  # D, of q and k
    v_head_dim: int  # Dv
    num_blocks: int  # N
    block_size: int  # B

    @property
    def gqa_ratio(self) -> int:
        """Query heads per kv head, G."""
        return self.num_q_heads // self.num_kv_heads


def ceil_div(a: int, b: int) -> int:
    """Return the quotient rounded up."""
    return -(-a // b)


def split_starts(token_counts: IntArray, split_tokens: int = SPLIT_TOKENS) -> IntArray:
    """Count the splits of a batch.

    Parameters
    ----------
    token_counts : int32 [S]
        Tokens of each sequence in this call.
    split_tokens : int
        Length of a split.

    Returns
    -------
    int32 [S + 1]
        The splits of sequence s are ``starts[s]`` to ``starts[s + 1]``, exclusive.

    Examples
    --------
    >>> split_starts(np.array([512, 0, 513], np.int32)).tolist()
    [0, 1, 1, 3]
    """
    starts = np.zeros(len(token_counts) + 1, np.int32)
    np.cumsum(-(-token_counts // split_tokens), out=starts[1:])
    return starts


def split_items(
    starts: IntArray, token_counts: IntArray, split_tokens: int = SPLIT_TOKENS
) -> IntArray:
    """List the splits as work items.

    Returns
    -------
    int32 [n, 3]
        Sequence, first token, end token (exclusive) of each split.

    Examples
    --------
    >>> lens = np.array([3, 0, 700], np.int32)
    >>> split_items(split_starts(lens), lens).tolist()
    [[0, 0, 3], [2, 0, 512], [2, 512, 700]]
    """
    items = np.empty((int(starts[-1]), 3), np.int32)
    seq = np.repeat(np.arange(len(token_counts), dtype=np.int32), np.diff(starts))
    begin = (np.arange(len(items), dtype=np.int32) - starts[seq]) * split_tokens
    items[:, 0] = seq
    items[:, 1] = begin
    np.minimum(begin + split_tokens, token_counts[seq], out=items[:, 2])
    return items
