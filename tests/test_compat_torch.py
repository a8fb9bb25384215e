"""The front ends on tensors of torch: tensors come back, with the bits of the NumPy call."""

import numpy as np
import pytest

from numba_attn import compat

torch = pytest.importorskip("torch", reason="torch is not installed")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(found, expected):
    assert isinstance(found, torch.Tensor)
    np.testing.assert_array_equal(found.numpy(), expected)


def test_flash_attention_appends_to_the_tensors():
    q, k, v = draw(2, 1, 4, 32), draw(2, 1, 1, 32, seed=1), draw(2, 1, 1, 32, seed=2)
    caches = draw(2, 9, 8, 1, 32, seed=3)
    lens, table = torch.tensor([11, 8]), torch.tensor([[3, 5], [8, 0]], dtype=torch.int32)
    copies = caches.numpy().copy()
    options = {"causal": True, "return_softmax_lse": True}
    out, lse = compat.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=lens, block_table=table, **options
    )
    arrays = (q.numpy(), *copies, k.numpy(), v.numpy())
    where = {"cache_seqlens": lens.numpy(), "block_table": table.numpy()}
    expected_out, expected_lse = compat.flash_attn_with_kvcache(*arrays, **where, **options)
    same(out, expected_out)
    same(lse, expected_lse)
    same(caches, copies)
    assert torch.equal(caches[0, 5, 3], k[0, 0])


def test_flash_attention_takes_the_new_tokens_back():
    q, k = draw(1, 1, 4, 32), draw(1, 1, 1, 32)
    caches = draw(2, 1, 8, 1, 32)
    before = caches.clone()
    with pytest.raises(TypeError, match="softmax_scale"):
        compat.flash_attn_with_kvcache(q, *caches, k, k, cache_seqlens=3, softmax_scale="x")
    assert torch.equal(caches, before)


def test_flashinfer():
    q, k, v = draw(4, 32), draw(50, 1, 32, seed=1), draw(50, 1, 32, seed=2)
    found = compat.single_decode_with_kv_cache(q, k, v, return_lse=True)
    expected = compat.single_decode_with_kv_cache(*map(np.asarray, (q, k, v)), return_lse=True)
    for one, other in zip(found, expected, strict=True):
        same(one, other)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_merges(dtype):
    v, s = draw(3, 4, 32).to(getattr(torch, dtype)), draw(3, 4)
    merged, lse = compat.merge_state(v, s, -v, s + 1)
    assert merged.dtype == v.dtype
    weights = torch.tensor([1.0, 2.0]) / 3  # to base 2
    expected = (weights[0] - weights[1]) * v.float()
    torch.testing.assert_close(merged.float(), expected, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(lse, s + np.log2(3).astype(np.float32))
    both, s_both = compat.merge_states(torch.stack([v, -v], 1), torch.stack([s, s + 1], 1))
    assert torch.equal(both, merged)
    assert torch.equal(s_both, lse)
    output, output_lse = torch.empty_like(v), torch.empty(4, 3)
    natural = s * np.log(2).astype(np.float32)
    compat.merge_attn_states(output, v, natural.T, -v, natural.T + float(np.log(2)), output_lse)
    torch.testing.assert_close(output, merged)
    torch.testing.assert_close(output_lse, (lse * float(np.log(2))).T)


@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa_is_that_of_torch(is_causal):
    q, k, v = draw(2, 4, 1, 32), draw(2, 1, 50, 32, seed=1), draw(2, 1, 50, 32, seed=2)
    options = {"is_causal": is_causal, "enable_gqa": True, "scale": 0.3}
    found = compat.scaled_dot_product_attention(q, k, v, **options)
    double = (x.double() for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*double, **options)
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)


def test_a_front_end_has_no_backward_pass():
    q, k = draw(4, 32).requires_grad_(), draw(50, 1, 32)
    with pytest.raises(TypeError, match="q: .*autograd"):
        compat.single_decode_with_kv_cache(q, k, k)
