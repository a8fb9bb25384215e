"""Generation by Hugging Face transformers: the same tokens as with its eager attention."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformers
from _hf_models import (
    CONFIGS,
    IGNORED_BY_SDPA,
    generate,
    integration,
    least_margin,
    model,
    padded,
    prompts,
)
from _process import run

from numba_attn.integrations import _dense_op

NAMES = sorted(CONFIGS)
LENGTHS = 3, 30, 8, 17, 1, 40, 25, 12  # longer and shorter than the window


@pytest.fixture
def decode_steps(monkeypatch):
    """Count the decode steps that read a dense cache in place."""
    counted = []

    def counting(*args, **options):
        if args[0].shape[1] == 1:  # of q [S, Q, Hq, D]; some prompts come here, too
            counted.append(args)
        return paged_attention(*args, **options)

    paged_attention = _dense_op.paged_attention
    monkeypatch.setattr(_dense_op, "paged_attention", counting)
    return counted


@pytest.mark.parametrize("name", NAMES)
def test_64_tokens_equal_eager(name, decode_steps):
    made, (prompt,) = model(name), prompts(20)
    expected = generate(made, "eager", prompt[None])
    assert torch.equal(generate(made, "numba_attn", prompt[None]), expected)
    assert len(decode_steps) == 63 * made.config.num_hidden_layers
    assert len(set(expected[0].tolist())) > 20
    assert least_margin(made, torch.cat((prompt, expected[0])), 20) > 1e-4


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", NAMES)
def test_left_padded_prompts(name, cache, decode_steps):
    ids, mask = padded(prompts(5, 20, 13))
    options = {"attention_mask": mask, "tokens": 32, "cache_implementation": cache}
    expected = generate(model(name), "eager", ids, **options)
    assert torch.equal(generate(model(name), "numba_attn", ids, **options), expected)
    assert len(decode_steps) == 31 * model(name).config.num_hidden_layers


def test_a_static_cache_under_compile(decode_steps):
    """In one graph, which serves all lengths."""
    made, (ids, mask) = model("llama"), padded(prompts(5, 20, 13))
    expected = generate(made, "eager", ids, 32, attention_mask=mask)
    found = compiled(made, ids, mask)
    assert torch.equal(found, expected)
    assert len(decode_steps) == 31 * made.config.num_hidden_layers
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow  # several seconds each
@pytest.mark.parametrize("name", sorted(set(NAMES) - {"llama"}))
def test_any_model_under_compile(name, decode_steps):
    """A static cache of a window has two graphs: before it is full, and after."""
    made, (ids, mask) = model(name), padded(prompts(5, 20, 13))
    expected = generate(made, "eager", ids, 32, attention_mask=mask)
    assert torch.equal(compiled(made, ids, mask), expected)
    assert len(decode_steps) == 31 * made.config.num_hidden_layers
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def compiled(made, ids, mask):
    """Generate with a static cache and a compiled forward pass, without breaks in its graph."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    how = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    how._compile_all_devices = True  # by itself, transformers compiles on no CPU
    options = {"cache_implementation": "static", "compile_config": how}
    return generate(made, "numba_attn", ids, 32, attention_mask=mask, **options)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_logits(name):
    """Fed a text token by token: an error at most twice that of the library's own attention."""
    (text,) = prompts(48)
    half = model(name).to(torch.bfloat16)
    try:
        peer = "eager" if name in IGNORED_BY_SDPA else "sdpa"
        found, own = (step_logits(half, kind, text) for kind in ("numba_attn", peer))
    finally:
        whole = half.to(torch.float32)
        model.cache_clear()
    exact = step_logits(whole, "eager", text)
    error = (own - exact).abs().max()
    assert error > 0
    assert (found - exact).abs().max() <= 2 * error


def step_logits(made, implementation, text):
    """Return the logits of each token of a text, fed one by one."""
    made.set_attn_implementation(implementation)
    cache, rows = None, []
    with torch.no_grad():
        for token in text:
            out = made(token.reshape(1, 1), cache=cache, use_cache=True)
            cache = out.cache
            rows.append(out.logits[0, -1].float())
    return torch.stack(rows)


@pytest.mark.parametrize("name", NAMES)
def test_continuous_batching(name, monkeypatch):
    """8 requests at once; blocks are read in place where transformers can give a table of them."""
    tables = []
    attend = integration._continuous_batching.attend

    def counting(query, key, value, batch, options):
        tables.append(batch.block_table is not None)
        return attend(query, key, value, batch, options)

    monkeypatch.setattr(integration._continuous_batching, "attend", counting)
    made, rows = model(name), prompts(*LENGTHS)
    expected = [generate(made, "eager", row[None], 32)[0].tolist() for row in rows]
    made.set_attn_implementation("numba_attn")
    found = batched(made, rows)
    assert found == expected
    assert made.config._attn_implementation == "numba_attn"
    if name in ("llama", "qwen2"):
        assert sum(tables) > len(tables) / 2
    else:  # transformers has block tables for models without windows
        assert tables
        assert not any(tables)


def batched(made, rows):
    """Generate by continuous batching; return the new tokens of each request."""
    config = transformers.GenerationConfig(
        max_new_tokens=32, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    batching = transformers.ContinuousBatchingConfig(
        page_size=16, num_blocks=64, max_batch_tokens=64
    )
    outputs = made.generate_batch(
        [row.tolist() for row in rows],
        generation_config=config,
        continuous_batching_config=batching,
    )
    by_number = sorted(outputs.values(), key=lambda out: int(out.request_id.split("_")[-1]))
    return [out.generated_tokens for out in by_number]


def test_the_paged_name():
    made, rows = model("llama"), prompts(5, 9)
    expected = [generate(made, "eager", row[None], 32)[0].tolist() for row in rows]
    with pytest.warns(FutureWarning, match="prefix is no longer needed"):
        made.set_attn_implementation("paged|numba_attn")
    assert batched(made, rows) == expected


def test_other_implementations_batch_as_before():
    made, rows = model("llama"), prompts(5, 9)
    expected = [generate(made, "eager", row[None], 32)[0].tolist() for row in rows]
    made.set_attn_implementation("sdpa")
    integration.register()
    integration.register()
    assert batched(made, rows) == expected


def test_nothing_compiles_during_generation(tmp_path):
    run(
        "import numba_attn\n"
        "from numba.core import event\n"
        "with event.install_recorder('numba:compile') as warm:\n"
        "    numba_attn.warmup(4, 2, 32, dtype='float32')\n"
        "assert warm.buffer\n"
        "from _hf_models import *\n"
        "from test_transformers import batched\n"
        "made, rows = model('llama'), prompts(5, 20, 13)\n"
        "ids, mask = padded(rows)\n"
        "with event.install_recorder('numba:compile') as compiled:\n"
        "    for cache in 'dynamic', 'static':\n"
        "        options = dict(attention_mask=mask, cache_implementation=cache)\n"
        "        generate(made, 'numba_attn', ids, 8, **options)\n"
        "    batched(made, rows)\n"
        "    generate(model('gpt_oss'), 'numba_attn', ids[1:2], 8)\n"
        "assert not compiled.buffer, compiled.buffer\n",
        NUMBA_CACHE_DIR=tmp_path,
    )


def test_numba_attn_imports_no_framework():
    run("import sys, numba_attn\nassert not {'torch', 'transformers'} & set(sys.modules)\n")
