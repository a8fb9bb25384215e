"""What the CUDA twin decides on the host, and why it cannot run: tested without a device."""

import itertools
import re
from types import SimpleNamespace

import numpy as np
import pytest

from numba_attn import _arrays, _device, _plan, _plan_cuda
from numba_attn._call import Formats, Options

POOLS = {
    "C-ordered": lambda pool: pool,
    "head-major": lambda pool: pool.transpose(0, 2, 1, 3),
    "one of two": lambda pool: pool[:, :, ::2],
    "backwards": lambda pool: pool[::-1, ::-1],
    "broadcast": lambda pool: np.broadcast_to(pool[:1], pool.shape),
    "one block": lambda pool: pool[2:3],
}


@pytest.mark.parametrize("view", POOLS.values(), ids=POOLS)
def test_span_finds_every_element(view):
    whole = np.arange(3 * 4 * 2 * 5, dtype=np.uint16).reshape(3, 4, 2, 5)
    pool = view(whole)
    span = _plan_cuda.span(pool.shape, pool.strides, 2)
    low = pool.__array_interface__["data"][0] // 2 - span.offset
    start = low - whole.__array_interface__["data"][0] // 2
    run = whole.ravel()[start : start + span.size]
    touched = set()
    for index in np.ndindex(pool.shape):
        at = span.offset + sum(i * s for i, s in zip(index, span.strides, strict=True))
        assert run[at] == pool[index]
        touched.add(at)
    assert min(touched) == 0
    assert max(touched) == span.size - 1


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_span_of_nothing(shape):
    assert _plan_cuda.span(shape, (64, 2), 2) == (0, 0, (0, 0))


def test_span_ignores_the_stride_of_one_element():
    assert _plan_cuda.span((1, 4), (7, 2), 2) == (4, 0, (0, 1))


def test_strides_between_elements_are_refused():
    with pytest.raises(ValueError, match=r"multiples of the 2 bytes .* got strides \(9, 2\) of"):
        _plan_cuda.span((2, 4), (9, 2), 2)


BFLOAT16, PLAIN = Formats(), Options(scale=1.0)
ITEMSIZES = {name: carrier.itemsize for name, carrier in _arrays.CARRIERS.items()}


def pools(k_format="bfloat16", v_format="bfloat16", dims=(64, 128)):
    """Describe two pools, everything in them a multiple of 16 bytes."""
    return [
        _plan_cuda.Rows(address, (-512, 64, 32), dim, ITEMSIZES[name])
        for address, dim, name in zip((4096, 8192), dims, (k_format, v_format), strict=True)
    ]


def variant(rows, formats=BFLOAT16, options=PLAIN):
    return _plan_cuda.step_variant(*rows, formats, options)


@pytest.mark.parametrize("k_format", ITEMSIZES)
@pytest.mark.parametrize("v_format", ITEMSIZES)
def test_rows_of_16_bytes_are_loaded_wide(k_format, v_format):
    formats = Formats("float16", k_format, v_format)
    found = variant(pools(k_format, v_format), formats)
    assert found == _plan_cuda.StepVariant(64, 128, True, formats)
    aligned = pools(k_format, v_format)[0]._replace(strides=(0, 0, 0))
    assert aligned.wide


@pytest.mark.parametrize("name", ITEMSIZES)
@pytest.mark.parametrize("pool", [0, 1])
@pytest.mark.parametrize("what", ["address", "length", "block", "slot", "head"])
def test_what_is_off_by_one_element_is_loaded_narrow(what, pool, name):
    rows = pools(name, name)
    one = rows[pool]
    if what == "address":
        rows[pool] = one._replace(address=one.address + one.itemsize)
    elif what == "length":
        rows[pool] = one._replace(length=one.length + 1)
    else:
        strides = list(one.strides)
        strides[["block", "slot", "head"].index(what)] += one.itemsize
        rows[pool] = one._replace(strides=tuple(strides))
    assert not variant(rows).wide


def test_16_bytes_hold_as_many_elements_as_the_format_says():
    for name, length in {"int8": 16, "float8_e5m2": 16, "bfloat16": 8, "float32": 4}.items():
        for dim in range(1, 33):
            assert pools(name, dims=(dim, 64))[0].wide == (dim % length == 0)


def test_options_that_are_on_are_compiled_in():
    numbers = np.ones(2, np.float32)
    tokens = np.ones((3, 4, 2), np.float32)
    for used, expected in (
        ({}, (False, False, False)),
        ({"softcap": 5.0}, (True, False, False)),
        ({"alibi_slopes": numbers}, (False, True, False)),
        ({"k_scale": numbers, "v_scale": numbers, "sliding_window": 3}, (False, False, False)),
        ({"k_scale": numbers, "v_scale": tokens}, (False, False, True)),
        ({"k_scale": tokens}, (False, False, True)),
    ):
        assert variant(pools(), options=PLAIN._replace(**used))[4:7] == expected


@pytest.mark.parametrize(
    ("dims", "name", "token_scales"),
    [
        ((576, 512), "bfloat16", True),
        ((592, 592), "float16", False),
        ((320, 320), "float32", False),
    ],
)
def test_large_head_dims_that_fit(dims, name, token_scales):
    options = PLAIN._replace(k_scale=np.ones((1, 1, 1), np.float32) if token_scales else None)
    formats = Formats("bfloat16", name, name)
    found = variant(pools(name, name, dims), formats, options)
    assert (found.threads, found.tile, found.stages) == (128, 16, 1)
    assert found.shared_bytes <= _plan_cuda.SHARED_BYTES
    for gqa in (1, 2, 16):
        assert _plan_cuda.split_variant(found, gqa, True).shared_bytes <= _plan_cuda.SHARED_BYTES


@pytest.mark.parametrize(
    ("dims", "name", "needed"),
    [((640, 640), "bfloat16", 50332), ((336, 336), "float32", 49948)],
)
def test_head_dims_that_do_not_fit(dims, name, needed):
    rows, formats = pools(name, name, dims), Formats("bfloat16", name, name)
    text = (
        f"k_pool: tiles of 16 tokens must fit 49152 bytes of shared memory on CUDA, got {needed} "
        f"bytes for D = {dims[0]} in {name} and Dv = {dims[1]} in {name}; use device='cpu'"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        variant(rows, formats)


def test_blocks_are_whole_warps():
    for d, dv in itertools.product((1, 31, 32, 33, 64, 65, 128, 129, 512), repeat=2):
        assert _plan_cuda.StepVariant(d, dv, False).threads in (32, 64, 128)


@pytest.mark.parametrize("width", [4, 8])
def test_every_number_of_a_row_is_dealt_once(width):
    for length in range(1, 600):
        deal = _plan_cuda.deal(length, width)
        pieces = [
            lane + part * deal.lanes for lane in range(deal.lanes) for part in range(deal.parts)
        ]
        assert set(range(deal.pieces)) <= set(pieces)
        assert len(set(pieces)) == len(pieces)
        assert 0 <= deal.pieces * width - length < width
        assert deal.lanes in (1, 2, 4, 8, 16, 32)
        assert deal.parts == 1 or deal.lanes == 32


def test_heads_are_cut_into_groups_that_registers_and_memory_hold():
    for gqa, d, name in itertools.product(range(1, 73), (16, 64, 128, 256, 512), ITEMSIZES):
        simple = _plan_cuda.StepVariant(d, d, True, Formats("bfloat16", name, name))
        if simple.shared_bytes > _plan_cuda.SHARED_BYTES:
            continue
        found = _plan_cuda.split_variant(simple, gqa, True)
        groups = _plan.ceil_div(gqa, found.heads)
        assert groups * found.heads < gqa + groups, "no group without a head"
        assert found.tile == simple.tile, "a tile decides the bits"
        assert found.threads == simple.threads
        assert found.shared_bytes <= _plan_cuda.SHARED_BYTES
        assert found.stages.bit_count() == 1
        if d <= 128:
            assert found.heads >= min(gqa, 5)
            assert found.stages > 1 or name == "float32"


def test_the_kernel_is_chosen_by_what_there_is_to_split():
    for tokens, window, expected in (
        (_plan_cuda.SPLIT_TOKENS, 0, "simple"),
        (_plan_cuda.SPLIT_TOKENS + 1, 0, "split"),
        (100_000, 1, "split"),
    ):
        most = _plan_cuda.most_splits(tokens, PLAIN._replace(sliding_window=window))
        assert _plan_cuda.kernel_name("auto", most) == expected


def test_a_window_lies_in_as_many_splits_as_are_counted():
    split = _plan_cuda.SPLIT_TOKENS
    for window in (1, 2, split - 1, split, split + 1, 5 * split):
        most = _plan_cuda.most_splits(10**6, PLAIN._replace(sliding_window=window))
        touched = [
            (end - 1) // split - (end - window) // split + 1 for end in range(window, 9 * split)
        ]
        assert max(touched) <= most <= max(touched) + 1


def test_splits_of_the_twins_fit():
    assert _plan.SPLIT_TOKENS % _plan_cuda.SPLIT_TOKENS == 0
    assert _plan_cuda.SPLIT_TOKENS % _plan.GROUP_TOKENS == 0
    assert _plan_cuda.SPLIT_TOKENS.bit_count() == 1


def machine(driver=None, toolkit=True, implementation="NVIDIA"):
    """Make a stand-in for `numba.cuda`."""
    return SimpleNamespace(
        is_available=lambda: driver is None and toolkit,
        cuda_error=lambda: driver,
        implementation=implementation,
    )


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        (machine(), None),
        (
            machine(driver="\nCUDA driver library cannot be found.\nIf you are sure:\n"),
            "no usable NVIDIA driver (CUDA driver library cannot be found. If you are sure)",
        ),
        (
            machine(driver="no CUDA-capable device", implementation="Built-in"),
            "no usable NVIDIA driver (no CUDA-capable device)",
        ),
        (
            machine(implementation="Built-in"),
            "there is an NVIDIA driver, but the package numba-cuda is not installed",
        ),
        (
            machine(implementation="Built-in", toolkit=False),
            "there is an NVIDIA driver, but the package numba-cuda is not installed",
        ),
        (
            machine(toolkit=False),
            "there is an NVIDIA driver, but no CUDA toolkit that Numba can use (no NVVM library)",
        ),
    ],
)
def test_the_cause_is_named(monkeypatch, module, problem):
    monkeypatch.setattr(_device, "is_simulator", lambda: False)
    monkeypatch.setattr(_device, "cuda", lambda: module)
    assert _device.cuda_problem() == problem


def test_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(_device, "cuda_problem", lambda: "no usable NVIDIA driver (none found)")
    with pytest.raises(RuntimeError) as raised:
        _device.require_cuda()
    assert str(raised.value) == (
        "device='cuda' is not available: no usable NVIDIA driver (none found). Install "
        "numba_attn[cuda] on a machine with an NVIDIA driver, set NUMBA_ENABLE_CUDASIM=1 for the "
        "simulator, or use device='cpu'"
    )
