"""The mask function of transformers: intervals for one query token, or the mask of SDPA."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from transformers.masking_utils import (
    chunked_causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from numba_attn.integrations import _interval_mask

MASKS = {
    "causal": {},
    "window": {"mask_function": sliding_window_causal_mask_function(7), "local_size": 7},
    "chunk": {
        "mask_function": chunked_causal_mask_function(8, torch.tensor([5, 0, 2])),
        "local_size": 8,
    },
}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kind", MASKS)
def test_the_mask_of_a_decode_step(kind, static):
    """Left padding of 5, 0 and 2 tokens, in a cache of 33 tokens, or one with room for 50."""
    seen = torch.ones(3, 33, dtype=torch.bool)
    seen[0, :5], seen[2, :2] = False, False
    sizes = {"batch_size": 3, "q_length": 1, "kv_length": 50 if static else 33, "q_offset": 32}
    given = {"attention_mask": seen, "allow_is_causal_skip": not static, **sizes, **MASKS[kind]}
    found = _interval_mask.interval_mask(**given)
    assert found.dtype == torch.int32
    assert found.shape == (3, 1, 1, 2)
    expected = sdpa_mask(**given)
    assert torch.equal(_interval_mask.as_bool(found, sizes["kv_length"]), expected)


def test_nothing_masked_is_no_mask():
    sizes = {"batch_size": 2, "q_length": 1, "kv_length": 33, "q_offset": 32}
    assert _interval_mask.interval_mask(**sizes) is None
    everything_seen = torch.ones(2, 33, dtype=torch.bool)
    assert _interval_mask.interval_mask(attention_mask=everything_seen, **sizes) is None


def test_other_masks_are_those_of_sdpa():
    seen = torch.ones(2, 33, dtype=torch.bool)
    seen[1, 7] = False  # a hole
    for q_length, offset in ((1, 32), (5, 28)):
        sizes = {"batch_size": 2, "q_length": q_length, "kv_length": 33, "q_offset": offset}
        given = {"attention_mask": seen, **sizes}
        found = _interval_mask.interval_mask(**given)
        assert found.dtype == torch.bool
        assert torch.equal(found, sdpa_mask(**given))


@pytest.mark.parametrize(
    ("row", "interval"),
    [("0000", (0, 0)), ("1111", (0, 4)), ("0110", (1, 3)), ("0001", (3, 4)), ("1011", None)],
)
def test_intervals(row, interval):
    mask = torch.tensor([[[[c == "1" for c in row]]]])
    found = _interval_mask.intervals(mask)
    assert (None if found is None else tuple(found.flatten().tolist())) == interval


def test_a_mask_by_head_is_no_interval():
    assert _interval_mask.intervals(torch.ones(1, 2, 1, 4, dtype=torch.bool)) is None
