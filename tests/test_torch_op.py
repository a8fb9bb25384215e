"""The operators of torch: what they compute, what they declare, and that a graph keeps them."""

import shutil

import numpy as np
import pytest
from _frameworks import FORMATS, OPTIONS, B, D, Hkv, N, bits, call, pools

import numba_attn

torch = pytest.importorskip("torch", minversion="2.6", reason="torch 2.6 is not installed")
_tensors = pytest.importorskip("_tensors", reason="torch is not installed")
torch_op = pytest.importorskip("numba_attn.integrations.torch_op", reason="torch is not installed")
assert_same, numbers = _tensors.assert_same, _tensors.numbers
tensor, tensors = _tensors.tensor, _tensors.tensors

OPS = torch.ops.numba_attn


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def op_arguments(given):
    """Split what `paged_attention` is given into arguments and options of the operator."""
    names = ("q", "k_pool", "v_pool", "block_tables", "seq_lens")
    return [given[n] for n in names], {n: x for n, x in given.items() if n not in names}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_bits_are_those_of_the_function(name):
    given = call() | OPTIONS[name]
    expected = numba_attn.paged_attention(**given, return_lse=True)
    args, options = op_arguments(tensors(given))
    assert_same(OPS.paged_attention(*args, **options), expected)
    assert_same(torch_op.paged_attention(*args, **options, return_lse=True), expected)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("q", ["bfloat16", "float32"])
@pytest.mark.filterwarnings("ignore")  # torch's own, of what opcheck uses
def test_opcheck_attention(name, q):
    args, options = op_arguments(tensors(call(q, "float16") | OPTIONS[name]))
    torch.library.opcheck(OPS.paged_attention.default, args, options)


@pytest.mark.parametrize("kv", ["bfloat16", "int8"])
@pytest.mark.filterwarnings("ignore")
def test_opcheck_append(kv):
    k, v = torch.randn(2, 3, Hkv, D)
    k_pool, v_pool = map(tensor, pools(kv))
    scales = {}
    if kv == "int8":
        scales = {"k_scale": torch.ones(N, B, Hkv), "v_scale": torch.ones(N, B, Hkv)}
        scales["compute_scales"] = True
    slots = torch.tensor([5, -1, 40])
    torch.library.opcheck(OPS.append_kv.default, (k, v, k_pool, v_pool, slots), scales)
    torch.library.opcheck(OPS.append_kv.default, (k, None, k_pool, None, slots))


def step(k, v, slots, q, k_pool, v_pool, tables, lens, **options):
    """Write a token, attend, and go on with the result, as a model's layer does."""
    numba_attn.append_kv(k, v, k_pool, v_pool, slots)
    out, lse = numba_attn.paged_attention(
        q * 2, k_pool, v_pool, tables, lens, return_lse=True, **options
    )
    return out.flatten(1) + 1, lse, k_pool[0].clone()


def counted(backend="aot_eager"):
    from torch._dynamo.testing import CompileCounterWithBackend

    return CompileCounterWithBackend(backend)


def layer(tokens):
    """Draw what `step` takes, for a context of so many tokens in each of two sequences."""
    rng = np.random.default_rng(tokens)
    columns = -(-tokens // B)
    q, k, v = (torch.from_numpy(rng.standard_normal((2, h, D), "f")) for h in (4, Hkv, Hkv))
    k_pool, v_pool = torch.from_numpy(rng.standard_normal((2, 80, B, Hkv, D), "f"))
    tables = torch.from_numpy(rng.permutation(80)[: 2 * columns].reshape(2, columns))
    lens = torch.tensor([tokens, tokens - 1])
    slots = tables[:, -1] * B + torch.tensor([1, 0])
    return k, v, slots, q, k_pool, v_pool, tables, lens


def check_step(compiled, tokens, **options):
    eager, graph = layer(tokens), layer(tokens)
    for found, expected in zip(compiled(*graph, **options), step(*eager, **options), strict=True):
        assert torch.equal(found, expected)
    for one, other in zip(graph[4:6], eager[4:6], strict=True):
        assert torch.equal(one, other)


def test_compiled_with_the_full_graph():
    counter = counted()
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    check_step(compiled, 21)
    names = [str(node.target) for node in counter.graphs[0].graph.nodes]
    assert "numba_attn.paged_attention" in names
    assert "numba_attn.append_kv" in names
    check_step(compiled, 21, k_scale=0.5, v_scale=torch.tensor([2.0, 0.5]), sliding_window=7)


def test_a_longer_context_does_not_recompile():
    counter = counted()
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for tokens in (17, 18, 19, 20):  # of tables of 5 columns
        check_step(compiled, tokens)
    assert counter.frame_count == 1
    for tokens in (21, 22, 25, 60, 90, 130):  # the first other number of columns makes it dynamic
        check_step(compiled, tokens)
    assert counter.frame_count == 2


def test_dynamic_from_the_start_compiles_once():
    counter = counted()
    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
    for tokens in (17, 21, 60, 130):
        check_step(compiled, tokens)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of inductor
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compiled_by_inductor():
    compiled = torch.compile(step, fullgraph=True)
    for tokens in (17, 60):
        check_step(compiled, tokens)


@pytest.mark.parametrize("kv", FORMATS)
def test_every_format_in_a_graph(kv):
    given = call("bfloat16", kv)
    compiled = torch.compile(numba_attn.paged_attention, fullgraph=True, backend="aot_eager")
    args, _ = op_arguments(tensors(given))
    assert numbers(compiled(*args)) == bits(numba_attn.paged_attention(**given))


def test_gradients_are_refused_in_a_graph_too():
    args, _ = op_arguments(tensors(call("float32", "float32")))
    args[0].requires_grad_()
    with pytest.raises(Exception, match="q: expected a tensor that autograd does not follow"):
        OPS.paged_attention(*args)
    with torch.no_grad():
        assert OPS.paged_attention(*args)[0].shape == args[0].shape


def test_shapes_without_values():
    given = {n: x.to("meta") for n, x in tensors(call()).items()}
    args, _ = op_arguments(given)
    out, lse = OPS.paged_attention(*args)
    assert (out.shape, out.dtype, lse.dtype) == (args[0].shape, torch.bfloat16, torch.float32)
