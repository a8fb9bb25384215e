"""The front ends' arguments, as the other libraries document them: names, order, defaults."""

import inspect

import pytest

from numba_attn import compat

REQUIRED = inspect.Parameter.empty
SIGNATURES = {
    "flash_attn_with_kvcache": {  # flash-attn 2.8
        "q": REQUIRED,
        "k_cache": REQUIRED,
        "v_cache": REQUIRED,
        "k": None,
        "v": None,
        "rotary_cos": None,
        "rotary_sin": None,
        "cache_seqlens": None,
        "cache_batch_idx": None,
        "cache_leftpad": None,
        "block_table": None,
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "rotary_interleaved": True,
        "alibi_slopes": None,
        "num_splits": 0,
        "return_softmax_lse": False,
    },
    "single_decode_with_kv_cache": {  # FlashInfer 0.6
        "q": REQUIRED,
        "k": REQUIRED,
        "v": REQUIRED,
        "kv_layout": "NHD",
        "pos_encoding_mode": "NONE",
        "use_tensor_cores": False,
        "q_scale": None,
        "k_scale": None,
        "v_scale": None,
        "window_left": -1,
        "logits_soft_cap": None,
        "sm_scale": None,
        "rope_scale": None,
        "rope_theta": None,
        "return_lse": False,
    },
    "merge_state": dict.fromkeys(("v_a", "s_a", "v_b", "s_b"), REQUIRED),
    "merge_states": dict.fromkeys(("v", "s"), REQUIRED),
    "merge_attn_states": {  # vLLM, late 2026
        "output": REQUIRED,
        "prefix_output": REQUIRED,
        "prefix_lse": REQUIRED,
        "suffix_output": REQUIRED,
        "suffix_lse": REQUIRED,
        "output_lse": None,
        "prefill_tokens_with_context": None,
        "output_scale": None,
    },
    "scaled_dot_product_attention": {  # torch 2.13
        "query": REQUIRED,
        "key": REQUIRED,
        "value": REQUIRED,
        "attn_mask": None,
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": None,
        "enable_gqa": False,
    },
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    parameters = inspect.signature(getattr(compat, name)).parameters
    found = {name: parameter.default for name, parameter in parameters.items()}
    assert list(found.items()) == list(SIGNATURES[name].items())
    kinds = {parameter.kind for parameter in parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_every_name_is_here():
    assert {*SIGNATURES, "block_tables_from_csr"} == set(compat.__all__)
