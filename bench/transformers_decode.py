"""Decode steps of a Llama-8B-shaped model in transformers: numba_attn beside SDPA.

    python bench/transformers_decode.py

The model has 4 layers of Llama 3 8B's shape, random weights in bfloat16, and an eighth of its
vocabulary, as it has an eighth of the layers: so the time outside attention has its usual share.
The cache is filled with random keys and values instead of by a prompt. Both run in bursts, in
turn, in one process, over the same weights; each has a cache of its own, which grows with every
token that it generates. A dynamic cache is what `generate` uses; it is copied whole for each new
token. With a static cache SDPA is given a mask, and takes another path, a faster one.
"""

import argparse
import statistics

import torch
import transformers

import numba_attn.integrations.transformers
from numba_attn import _machine, _measure

PEER, OURS = "sdpa", "numba_attn"
BURSTS = {"burst": 4, "uncounted": 1}
SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256 // 8,
}
SMALL = {"hidden_size": 128, "intermediate_size": 64, "vocab_size": 64, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 1, "head_dim": 32}


def main(arguments=None):
    """Print times and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=8192, help="tokens (default 8192)")
    parser.add_argument("--layers", type=int, default=4, help="(default 4)")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each row (default 10)")
    parser.add_argument("--small", action="store_true", help="a tiny model: only to see it work")
    options = parser.parse_args(arguments)
    torch.set_num_threads(numba_attn.get_num_threads())
    numba_attn.integrations.transformers.register()
    model = make_model(SMALL if options.small else SHAPE, options)
    print(f"CPU: {_machine.cpu_name()}, {numba_attn.get_num_threads()} threads")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    with torch.inference_mode():
        report("attention", attention_calls(model, options), options)
        report("attention, masked", attention_calls(model, options, masked=True), options)
        for kind in "dynamic", "static":
            report(f"token, {kind} cache", token_calls(model, kind, options), options)


def make_model(shape, options):
    """Make a model with random weights in bfloat16."""
    torch.manual_seed(0)
    longest = options.context + 10_000
    config = transformers.LlamaConfig(
        num_hidden_layers=options.layers,
        max_position_embeddings=longest,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        dtype=torch.bfloat16,
        **shape,
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=OURS).eval()


def keys(model, tokens):
    """Draw keys, or values, of one layer."""
    config = model.config
    shape = 1, config.num_key_value_heads, tokens, config.head_dim
    return torch.randn(shape, dtype=torch.bfloat16)


def attention_calls(model, options, masked=False):
    """Return calls of the attention functions alone, one per layer; a static cache has a mask."""
    config, layers = model.config, [layer.self_attn for layer in model.model.layers]
    query = torch.randn(1, config.num_attention_heads, 1, config.head_dim, dtype=torch.bfloat16)
    stored = [(keys(model, options.context), keys(model, options.context)) for _ in layers]

    def call(kind, layer, pair):
        attend = transformers.AttentionInterface().get_interface(kind, None)
        mask = None
        if masked and kind == OURS:
            mask = torch.tensor([0, options.context], dtype=torch.int32).view(1, 1, 1, 2)
        elif masked:
            mask = torch.ones(1, 1, 1, options.context, dtype=torch.bool)
        return lambda: attend(layer, query, *pair, mask, scaling=layer.scaling)

    return {
        kind: [call(kind, *each) for each in zip(layers, stored, strict=True)]
        for kind in (OURS, PEER)
    }


def token_calls(model, cache_kind, options):
    """Return calls that generate one token each."""
    config = model.config
    filling = [(keys(model, options.context), keys(model, options.context)) for _ in range(2)]

    def call(kind):
        if cache_kind == "static":
            cache = transformers.StaticCache(config, max_cache_len=options.context + 2000)
        else:
            cache = transformers.DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            cache.update(*filling[layer % 2], layer)
        token = torch.zeros(1, 1, dtype=torch.long)

        def step():
            model.config._attn_implementation = kind
            logits = model(token, cache=cache, use_cache=True).logits
            token.copy_(logits[:, -1].argmax(-1, keepdim=True))

        return step

    return {kind: [call(kind)] for kind in (OURS, PEER)}


def report(what, calls, options):
    """Time calls, and print the medians and their ratio."""
    times = _measure.in_turn(calls, options.seconds, **BURSTS)
    ours, peer = (1000 * statistics.median(times[kind]) for kind in (OURS, PEER))
    print(f"{what}: {OURS} {ours:.2f} ms, {PEER} {peer:.2f} ms, {peer / ours:.2f} x", flush=True)


if __name__ == "__main__":
    main()
