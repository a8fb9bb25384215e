"""CuPy arrays, and torch tensors on a GPU, in the simulator: both are stand-ins there.

What stands in for CuPy has its names and its memory on the host; a tensor on the CPU says that it
is on a GPU. So pointers, strides, dtypes and kinds are tested, not CuPy, torch or a GPU.
"""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from _frameworks import BF16, LENS, B, D, Hq, S, bits, call

import numba_attn
from numba_attn import AttentionState, _arrays, _device, _frameworks

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    """Note the streams that calls launch on; the simulator has but one."""
    if not _device.is_simulator():
        pytest.skip("stand-ins are for the simulator")
    seen = []
    monkeypatch.setattr(_device, "as_stream", lambda stream: seen.append(stream) or 0)
    return seen


class ndarray:
    """What the package uses of `cupy.ndarray`, over an array on the host."""

    __module__ = "cupy"

    def __init__(self, host):
        self.host = host
        self.shape, self.strides, self.ndim = host.shape, host.strides, host.ndim
        self.dtype = host.dtype
        self.data = SimpleNamespace(ptr=host.__array_interface__["data"][0])
        self.device = SimpleNamespace(id=0)

    def item(self):
        return self.host.item()

    def view(self, dtype):
        return ndarray(self.host.view(dtype))


@pytest.fixture
def cupy(monkeypatch):
    module = ModuleType("cupy")
    module.ndarray = ndarray
    module.asarray = lambda x: ndarray(x if isinstance(x, np.ndarray) else np.asarray(x._ary))
    runtime = SimpleNamespace(getDevice=lambda: 0)
    stream = SimpleNamespace(ptr=77)
    module.cuda = SimpleNamespace(runtime=runtime, get_current_stream=lambda: stream)
    monkeypatch.setitem(sys.modules, "cupy", module)
    yield ndarray
    sys.modules.pop("numba_attn._cupy_arrays", None)
    _frameworks._module.cache_clear()
    _frameworks._module_of.cache_clear()


@pytest.fixture
def tensor(monkeypatch):
    """Give what makes a tensor that says it is on a GPU."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from numba_attn import _torch_arrays

    class OnGpu(torch.Tensor):
        is_cuda, is_cpu = True, False

        def get_device(self):
            return 0

    def of(array):
        if array.dtype == BF16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).as_subclass(OnGpu)
        return torch.from_numpy(array).as_subclass(OnGpu)

    def at(array):
        return of(np.asarray(array._ary))

    stream = SimpleNamespace(device=SimpleNamespace(index=0), cuda_stream=78)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(_torch_arrays, "tensor_at", at)
    return of


def host(result):
    """Return a result's numbers, as an array on the host."""
    if isinstance(result, ndarray):
        return result.host
    torch = sys.modules["torch"]
    assert isinstance(result, torch.Tensor)
    assert result.is_cuda
    plain = result.as_subclass(torch.Tensor)
    if plain.dtype is torch.bfloat16:
        return plain.view(torch.int16).numpy().view(BF16)
    return plain.numpy()


STREAMS = {"cupy": 77, "tensor": 78}
KINDS = pytest.mark.parametrize("kind", STREAMS)


@KINDS
@pytest.mark.parametrize(
    ("q", "kv"),
    [("bfloat16", "bfloat16"), ("float16", "float8_e4m3fn"), ("float32", "int8")],
)
def test_attention(kind, q, kv, request, streams):
    of = request.getfixturevalue(kind)
    if kv == "float8_e4m3fn" and kind == "tensor":
        kv = "float16"
    given = call(q, kv)
    expected = numba_attn.paged_attention(**given, device="cuda", return_lse=True)
    arrays = {name: of(x) for name, x in given.items()}
    streams.clear()
    found = numba_attn.paged_attention(**arrays, return_lse=True)
    assert set(streams) == {STREAMS[kind]}
    for one, array in zip(found, expected, strict=True):
        assert type(one) is type(arrays["q"])
        assert host(one).dtype == array.dtype
        assert bits(host(one)) == bits(array)


@KINDS
def test_out_is_written_in_place_and_pools_are_read_there(kind, request):
    of = request.getfixturevalue(kind)
    given = call()
    expected = numba_attn.paged_attention(**given, device="cuda")
    wide = np.zeros((S, Hq, 2 * D), BF16)
    both = np.stack([given["k_pool"], given["v_pool"]], axis=1)  # one pool of both
    arrays = {name: of(x) for name, x in given.items()}
    arrays |= {"k_pool": of(both[:, 0]), "v_pool": of(both[:, 1])}
    out = of(wide[..., D:])
    assert numba_attn.paged_attention(**arrays, out=out) is out
    assert bits(wide[..., D:]) == bits(expected)
    assert not wide[..., :D].any()


@KINDS
def test_states_and_append(kind, request, streams):
    of = request.getfixturevalue(kind)
    given = call()
    arrays = {name: of(x) for name, x in given.items()}
    plain = AttentionState(S, Hq, D, device="cuda")
    state = AttentionState.like(arrays["q"], arrays["v_pool"])
    assert state.device == "cuda"
    counts = -(-LENS // B)
    for one, inputs in ((plain, given), (state, arrays)):
        rest = [inputs[name] for name in ("q", "k_pool", "v_pool", "block_tables")]
        put = (lambda x: x) if inputs is given else of
        numba_attn.step_tile(one, *rest, put(counts), tile_token_counts=put(LENS.copy()))
    expected = numba_attn.finalize(plain, return_lse=True)
    found = numba_attn.finalize(state, return_lse=True)
    assert bits(host(found[0])) == bits(_arrays.to_host(expected[0]))
    assert host(found[0]).dtype == (np.uint16 if kind == "cupy" else BF16)
    assert bits(host(found[1])) == bits(_arrays.to_host(expected[1]))
    numba_attn.merge(state, plain)
    new, pools = np.full((2, 2, D), 3, BF16), [given["k_pool"], given["v_pool"]]
    numba_attn.append_kv(of(new), of(new), *map(of, pools), of(np.array([5, -1])))
    assert (pools[0][1, 1] == 3).all()
    assert set(streams) == {STREAMS[kind]}


@KINDS
def test_a_named_stream_goes_before(kind, request, streams):
    of = request.getfixturevalue(kind)
    numba_attn.paged_attention(**{name: of(x) for name, x in call().items()}, stream=5)
    assert set(streams) == {5}


@KINDS
def test_numbers_without_axes(kind, request):
    of = request.getfixturevalue(kind)
    given = call()
    expected = numba_attn.paged_attention(**given, k_scale=0.5, device="cuda")
    scale = of(np.array(0.5, np.float32))
    found = numba_attn.paged_attention(**{n: of(x) for n, x in given.items()}, k_scale=scale)
    assert bits(host(found)) == bits(expected)


@KINDS
def test_device_tables_of_another_dtype_are_refused(kind, request):
    of = request.getfixturevalue(kind)
    arrays = {name: of(x) for name, x in call().items()}
    with pytest.raises(TypeError, match="seq_lens: a device array must be int32, got int64"):
        numba_attn.paged_attention(**arrays | {"seq_lens": of(LENS.astype(np.int64))})
    with pytest.raises(ValueError, match="all arrays must be on one device"):
        numba_attn.paged_attention(**arrays | {"seq_lens": LENS})
