"""The attention function of transformers, called directly: which path it takes, and its answers."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import numpy as np
import torch
import transformers
from _hf_models import generate, integration, model, padded, prompts
from torch.nn.functional import pad

from numba_attn.integrations import _dense_op, _fall_through, _interval_mask

SCALE = 0.3


def layer(name, index=0):
    """Return an attention layer: 4 query heads, 2 kv heads, head_dim 32."""
    return model(name).model.layers[index].self_attn.requires_grad_(False)


def draw(num_seqs=2, queries=1, keys=40, dtype=torch.float32):
    """Draw q [S, 4, Q, 32], k and v [S, 2, L, 32]."""
    generator = torch.Generator().manual_seed(7)
    shapes = (4, queries, 32), (2, keys, 32), (2, keys, 32)
    return [torch.randn(num_seqs, *shape, generator=generator).to(dtype) for shape in shapes]


def dense(q, k, v, allowed, scale=SCALE, softcap=None, sinks=None):
    """Compute the softmax in float64; allowed is bool [S, 1, Q, L], or a bias."""
    q, k, v = (x.double().numpy() for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = scale * q @ k.swapaxes(2, 3)
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    allowed = allowed.numpy()
    logits = np.where(allowed, logits, -np.inf) if allowed.dtype == bool else logits + allowed
    most = logits.max(-1, keepdims=True)
    extra = 0.0
    if sinks is not None:
        sinks = sinks.double().numpy()[:, None, None]
        most = np.maximum(most, sinks)
        extra = np.exp(sinks - most)
    p = np.exp(logits - most)
    out = p / (p.sum(-1, keepdims=True) + extra) @ v
    return torch.from_numpy(out.swapaxes(1, 2))


def everything(queries, keys, offset=0, window=None):
    """Return the causal mask bool [1, 1, Q, L] of queries that stand at offset and later."""
    at, key = torch.arange(queries)[:, None] + offset, torch.arange(keys)
    mask = key <= at
    return (mask & (key > at - window) if window else mask)[None, None]


def close(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)


@pytest.fixture
def paths(monkeypatch):
    """Record which of the three functions answers."""
    taken = []

    def watch(module, name, path):
        function = getattr(module, name)

        def watched(*args, **options):
            taken.append(path)
            return function(*args, **options)

        monkeypatch.setattr(module, name, watched)

    watch(_dense_op, "paged_attention", "numba_attn")
    watch(_fall_through, "sdpa_attention_forward", "sdpa")
    eager = _fall_through._eager
    monkeypatch.setattr(
        _fall_through, "_eager", lambda module: taken.append("eager") or eager(module)
    )
    return taken


OPTIONS = [
    {},
    {"softcap": 2.0},
    {"s_aux": torch.tensor([1.0, -2.0, 30.0, 0.0])},
    {"sliding_window": 7},
    {"softcap": 2.0, "sliding_window": 7, "s_aux": torch.tensor([1.0, -2.0, 3.0, 0.0])},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
def test_a_decode_step(options, paths):
    q, k, v = draw()
    out, weights = integration.attention(layer("llama"), q, k, v, None, scaling=SCALE, **options)
    allowed = everything(1, 40, 39, options.get("sliding_window"))
    close(out, dense(q, k, v, allowed, softcap=options.get("softcap"), sinks=options.get("s_aux")))
    assert weights is None
    assert paths == ["numba_attn"]


def test_a_decode_step_with_intervals_and_longer_memory(paths):
    """A part of a longer cache is read where it is; what lies outside the intervals is not."""
    q, k, v = draw(num_seqs=3, keys=60)
    k[:, :, 45:], v[:, :, 45:], k[1, :, :9], v[1, :, :9] = (float("nan"),) * 4
    intervals = torch.tensor([[0, 45], [9, 41], [3, 3]], dtype=torch.int32).view(3, 1, 1, 2)
    out, _ = integration.attention(
        layer("llama"), q, k[:, :, :50], v[:, :, :50], intervals, scaling=SCALE, sliding_window=2
    )
    allowed = _interval_mask.as_bool(intervals, 60)
    expected = dense(q[:2], *(x[:2].nan_to_num() for x in (k, v)), allowed[:2])
    close(out[:2], expected)  # the window is in the mask
    assert not out[2].any()
    assert paths == ["numba_attn"]


def test_the_default_scale(paths):
    q, k, v = draw()
    out, _ = integration.attention(layer("llama"), q, k, v, None)
    close(out, dense(q, k, v, everything(1, 40, 39), scale=32**-0.5))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("name", "options", "path"),
    [
        ("llama", {}, "sdpa"),
        ("gemma2", {"softcap": 2.0}, "eager"),
        ("gpt_oss", {}, "eager"),
    ],
)
def test_a_mask_that_is_no_interval(name, options, path, bias, paths):
    """One query token, keys with holes, as bool or as what is added to the logits."""
    module, (q, k, v) = layer(name), draw()
    mask = torch.rand(2, 1, 1, 40, generator=torch.Generator().manual_seed(3)) < 0.5
    mask = torch.where(mask, 0.0, -1e4) if bias else mask
    if name == "gpt_oss":
        options = {"s_aux": module.sinks}
    out, _ = integration.attention(module, q, k, v, mask, scaling=SCALE, **options)
    sinks = options.get("s_aux")
    close(out, dense(q, k, v, mask, softcap=options.get("softcap"), sinks=sinks))
    assert paths == [path]


@pytest.mark.parametrize(
    ("name", "options", "path"),
    [
        ("llama", {}, "sdpa"),
        ("llama", {"sliding_window": 60}, "sdpa"),
        ("llama", {"sliding_window": 7}, "numba_attn"),
        ("gemma2", {"softcap": 2.0}, "numba_attn"),
        ("gpt_oss", {"sliding_window": 7}, "numba_attn"),
    ],
)
@pytest.mark.parametrize("keys", [30, 40])
def test_a_prompt_without_a_mask(name, options, path, keys, paths):
    """The queries stand at the first keys; in a static cache, more may follow."""
    module, (q, k, v) = layer(name), draw(queries=30, keys=keys)
    given = options | ({"s_aux": module.sinks} if name == "gpt_oss" else {})
    out, _ = integration.attention(module, q, k, v, None, scaling=SCALE, **given)
    allowed = everything(30, keys, 0, options.get("sliding_window"))
    softcap, sinks = options.get("softcap"), given.get("s_aux")
    close(out, dense(q, k, v, allowed, softcap=softcap, sinks=sinks))
    assert paths == [path]


@pytest.mark.parametrize(
    ("name", "option", "path"),
    [("llama", None, "sdpa"), ("gemma2", "softcap", "eager"), ("gpt_oss", "s_aux", "eager")],
)
def test_several_tokens_with_a_mask(name, option, path, paths):
    module, (q, k, v) = layer(name), draw(queries=3)
    options = {"softcap": 2.0, "s_aux": getattr(module, "sinks", None)}
    options = {key: value for key, value in options.items() if key == option}
    mask = everything(3, 40, 37).expand(2, 1, 3, 40)
    out, _ = integration.attention(module, q, k, v, mask, scaling=SCALE, **options)
    close(out, dense(q, k, v, mask, softcap=options.get("softcap"), sinks=options.get("s_aux")))
    assert paths == [path]


def test_intervals_are_a_mask_for_other_paths(paths):
    q, k, v = draw()
    intervals = torch.tensor([[0, 31], [9, 40]], dtype=torch.int32).view(2, 1, 1, 2)
    bias = torch.randn(1, 4, 1, 40, generator=torch.Generator().manual_seed(5))
    out, _ = integration.attention(
        layer("llama"), q, k, v, intervals, scaling=SCALE, position_bias=bias
    )
    allowed = _interval_mask.as_bool(intervals, 40)
    close(out, dense(q, k, v, torch.where(allowed, bias, -np.inf)))
    assert paths == ["sdpa"]


def test_gradients_and_weights_are_of_the_library(paths):
    q, k, v = (x.requires_grad_() for x in draw())
    module = layer("gemma2")
    options = {"scaling": SCALE, "softcap": 2.0}
    integration.attention(module, q, k, v, None, **options)[0].sum().backward()
    assert q.grad.abs().sum() > 0
    with torch.no_grad():
        out, weights = integration.attention(
            module, q, k, v, None, output_attentions=True, **options
        )
    assert weights.shape == (2, 4, 1, 40)
    close(out, dense(q.detach(), k.detach(), v.detach(), everything(1, 40, 39), softcap=2.0))
    assert paths == ["eager", "eager"]


def test_a_prompt_of_the_eager_function_is_causal(paths):
    q, k, v = draw(queries=30, keys=30)
    options = {"scaling": SCALE, "softcap": 2.0, "output_attentions": True}
    out, weights = integration.attention(layer("gemma2"), q, k, v, None, **options)
    allowed = everything(30, 30)
    close(out, dense(q, k, v, allowed, softcap=2.0))
    assert not weights[~allowed.expand_as(weights)].any()
    assert paths == ["eager"]


def test_dropout_and_float64_are_of_the_library(paths):
    q, k, v = draw()
    integration.attention(layer("llama"), q, k, v, None, dropout=0.5)
    out, _ = integration.attention(layer("llama"), *draw(dtype=torch.float64), None, scaling=SCALE)
    close(out, dense(q, k, v, everything(1, 40, 39)))
    assert paths == ["sdpa", "sdpa"]


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("keyword", ["indices", "cu_seq_lens_q", "temperature"])
def test_an_unknown_keyword_raises(keyword, queries):
    q, k, v = draw(queries=queries)
    with pytest.raises(ValueError, match=f"numba_attn: {keyword}: expected keywords that are"):
        integration.attention(layer("llama"), q, k, v, None, **{keyword: torch.tensor([0, 1])})


def test_an_unknown_keyword_raises_from_a_model():
    made = model("llama")
    made.set_attn_implementation("numba_attn")
    with pytest.raises(ValueError, match="numba_attn: a_new_option: expected"):
        made(torch.tensor([[1, 2]]), a_new_option=3)


def test_what_is_none_or_harmless_changes_nothing(paths):
    q, k, v = draw()
    plain = integration.attention(layer("llama"), q, k, v, None)[0]
    harmless = dict.fromkeys(integration.HARMLESS, 1) | {"indices": None, "softcap": None}
    again = integration.attention(
        layer("llama"), q, k, v, None, output_attentions=False, dropout=0.0, **harmless
    )[0]
    assert torch.equal(plain, again)
    assert paths == ["numba_attn", "numba_attn"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("is_causal", False), ("dropout", 0.1), ("position_bias", 1), ("sinks", 1), ("indices", 1)],
)
def test_what_continuous_batching_does_not_take(name, value):
    starts = torch.tensor([0, 1], dtype=torch.int32)
    batch = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "write_index": [], name: value}
    with pytest.raises(ValueError, match=name):
        integration.attention(layer("llama"), *draw(1, 1, 1), None, **batch)


@pytest.mark.parametrize("options", OPTIONS[:1] + OPTIONS[-1:], ids=["plain", "all"])
def test_a_padded_batch(options, paths):
    """What follows the last sequence is padding, as of a compiled batch."""
    q, k, v = draw(num_seqs=1, queries=9, keys=40)
    rows, keys = ([0, 5, 6, 6, 6], [0, 20, 31, 31, 31])
    batch = {"write_index": [], "read_index": [], "is_causal": True, "dropout": 0.0}
    batch["cu_seq_lens_q"], batch["cu_seq_lens_k"] = (
        torch.tensor(x, dtype=torch.int32) for x in (rows, keys)
    )
    out, _ = integration.attention(layer("llama"), q, k, v, None, scaling=SCALE, **batch, **options)
    assert out.shape == (1, 9, 4, 32)
    for i in range(2):
        at, key = slice(rows[i], rows[i + 1]), slice(keys[i], keys[i + 1])
        lengths = rows[i + 1] - rows[i], keys[i + 1] - keys[i]
        allowed = everything(*lengths, lengths[1] - lengths[0], options.get("sliding_window"))
        one = q[:, :, at], k[:, :, key], v[:, :, key]
        softcap, sinks = options.get("softcap"), options.get("s_aux")
        close(out[:, at], dense(*one, allowed, softcap=softcap, sinks=sinks))
    assert not out[:, 6:].any()


def test_a_model_without_an_eager_function():
    q, k, v = draw(queries=2)
    mask = everything(2, 40, 38)
    with pytest.raises(ValueError, match="Module passes softcap or sinks, which SDPA ignores"):
        integration.attention(torch.nn.Module(), q, k, v, mask, softcap=2.0)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_prompts_padded_on_the_right(name, paths):
    """The padding is a hole, until a window has passed it."""
    ids, mask = (pad(x, (0, 3)) for x in padded(prompts(9, 12)))
    options = {"attention_mask": mask, "tokens": 24}
    expected = generate(model(name), "eager", ids, **options)
    assert torch.equal(generate(model(name), "numba_attn", ids, **options), expected)
    assert set(paths) == ({"sdpa"} if name == "llama" else {"eager", "numba_attn"})


def test_a_compiled_forward_pass(paths):
    """By a loop of one's own over a static cache, without a mask: it is made in the graph."""
    made, (text,) = model("llama"), prompts(12)
    made.set_attn_implementation("eager")
    with torch.no_grad():
        expected = made(text[None]).logits[0]
    made.set_attn_implementation("numba_attn")
    cache = transformers.StaticCache(made.config, max_cache_len=32)
    forward = torch.compile(made.forward, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        made(text[None, :4], cache=cache)
        del paths[:]
        rows = [forward(text[None, i : i + 1], cache=cache).logits[0, 0] for i in range(4, 12)]
    torch.testing.assert_close(torch.stack(rows), expected[4:], rtol=1e-4, atol=1e-4)
    assert paths == 8 * made.config.num_hidden_layers * ["numba_attn"]


def test_the_operator():
    q, k, v = draw()
    q = q[:, :, 0]
    intervals = torch.tensor([[0, 31], [9, 40]], dtype=torch.int32).view(2, 1, 1, 2)
    options = {"scale": SCALE, "softcap": 2.0, "sliding_window": 7, "sinks": torch.ones(4)}
    op = torch.ops.numba_attn.dense_attention.default
    for args, keywords in (((q, k, v, None), {}), ((q, k, v, intervals), options)):
        torch.library.opcheck(op, args, keywords)


def test_numpydoc():
    validate = pytest.importorskip("numpydoc.validate", reason="numpydoc is not installed").validate
    errors = validate("numba_attn.integrations.transformers.register")["errors"]
    assert not [
        code for code, _ in errors if code[:2] in ("GL", "PR", "RT", "SS") and code > "GL03"
    ]
