"""Every CUDA kernel compiles without a GPU: no spills, no stack, no double precision."""

import re

import pytest

from numba_attn import _arrays, _plan_cuda, _ptx, _sass
from numba_attn._call import Formats
from numba_attn._workloads import WORKLOADS

if reason := _ptx.missing():
    pytest.skip(reason, allow_module_level=True)

from numba_attn.kernels import _signatures

CAPABILITIES = [(8, 0), (9, 0), (10, 0)]
HEAD_DIMS = [1, 20, 64, 80, 112, 128, 256, 512]
OPTIONS = {"softcap": True, "alibi": True, "token_scales": True}
Variant = _plan_cuda.StepVariant


def split(simple, gqa, asynchronous=True):
    return "split", _plan_cuda.split_variant(simple, gqa, asynchronous)


DECODE = {
    name: split(Variant(w.head_dim, w.head_dim, True), w.num_q_heads // w.num_kv_heads)
    for name, w in WORKLOADS.items()
}
SIZES = [
    Variant(d, dv, wide)
    for d, dv in [*zip(HEAD_DIMS, HEAD_DIMS, strict=True), (192, 128), (576, 512), (20, 33)]
    for wide in (False, True)
    if not wide or d % 8 == dv % 8 == 0
]
FORMATS = [
    Variant(128, 128, wide, Formats("bfloat16", name, name))
    for name in _arrays.CARRIERS
    for wide in (False, True)
    if name != "bfloat16"
]
ALL_OPTIONS = [
    Variant(128, 128, True, Formats("float32", "int8", "float8_e4m3fn"), **OPTIONS),
    Variant(80, 40, False, Formats("float16", "float8_e5m2", "float16"), **OPTIONS),
]
SINGLE_OPTIONS = [Variant(128, 128, True, **{name: True}) for name in OPTIONS]
MOST_ASKED = [v for v in SIZES if v[:3] in ((64, 64, True), (128, 128, True), (80, 80, False))]
HARDEST = [v for v in SIZES if v[:2] in ((20, 33), (256, 256), (576, 512))]
# Everything for one device; elsewhere what decodes, the sizes that need most, and all options.
STEPS = [
    (*step, (9, 0))
    for step in (
        *(("simple", variant) for variant in MOST_ASKED + HARDEST[-1:] + ALL_OPTIONS[1:]),
        *(split(variant, 4) for variant in SIZES + FORMATS + SINGLE_OPTIONS + ALL_OPTIONS),
        *(split(variant, 8) for variant in MOST_ASKED[-1:] + ALL_OPTIONS + HARDEST[:1]),
        *(split(variant, 16, False) for variant in HARDEST[-1:] + MOST_ASKED[-1:]),
        *DECODE.values(),
    )
]
STEPS += [
    (*step, capability)
    for step in (DECODE["W4"], DECODE["W6"], split(HARDEST[-1], 16), split(ALL_OPTIONS[0], 8))
    for capability in CAPABILITIES
    if capability != (9, 0)
]
STEPS = list(dict.fromkeys(STEPS))
OTHERS = _signatures.others()


def name_of(given):
    """Name a kernel, a variant or a compute capability."""
    if isinstance(given, str):
        return given
    if not isinstance(given, Variant):
        return "sm_{}{}".format(*given)
    options = [name for name in OPTIONS if getattr(given, name)]
    path = "wide" if given.wide else "narrow"
    late = ["async"] * given.asynchronous
    sizes = map(str, (*given[:2], f"{given.heads}x{given.stages}"))
    return "-".join([*sizes, path, *late, *given.formats, *options])


def compile_step(name, variant, capability=(9, 0)):
    is_read = capability == (9, 0) and (name, variant) in DECODE.values()
    return _ptx.compile_named(name, variant, capability, disassemble=is_read or may_spill(variant))


def check(compiled, registers=128):
    assert compiled.spilled == 0
    assert compiled.stack == 0
    check_resources(compiled, registers)


def check_resources(compiled, registers):
    assert 0 < compiled.registers <= registers
    assert compiled.shared <= 48 * 1024
    assert not re.findall(r"\S+\.f64\S*", compiled.ptx)
    assert not re.findall(r"(?:div|rem)\.[us]64", compiled.ptx)


capabilities = pytest.mark.parametrize("capability", CAPABILITIES, ids=name_of)


@pytest.mark.parametrize(("name", "variant", "capability"), STEPS, ids=name_of)
def test_step(name, variant, capability):
    compiled = compile_step(name, variant, capability)
    limit = 65536 // (variant.resident_blocks * variant.threads)
    if may_spill(variant):  # a few numbers of a split, while its tiles are walked
        check_resources(compiled, limit)
        assert compiled.spilled <= 128
        assert "LOCAL" not in counts_of_main_loop(compiled)
    else:
        check(compiled, limit)
    assert variant.shared_bytes - 32 <= compiled.shared <= variant.shared_bytes
    assert bool(re.search(r"cp\.async\S* ", compiled.ptx)) == variant.asynchronous
    copies = re.search(r"ld\.global\S*(v4|128)", compiled.ptx) or variant.asynchronous
    assert bool(copies) == variant.wide
    assert _sass.occupancy(compiled.registers, compiled.shared, variant.threads) >= min(
        variant.resident_blocks, 227 * 1024 // (variant.shared_bytes + 1024)
    )


def may_spill(variant):
    """Tell of 6 to 8 heads of 128: four blocks on a multiprocessor are worth more."""
    return variant[:3] == (128, 128, True) and variant.heads > 5


def counts_of_main_loop(compiled):
    if reason := _ptx.missing(disassembler=True):
        pytest.skip(reason)
    program = _sass.parse(compiled.sass)
    return _sass.count(program, _sass.main_loop(program), 0)


@pytest.mark.parametrize("workload", DECODE)
def test_the_main_loop_of_a_decode_step(workload):
    """K and V come 16 bytes at a time, around the registers, and nothing slow is between."""
    name, variant = DECODE[workload]
    compiled = compile_step(name, variant)
    counts = counts_of_main_loop(compiled)
    tile_bytes = variant.tile * variant.token_bytes
    assert counts["LDGSTS.128"] == tile_bytes // 16 // variant.threads
    assert not [kind for kind in counts if kind.startswith(("LDG.", "STG"))]
    assert not {"F64", "DIV64", "LOCAL", "CALL"} & set(counts)
    assert counts["BAR"] == 3
    multiplications = 2 * variant.tile * variant.heads * variant.head_dim // variant.threads
    assert multiplications <= counts["FMA"] <= 1.5 * multiplications + 150
    assert sum(counts.values()) <= 2.2 * multiplications + 450


@capabilities
@pytest.mark.parametrize("name", OTHERS)
def test_other_kernels(name, capability):
    check(_ptx.compile_named(name, None, capability))


ARITHMETIC = re.compile(r"\b(?:add|sub|mul|fma|div|ex2)\.\S*f32")


@pytest.mark.parametrize("head_dim", [80, 128])
@pytest.mark.parametrize("name", ["bfloat16", "int8"])
def test_all_paths_do_the_same_arithmetic(head_dim, name):
    """The order of the roundings decides the bits: it may not depend on the alignment of a pool."""
    variants = [
        _plan_cuda.split_variant(
            Variant(head_dim, head_dim, wide, Formats("bfloat16", name, name)), 4, asynchronous
        )
        for wide, asynchronous in ((False, False), (True, False), (True, True))
    ]
    found = [ARITHMETIC.findall(compile_step("split", variant).ptx) for variant in variants]
    assert len(found[0]) > 50
    assert found[0] == found[1] == found[2]
