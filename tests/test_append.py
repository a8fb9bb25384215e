"""append_kv: new tokens into a pool, in place."""

import ast
import pathlib

import ml_dtypes
import numpy as np
import pytest
from _appending import (
    MOST,
    QUANTISED,
    SOURCES,
    TARGETS,
    append,
    bits,
    dtype_of,
    numbers,
    on_device,
    same,
)
from _backends import get
from _bound import assert_same_bits
from _cases import BFLOAT16, attend, draw, place

import numba_attn
from numba_attn import _arrays

N, B = 4, 3
REFERENCE = get("reference")


def arguments(backend, source, target, *, dims=(5, 3), tokens=None, seed=0):
    """Draw the arguments of a call: some tokens are skipped, and the pools hold something."""
    tokens = backend.size(7, 3) if tokens is None else tokens
    num_heads = backend.size(2, 1)
    rng = np.random.default_rng(seed)
    k, v = (numbers(rng, (tokens, num_heads, dim), dtype_of(source)) for dim in dims)
    pools = [np.full((N, B, num_heads, dim), 3, dtype_of(target)) for dim in dims]
    slots = rng.permutation(N * B)[:tokens]
    slots[1:2] = -1
    return {"k": k, "v": v, "k_pool": pools[0], "v_pool": pools[1], "slot_mapping": slots}


def scales(given, mode):
    """Make scales: none, a number, one for each head, one for each token and head; or room."""
    shape = given["k_pool"].shape[:3]
    rng = np.random.default_rng(1)
    drawn = [rng.uniform(0.3, 2, shape).astype(np.float32) for _ in range(2)]
    k_scale, v_scale = {
        "none": (None, None),
        "number": (0.7, np.float32(1.3)),
        "heads": (drawn[0][0, 0], drawn[1][0, 0]),
        "tokens": drawn,
        "computed": drawn,
    }[mode]
    return {"k_scale": k_scale, "v_scale": v_scale, "compute_scales": mode == "computed"}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_dtype_into_every_pool(twin, source, target):
    """The bits of the reference, whatever divides the numbers; other slots are as they were."""
    given = arguments(twin, source, target)
    modes = ("none", "number", "heads", "tokens", "computed")
    for mode in modes[: 5 if target in QUANTISED else 4]:
        options = scales(given, mode)
        same(append(twin, **given, **options), append(REFERENCE, **given, **options))


@pytest.mark.parametrize("target", TARGETS)
def test_the_reference_rounds_as_numpy_does(target):
    """Where a slot's token goes, and what dividing and converting it gives."""
    given = arguments(REFERENCE, "float32", target)
    for mode in ("none", "heads", "tokens"):
        options = scales(given, mode)
        after = append(REFERENCE, **given, **options)
        for token, slot in enumerate(given["slot_mapping"]):
            block, place_in_block = slot // B, slot % B
            expected = given["k"][token]
            if slot == -1:
                continue
            if mode != "none":
                scale = np.broadcast_to(options["k_scale"], given["k_pool"].shape[:3])
                expected = expected / scale[block, place_in_block][:, None]
            if target in MOST:
                least = -128 if target == "int8" else -MOST[target]
                expected = np.clip(expected, least, MOST[target])
            expected = np.rint(expected) if target == "int8" else expected
            stored = after["k_pool"][block, place_in_block]
            assert stored.tobytes() == expected.astype(stored.dtype).tobytes()
        written = np.isin(np.arange(N * B), given["slot_mapping"]).reshape(N, B)
        assert (after["k_pool"][~written].astype(float) == 3).all()


def test_equal_dtypes_are_copied_bit_by_bit(backend):
    """Payloads of NaN and signalling ones too."""
    dims = (37, 64)
    for name in SOURCES:
        given = arguments(backend, name, name, dims=dims, tokens=3)
        for argument in ("k", "v"):
            raw = bits(given[argument])
            chance = np.random.default_rng(3).integers(0, 256, raw.nbytes, np.uint8)
            raw[...] = chance.view(raw.dtype).reshape(raw.shape)
            raw.flat[:3] = bits(np.array([np.nan, np.inf, -0.0], dtype_of(name)))
        after = append(backend, **given)
        for token, slot in enumerate(given["slot_mapping"]):
            if slot >= 0:
                stored = after["k_pool"][slot // B, slot % B]
                assert stored.tobytes() == given["k"][token].tobytes()


def test_uint16_is_taken_as_bfloat16(backend):
    given = arguments(backend, "bfloat16", "bfloat16")
    as_bits = {name: given[name].view(np.uint16) for name in ("k", "v", "k_pool", "v_pool")}
    ours, theirs = append(backend, **given | as_bits), append(backend, **given)
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)


@pytest.mark.parametrize("slots", [[], [-1, -1], [11, -1, 0]])
def test_minus_one_skips(backend, slots):
    given = arguments(backend, "bfloat16", "bfloat16", tokens=len(slots))
    after = append(backend, **given | {"slot_mapping": np.array(slots, np.int64)})
    written = np.isin(np.arange(N * B), slots).reshape(N, B)
    assert (after["k_pool"][~written] == 3).all()
    assert (after["v_pool"][written].astype(float) != 3).all()


@pytest.mark.parametrize("target", QUANTISED)
@pytest.mark.parametrize("scale", [None, 0.5])
def test_saturation(backend, target, scale):
    """What is too large becomes the largest number; inf is never written."""
    row = [0.0, -0.0, 1e30, -1e30, np.inf, -np.inf, 480.0, -463.0, 65504.0, np.nan]
    k = np.array(row, np.float32).reshape(1, 1, -1)
    pool = np.zeros((1, 1, *k.shape[1:]), dtype_of(target))
    given = {"k": k, "v": None, "k_pool": pool, "v_pool": None, "slot_mapping": [0]}
    stored = append(backend, **given, k_scale=scale)["k_pool"].astype(np.float32).ravel()
    most = MOST[target]
    with np.errstate(over="ignore"):
        least = -128 if target == "int8" else -most
        expected = np.clip(k.ravel() / np.float32(scale or 1), least, most)
    expected = np.rint(expected) if target == "int8" else expected.astype(pool.dtype)
    expected = np.where(np.isnan(k.ravel()), 0 if target == "int8" else np.nan, expected)
    np.testing.assert_array_equal(stored, expected.astype(np.float32))
    assert not np.isinf(stored).any()


def test_float16_overflows_to_inf(backend):
    k = np.array([[[1e30, -65520, 65519]]], np.float32)
    given = {"k": k, "v": None, "k_pool": np.zeros((1, 1, 1, 3), np.float16), "v_pool": None}
    stored = append(backend, **given, slot_mapping=[0])["k_pool"]
    np.testing.assert_array_equal(stored.ravel(), [np.inf, -np.inf, 65504])


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("target", QUANTISED)
def test_computed_scales_bring_the_numbers_back(backend, target, source):
    """Each row's largest number is the largest of the dtype: an error of half a step."""
    given = arguments(backend, source, target, dims=(33, 4))
    given["k"][0] = 0
    rooms = [np.full(given["k_pool"].shape[:3], 7, np.float32) for _ in range(2)]
    after = append(backend, **given, k_scale=rooms[0], v_scale=rooms[1], compute_scales=True)
    written = np.isin(np.arange(N * B), given["slot_mapping"]).reshape(N, B)
    for name in "kv":
        assert (after[f"{name}_scale"][~written] == 7).all()
        for token, slot in enumerate(given["slot_mapping"]):
            if slot < 0:
                continue
            x = given[name][token].astype(np.float64)
            where = slot // B, slot % B
            scale = after[f"{name}_scale"][where].astype(np.float64)
            largest = abs(x).max(-1)
            expected = np.where(largest == 0, 1, largest / MOST[target])
            np.testing.assert_allclose(scale, expected, rtol=1e-7)
            back = after[f"{name}_pool"][where].astype(np.float64) * scale[:, None]
            half_a_step = {"int8": 0.0, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}[target]
            least = {"int8": 0.5, "float8_e4m3fn": 2.0**-10, "float8_e5m2": 2.0**-17}[target]
            error = np.maximum(half_a_step * abs(x), least * scale[:, None])
            assert (abs(back - x) <= error * (1 + 1e-5)).all()
    assert (after["k_pool"].astype(float)[np.divmod(given["slot_mapping"][0], B)] == 0).all()


@pytest.mark.parametrize("target", QUANTISED)
def test_computed_scales_are_normal_and_finite(backend, target):
    rows = [[1e-45, -1e-44], [np.inf, 1.0], [np.nan, 2.0], [np.nan, np.nan], [3e38, -1.0]]
    k = np.array(rows, np.float32)[:, None]
    given = {"k": k, "v": None, "k_pool": np.zeros((5, 1, 1, 2), dtype_of(target)), "v_pool": None}
    room = np.zeros((5, 1, 1), np.float32)
    options = {"k_scale": room, "compute_scales": True, "slot_mapping": np.arange(5)}
    after = append(backend, **given, **options)
    scale, stored = after["k_scale"].ravel(), after["k_pool"].astype(np.float32)[:, 0, 0]
    limits, most = np.finfo(np.float32), np.float32(MOST[target])
    expected = [limits.tiny, limits.max / most, 2 / most, 1, np.float32(3e38) / most]
    np.testing.assert_array_equal(scale, np.float32(expected))
    assert not np.isinf(stored).any()
    np.testing.assert_array_equal(stored[1], [most, 0])
    np.testing.assert_array_equal(np.isnan(stored[2:4]).sum(), 0 if target == "int8" else 3)


def test_keys_alone(backend):
    """MLA: the values are a part of the keys."""
    given = arguments(backend, "float32", "bfloat16")
    both = append(backend, **given)
    alone = append(backend, **given | {"v": None, "v_pool": None})
    assert alone["k_pool"].tobytes() == both["k_pool"].tobytes()


LAYOUTS = {  # the axes of the memory, and the pool in it
    "contiguous": (lambda heads: (N, B, heads, 16), lambda memory: memory),
    "combined": (lambda heads: (N, 2, B, heads, 16), lambda memory: memory[:, 1]),
    "head-major": (lambda heads: (N, heads, B, 16), lambda memory: memory.swapaxes(1, 2)),
    "reversed": (lambda heads: (N, B, heads, 16), lambda memory: memory[::-1, ::-1]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(twin, layout):
    """Pools of any layout; packed tokens; what lies between is left alone."""
    shape, view = LAYOUTS[layout]
    if twin.name == "cuda" and layout in ("head-major", "reversed"):
        pytest.skip("Numba makes no such device arrays")
    given = arguments(twin, "float32", "float16")
    plain = append(twin, **given)
    heads = given["k"].shape[1]
    qkv = np.full((len(given["k"]), 2 * heads, 8), 9, np.float32)
    qkv[:, :heads, :5], qkv[:, heads:, :3] = given["k"], given["v"]
    memory = np.full(shape(heads), 3, np.float16)
    slots = given["slot_mapping"]
    if twin.name == "cuda":
        qkv, memory, slots = (on_device(x) for x in (qkv, memory, slots))
    pool = view(memory)
    numba_attn.append_kv(
        *(qkv[:, :heads, :5], qkv[:, heads:, :3]),
        *(pool[:, :, :, 2:7], pool[:, :, :, 9:12]),
        slots,
    )
    memory = _arrays.to_host(memory)
    pool = view(memory)
    assert pool[..., 2:7].tobytes() == plain["k_pool"].tobytes()
    assert pool[..., 9:12].tobytes() == plain["v_pool"].tobytes()
    assert (np.delete(pool, [*range(2, 7), *range(9, 12)], -1) == 3).all()
    if layout == "combined":
        assert (memory[:, 0] == 3).all()


def test_scales_of_any_strides(twin):
    given = arguments(twin, "float32", "int8")
    options = scales(given, "computed")
    plain = append(twin, **given, **options)
    heads = given["k"].shape[1]
    room = np.full((N, heads, 2, B), 7, np.float32)
    strided = {"k_scale": room[:, :, 0].swapaxes(1, 2), "v_scale": room[:, :, 1].swapaxes(1, 2)}
    if twin.name == "cuda":
        room = np.full((N, B, 2, heads), 7, np.float32)
        strided = {"k_scale": room[:, :, 0], "v_scale": room[:, :, 1]}
    after = append(twin, **given, **options | strided)
    assert after["k_pool"].tobytes() == plain["k_pool"].tobytes()
    written = np.isin(np.arange(N * B), given["slot_mapping"]).reshape(N, B)
    for name in ("k_scale", "v_scale"):
        assert (after[name][written] == plain[name][written]).all()
        assert (after[name][~written] == 7).all()


def test_a_memory_mapped_pool(cpu, tmp_path):
    given = arguments(cpu, "float32", "bfloat16")
    shape = given["k_pool"].shape
    file = np.memmap(tmp_path / "pool", np.uint16, "w+", shape=shape)
    file[...] = given["k_pool"].view(np.uint16)
    pool = file.view(ml_dtypes.bfloat16)
    numba_attn.append_kv(given["k"], None, pool, None, given["slot_mapping"])
    file.flush()
    stored = np.fromfile(tmp_path / "pool", np.uint16)
    expected = append(cpu, **given)["k_pool"]
    np.testing.assert_array_equal(stored, expected.view(np.uint16).ravel())


def test_a_pool_of_more_than_2_31_elements(cpu, tmp_path):
    row = 2**12
    pool = np.memmap(tmp_path / "pool", np.uint16, "w+", shape=(2**19 + 3, 2, 1, row))
    if (tmp_path / "pool").stat().st_blocks * 512 > 2**20:
        pytest.skip("this file system has no sparse files")
    k = np.arange(2 * row, dtype=np.uint16).reshape(2, 1, row)
    numba_attn.append_kv(k, None, pool, None, [2**20 + 5, 2**19 + 1])
    np.testing.assert_array_equal(pool[-1, 1], k[0])
    np.testing.assert_array_equal(pool[2**18, 1], k[1])
    assert not pool[-1, 0].any()


@pytest.mark.parametrize("dtype", [*"bBhHiIqQ", ">i4", list, tuple])
def test_any_integers_are_slots(cpu, dtype):
    given = arguments(cpu, "float32", "float32", tokens=2)
    slots = [11, 4]
    other = dtype(slots) if callable(dtype) else np.array(slots, dtype)
    expected = append(cpu, **given | {"slot_mapping": np.array(slots)})
    assert append(cpu, **given | {"slot_mapping": other})["k_pool"].tobytes() == (
        expected["k_pool"].tobytes()
    )


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_device_slots_outside_the_pool_are_skipped(dtype):
    """Their contents are not checked."""
    cuda = get("cuda")
    given = arguments(cuda, "float32", "float32", tokens=3)
    slots = np.array([N * B, -2, 5], dtype)
    pools = [on_device(given[name]) for name in ("k_pool", "v_pool")]
    tokens = [on_device(given[name]) for name in ("k", "v")]
    numba_attn.append_kv(*tokens, *pools, on_device(slots))
    expected = append(REFERENCE, **given | {"slot_mapping": np.array([-1, -1, 5])})
    assert _arrays.to_host(pools[0]).tobytes() == expected["k_pool"].tobytes()


def test_one_kernel_serves_all(cpu):
    """Nothing compiles for other dtypes, lengths, numbers of heads, strides or block sizes."""
    from numba_attn.kernels import append_cpu

    for source, target in (("float32", "int8"), ("bfloat16", "bfloat16")):
        for tokens, block_size, dim in ((1, 7, 4), (5, 1, 64), (12, 16, 3)):
            k = np.ones((tokens, 3, 2 * dim), dtype_of(source))[..., :dim]
            pool = np.zeros((9, 2, block_size, 3, dim), dtype_of(target))
            slots = np.arange(tokens)
            slots.flags.writeable = k.flags.writeable = False
            room = np.ones((9, block_size, 3), np.float32)
            options = {} if target == "bfloat16" else {"k_scale": room, "compute_scales": True}
            cpu.module.append_kv(k, None, pool[:, 0], None, slots if tokens > 1 else [8], **options)
    assert len(append_cpu._append_rows.signatures) == 1


def converted(pool, target):
    if target == "int8":  # which has no NaN for unused slots
        pool = np.rint(np.nan_to_num(pool.astype(np.float32)))
    return pool.astype(dtype_of(target))


@pytest.mark.parametrize("target", TARGETS)
def test_append_then_attend_equals_attending_over_a_pool_built_at_once(twin, target):
    lens = twin.size((37, 5, 0, 16), (18,))
    seqs = draw(lens, gqa=2, num_kv_heads=1, head_dim=20, v_head_dim=24)
    built = place(seqs, 4)
    k_pool, v_pool = (converted(pool, target) for pool in built[:2])
    grown = {"k_pool": np.full_like(k_pool, 3), "v_pool": np.full_like(v_pool, 3)}
    for piece in (slice(0, 6), slice(6, 7), slice(7, None)):  # a prompt, a token, and the rest
        slots, tokens = [], []
        for s, table in enumerate(built.block_tables):
            place_of = np.arange(lens[s])[piece]
            slots.append(table[place_of // 4] * 4 + place_of % 4)
            tokens.append((seqs.keys[s][piece], seqs.values[s][piece]))
        k, v = (np.concatenate(rows) for rows in zip(*tokens, strict=True))
        given = {"k": k, "v": v, "slot_mapping": np.concatenate(slots)}
        grown = append(twin, **given, **grown)
    answers = [
        attend(twin, seqs, built._replace(k_pool=k, v_pool=v))
        for k, v in ((k_pool, v_pool), (grown["k_pool"], grown["v_pool"]))
    ]
    assert_same_bits(*zip(*answers, strict=True))


@pytest.mark.parametrize("target", QUANTISED)
def test_attending_over_a_quantised_cache(twin, target):
    """Computed scales go on to `paged_attention` as they are; an error is that of 3 to 8 bits."""
    seqs = draw(twin.size((37, 16), (18,)), gqa=2, num_kv_heads=1, head_dim=20, v_head_dim=24)
    exact = place(seqs, 4, fill=0)
    k, v = (pool.reshape(-1, *pool.shape[2:]).copy() for pool in exact[:2])
    k[:5] *= BFLOAT16.type(2.0**-6)  # tokens need scales of their own
    room = np.zeros((2, *exact.k_pool.shape[:3]), np.float32)
    pools = {
        "k_pool": np.zeros(exact.k_pool.shape, dtype_of(target)),
        "v_pool": np.zeros(exact.v_pool.shape, dtype_of(target)),
        "k_scale": room[0],
        "v_scale": room[1],
    }
    held = append(twin, k=k, v=v, slot_mapping=np.arange(len(k)), compute_scales=True, **pools)
    scales = {name: held.pop(name) for name in ("k_scale", "v_scale")}
    quantised = exact._replace(**held)
    answer = attend(twin, seqs, quantised, **scales)
    oracle = attend(REFERENCE, seqs, quantised, **scales)
    np.testing.assert_allclose(
        *(x.out.astype(np.float32) for x in (answer, oracle)), rtol=2**-7, atol=1e-3
    )
    plain = attend(REFERENCE, seqs, exact._replace(k_pool=k.reshape(exact.k_pool.shape)))
    coarse = {"int8": 0.02, "float8_e4m3fn": 0.1, "float8_e5m2": 0.2}[target]
    error = abs(answer.out.astype(np.float32) - plain.out.astype(np.float32)).max()
    assert error < coarse * abs(plain.out.astype(np.float32)).max()


def test_the_twins_have_the_same_host_function():
    folder = pathlib.Path(numba_attn.__file__).parent / "kernels"
    for_cpu, for_cuda = (
        next(
            ast.unparse(node.args)
            for node in ast.parse((folder / f"append_{name}.py").read_text()).body
            if isinstance(node, ast.FunctionDef) and node.name == "append"
        )
        for name in ("cpu", "cuda")
    )
    assert for_cpu == for_cuda
