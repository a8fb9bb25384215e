"""Tiny, randomly initialised transformers models; nothing is downloaded.

Weights of N(0, 0.3^2) set greedy choices well apart: the two best logits differ by 1e-4 or more in
every step of these tests, and the texts are varied, where the usual 0.02 gives near ties and
models that repeat one token.
"""

import functools

import torch
import transformers

import numba_attn.integrations.transformers as integration

integration.register()
torch.set_num_threads(1)  # such small models wait for each other's threads more than they work

WINDOW = 16
VOCAB = 256
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
SEVEN = {"hidden_size": 224, "num_attention_heads": 7, "num_key_value_heads": 1}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}  # a choice would make rounding a jump
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CONFIGS = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", SEVEN),  # 7 query heads for a kv head
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 32},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 32, "sliding_window": WINDOW, "rope_parameters": ROPE, **EXPERTS},
    ),
}
IGNORED_BY_SDPA = {"gemma2", "gpt_oss"}  # which have softcap, and sinks


@functools.cache
def model(name):
    """Return a model in float32; `attend` and `half` set what else it is."""
    kind, changes = CONFIGS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SIZES | changes)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in (p for key, p in made.named_parameters() if key.endswith("sinks")):
        torch.nn.init.normal_(parameter, std=2.0)
    return made.eval()


def prompts(*lengths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (n,), generator=generator) for n in lengths]


def padded(rows):
    """Return rows of unequal length, padded on the left, and their mask."""
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, longest - len(row) :], mask[i, longest - len(row) :] = row, 1
    return ids, mask


def generate(made, implementation, ids, tokens=64, **options):
    """Generate greedily; return the new tokens [S, tokens]."""
    made.set_attn_implementation(implementation)
    out = made.generate(ids, max_new_tokens=tokens, do_sample=False, **options)
    return out[:, ids.shape[1] :]


def least_margin(made, text, prompt_length):
    """Return by how much the best logit of every step is ahead of the next, at least."""
    made.set_attn_implementation("eager")
    with torch.no_grad():
        logits = made(text[None]).logits[0, prompt_length - 1 : -1]
    best = logits.topk(2).values
    return float((best[:, 0] - best[:, 1]).min())
