"""What the CUDA twin decides on the host, and why it cannot run: tested without a device."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from numba_attn import _device, _plan

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
    span = _plan.span(pool.shape, pool.strides, 2)
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
    assert _plan.span(shape, (64, 2), 2) == (0, 0, (0, 0))


def test_span_ignores_the_stride_of_one_element():
    assert _plan.span((1, 4), (7, 2), 2) == (4, 0, (0, 1))


def test_strides_between_elements_are_refused():
    with pytest.raises(ValueError, match=r"multiples of the 2 bytes .* got strides \(9, 2\) of"):
        _plan.span((2, 4), (9, 2), 2)


ALIGNED = {"addresses": (4096, 8192), "strides": ((512, 64, 8), (256, 32, 16)), "dims": (64, 128)}


def variant(addresses, strides, dims):
    return _plan.step_variant(addresses, strides, dims)


def test_rows_of_16_bytes_are_loaded_wide():
    assert variant(**ALIGNED) == (64, 128, True)
    assert variant(**ALIGNED | {"strides": ((0, 0, 0), (-256, 32, -16))}).wide


@pytest.mark.parametrize("pool", [0, 1])
@pytest.mark.parametrize("what", ["address", "D", "block", "slot", "head"])
def test_what_is_off_by_one_element_is_loaded_narrow(pool, what):
    changed = {name: list(value) for name, value in ALIGNED.items()}
    if what == "address":
        changed["addresses"][pool] += 2
    elif what == "D":
        changed["dims"][pool] += 1
    else:
        strides = list(changed["strides"][pool])
        strides[["block", "slot", "head"].index(what)] += 1
        changed["strides"][pool] = tuple(strides)
    assert not variant(**changed).wide


@pytest.mark.parametrize("dims", [(513, 1), (1, 513), (576, 512)])
def test_the_largest_head_dim(dims):
    text = f"q: D and Dv must be at most 512 on CUDA, got D = {dims[0]} and Dv = {dims[1]}; use"
    with pytest.raises(ValueError, match=text):
        variant(**ALIGNED | {"dims": dims})
    assert variant(**ALIGNED | {"dims": (512, 512)}).threads == 128


def test_blocks_are_whole_warps():
    for d, dv in itertools.product((1, 31, 32, 33, 64, 65, 128, 129, 512), repeat=2):
        threads = _plan.StepVariant(d, dv, False).threads
        assert threads % 32 == 0
        assert threads == min(128, 32 * _plan.ceil_div(max(d, dv), 32))


def test_splits_of_the_twins_fit():
    assert _plan.SPLIT_TOKENS % _plan.CUDA_SPLIT_TOKENS == 0
    assert _plan.CUDA_SPLIT_TOKENS % _plan.GROUP_TOKENS == 0


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
