"""Where a call runs: the data decides, a request never falls back, and imports stay light."""

import json
import subprocess
import sys

import numpy as np
import pytest
from _arguments import BF16, Dv, Hq, S, valid

import numba_attn
from numba_attn import AttentionState, _device, reference

HEAVY = (
    "ml_dtypes",
    "numba.cuda",
    "numba_cuda",
    "torch",
    "cupy",
    "jax",
    "cuda",
    "pytest",
    "hypothesis",
)


def modules_after(code):
    """Run code in a process of its own; return the names of the modules it has loaded."""
    code += "\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    return set(json.loads(run.stdout.splitlines()[-1]))


def cpu_only(monkeypatch, problem="no driver here"):
    monkeypatch.setattr(_device, "cuda_problem", lambda: problem)
    monkeypatch.setattr(_device, "is_simulator", lambda: False)


@pytest.mark.skipif(_device.is_simulator(), reason="the simulator itself loads numba.cuda")
def test_import_loads_nothing_heavy():
    loaded = modules_after("import numba_attn")
    assert "numba_attn.api" in loaded
    # numba itself may load its CUDA stubs; the package may add nothing to what numba loads
    added = loaded - modules_after("import numba, numpy, ml_dtypes")
    assert not [name for name in added if name.split(".")[0] in HEAVY or "cuda" in name]


@pytest.mark.skipif(_device.is_simulator(), reason="the simulator itself loads numba.cuda")
def test_a_cpu_call_loads_no_cuda():
    code = """
import numba, numpy, ml_dtypes, sys
before = set(sys.modules)
import numba_attn
q, pool = numpy.zeros((1, 2, 4), "u2"), numpy.zeros((1, 2, 1, 4), "u2")
numba_attn.paged_attention(q, pool, pool, [[0]], [2])
assert not [name for name in set(sys.modules) - before if "cuda" in name]
"""
    assert "numba_attn.kernels.cpu" in modules_after(code)


def test_auto_runs_host_arrays_on_the_cpu(monkeypatch):
    """Even where a device is there: the simulator must never serve an unaware caller."""
    monkeypatch.setattr(_device, "cuda_problem", lambda: None)
    used = []
    backend = _device.backend
    monkeypatch.setattr(_device, "backend", lambda kind: used.append(kind) or backend(kind))
    given = valid("paged_attention")
    out = numba_attn.paged_attention(**given)
    assert out is given["out"]
    assert set(used) == {"cpu"}
    exact = reference.paged_attention(**valid("paged_attention") | {"out": None})
    np.testing.assert_allclose(out.astype(float), exact.astype(float), rtol=0.01, atol=0.01)


def test_cpu_and_auto_are_the_same_for_host_arrays():
    auto, cpu = (
        numba_attn.paged_attention(**valid("paged_attention"), device=device)
        for device in ("auto", "cpu")
    )
    assert auto.tobytes() == cpu.tobytes()


@pytest.mark.parametrize("home", ["cpu", "cuda"])
@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_resolve(monkeypatch, device, home):
    cpu_only(monkeypatch, problem=None)
    assert _device.resolve(device, home) == (home if device == "auto" else device)


@pytest.mark.parametrize("device", ["gpu", "CUDA", "cuda:0", "", None, 0])
def test_an_unknown_device(device):
    with pytest.raises(ValueError, match="device: expected one of 'auto', 'cpu', 'cuda', got "):
        numba_attn.paged_attention(**valid("paged_attention"), device=device)


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (ImportError("no module named cuda.core"), "no module named cuda.core"),
        (RuntimeError("driver\n  too old "), "driver too old"),
        (OSError(), "OSError"),
    ],
)
def test_whatever_is_wrong_with_cuda_is_said(monkeypatch, raised, said):
    def broken():
        raise raised

    monkeypatch.setattr(_device, "is_simulator", lambda: False)
    monkeypatch.setattr(_device, "cuda", broken)
    assert _device.cuda_problem() == said
    with pytest.raises(RuntimeError, match=f"device='cuda' is not available: {said}. Install"):
        numba_attn.paged_attention(**valid("paged_attention"), device="cuda")
    assert list(numba_attn.available_devices()) == ["cpu"]


def has_cuda():
    return _device.is_simulator() or _device.cuda_problem() is None


@pytest.mark.skipif(has_cuda(), reason="CUDA (or its simulator) is available here")
@pytest.mark.parametrize("function", ["paged_attention", "AttentionState"])
def test_cuda_is_refused_where_it_is_not(function):
    with pytest.raises(RuntimeError) as caught:
        getattr(numba_attn, function)(**valid(function), device="cuda")
    message = str(caught.value)
    assert message.startswith("device='cuda' is not available: ")
    assert len(message.split(": ")[1]) > 10, "it says why"
    assert "numba_attn[cuda]" in message
    assert "NUMBA_ENABLE_CUDASIM=1" in message


@pytest.mark.skipif(has_cuda(), reason="CUDA (or its simulator) is available here")
def test_devices_without_cuda():
    assert list(numba_attn.available_devices()) == ["cpu"]


@pytest.mark.cuda
def test_devices_with_cuda():
    said = numba_attn.available_devices()["cuda"]
    assert ("simulator" in said) == _device.is_simulator()


@pytest.mark.cuda
def test_host_arrays_go_over_and_back():
    given = valid("paged_attention")
    out, lse = numba_attn.paged_attention(**given, return_lse=True, device="cuda")
    assert out is given["out"]
    assert isinstance(lse, np.ndarray)
    on_cpu = numba_attn.paged_attention(**valid("paged_attention"))
    np.testing.assert_allclose(out.astype(float), on_cpu.astype(float), rtol=0.01, atol=0.01)


@pytest.mark.cuda
def test_device_arrays_are_used_in_place_and_give_device_arrays():
    to_device = _device.cuda().to_device
    given = valid("paged_attention")
    expected = numba_attn.paged_attention(**given)
    moved = {
        name: to_device(array.view(np.uint16) if array.dtype == BF16 else array)
        for name, array in given.items()
    }
    out, lse = numba_attn.paged_attention(**moved, return_lse=True)
    assert out is moved["out"]
    assert _device.is_device_array(lse)
    bits = np.asarray(out.copy_to_host()).view(BF16)
    np.testing.assert_allclose(bits.astype(float), expected.astype(float), rtol=0.01, atol=0.01)


@pytest.mark.cuda
def test_device_arrays_on_request_of_the_cpu():
    to_device = _device.cuda().to_device
    given = valid("paged_attention") | {"out": None}
    moved = {
        name: to_device(array.view(np.uint16) if array.dtype == BF16 else array)
        for name, array in given.items()
        if array is not None
    }
    out = numba_attn.paged_attention(**moved, device="cpu")
    assert _device.is_device_array(out)
    assert (np.asarray(out.copy_to_host()) == numba_attn.paged_attention(**given).view("u2")).all()


@pytest.mark.cuda
def test_the_device_of_the_state_decides():
    given = valid("step_tile")
    host = given["state"]
    state = AttentionState(S, Hq, Dv, device="cuda")
    state.buffer.copy_to_device(host.buffer)
    numba_attn.step_tile(**given)
    numba_attn.step_tile(**given | {"state": state})  # host arrays are copied over
    assert state.device == "cuda"
    np.testing.assert_allclose(state.buffer.copy_to_host(), host.buffer, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="other: must be on the device of state, 'cuda', got"):
        numba_attn.merge(state, host)
    assert _device.is_device_array(numba_attn.finalize(state))
    assert _device.is_device_array(state.lse)


@pytest.mark.cuda
def test_mixed_arrays_are_refused():
    given = valid("paged_attention")
    given["seq_lens"] = _device.cuda().to_device(given["seq_lens"])
    before = given["out"].tobytes()
    with pytest.raises(
        ValueError, match="all arrays must be on one device: seq_lens are on a CUDA"
    ):
        numba_attn.paged_attention(**given)
    assert given["out"].tobytes() == before
