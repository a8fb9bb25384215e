"""Every CUDA kernel compiles without a GPU: no spills, no stack, no double precision."""

import re

import numpy as np
import pytest

from numba_attn import _arrays, _plan_cuda, _ptx
from numba_attn._call import Formats

if reason := _ptx.missing():
    pytest.skip(reason, allow_module_level=True)

import numba
from numba.cuda import types

from numba_attn.kernels import cuda, rows_cuda

CAPABILITIES = [(8, 0), (9, 0), (10, 0)]
HEAD_DIMS = [1, 8, 20, 64, 80, 96, 112, 128, 192, 256, 512]
OPTIONS = {"softcap": True, "alibi": True, "token_scales": True}
SIZES = [
    _plan_cuda.StepVariant(d, dv, wide)
    for d, dv in [*zip(HEAD_DIMS, HEAD_DIMS, strict=True), (192, 128), (576, 512), (20, 33)]
    for wide in (False, True)
    if not wide or d % 8 == dv % 8 == 0
]
FORMATS = [
    _plan_cuda.StepVariant(128, 128, wide, Formats("bfloat16", name, name))
    for name in _arrays.CARRIERS
    for wide in (False, True)
    if name != "bfloat16"
]
SINGLE_OPTIONS = [_plan_cuda.StepVariant(64, 64, True, **{name: True}) for name in OPTIONS]
ALL_OPTIONS = [
    _plan_cuda.StepVariant(128, 128, True, Formats("float32", "int8", "float8_e4m3fn"), **OPTIONS),
    _plan_cuda.StepVariant(80, 40, False, Formats("float16", "float8_e5m2", "float16"), **OPTIONS),
]
HARDEST = [v for v in SIZES if v[:2] in ((1, 1), (20, 33), (80, 80), (128, 128), (576, 512))]
# Everything for one device; elsewhere the sizes that need most, and all options at once.
STEPS = [(variant, (9, 0)) for variant in SIZES + FORMATS + SINGLE_OPTIONS + ALL_OPTIONS]
STEPS += [
    (variant, capability)
    for variant in HARDEST + ALL_OPTIONS
    for capability in CAPABILITIES
    if capability != (9, 0)
]


def array(dtype, axes=1):
    return types.Array(numba.from_dtype(np.dtype(dtype)), axes, "C")


STATE = (array("f4", 2), array("f4", 2), array("f4", 3))
PLACE = (0, 0)
SHARED = (
    rows_cuda.Places(*((0,) * n for n in (4, 5, 5, 3, 4, 4, 2))),
    rows_cuda.Lists(*(PLACE,) * 5),
    rows_cuda.Sizes(*(0,) * 7),
    (np.float32(0),) * 2,
)
STEP = (array("i4"), *map(numba.typeof, SHARED), *STATE)
FINALIZE = (types.int64, numba.typeof(PLACE), array("f4", 2))
OTHERS = {
    "_merge_splits": (*STATE, array("i4"), *STATE),
    "_reset": STATE,
    "_times": (array("i4"), numba.typeof(PLACE), types.int64, array("i4")),
}


def name_of(given):
    """Name a variant or a compute capability."""
    if not isinstance(given, _plan_cuda.StepVariant):
        return "sm_{}{}".format(*given)
    options = [name for name in OPTIONS if getattr(given, name)]
    path = "wide" if given.wide else "narrow"
    return "-".join([*map(str, given[:2]), path, *given.formats, *options])


def compile_step(variant, capability, folder):
    arrays = [array(_arrays.CARRIERS[name]) for name in variant.formats]
    return _ptx.compile_kernel(cuda._step_kernel(variant), (*arrays, *STEP), capability, folder)


def shared_bytes(variant):
    pools = zip(variant[:2], variant.formats[1:], strict=True)
    rows = [_plan_cuda.Rows(0, (0, 0, 0), d, _arrays.CARRIERS[name].itemsize) for d, name in pools]
    return _plan_cuda.shared_bytes(*rows, variant.token_scales)


def check(compiled):
    assert compiled.spilled == 0
    assert compiled.stack == 0
    assert 0 < compiled.registers <= 128
    assert compiled.shared <= 48 * 1024
    assert not re.findall(r"\S+\.f64\S*", compiled.ptx)
    assert not re.findall(r"(?:div|rem)\.[us]64", compiled.ptx)


capabilities = pytest.mark.parametrize("capability", CAPABILITIES, ids=name_of)


@pytest.mark.parametrize(("variant", "capability"), STEPS, ids=name_of)
def test_step(variant, capability, tmp_path):
    compiled = compile_step(variant, capability, tmp_path)
    check(compiled)
    assert shared_bytes(variant) - 32 <= compiled.shared <= shared_bytes(variant)
    assert bool(re.search(r"ld\.global\S*v4", compiled.ptx)) == variant.wide


@capabilities
@pytest.mark.parametrize("name", OTHERS)
def test_other_kernels(name, capability, tmp_path):
    check(_ptx.compile_kernel(getattr(cuda, name), OTHERS[name], capability, tmp_path))


@capabilities
@pytest.mark.parametrize("name", _arrays.QUERY_FORMATS)
def test_finalize(name, capability, tmp_path):
    kernel, where = cuda._finalize(name), numba.typeof((0,) * 4)
    signature = (*STATE, array(_arrays.CARRIERS[name]), where, *FINALIZE)
    check(_ptx.compile_kernel(kernel, signature, capability, tmp_path))


@pytest.mark.parametrize("head_dim", [80, 128])
@pytest.mark.parametrize("name", ["bfloat16", "int8"])
def test_both_paths_do_the_same_arithmetic(head_dim, name, tmp_path):
    """The order of the roundings decides the bits: it may not depend on the alignment of a pool."""
    wide, narrow = (
        compile_step(
            _plan_cuda.StepVariant(head_dim, head_dim, wide, Formats("bfloat16", name, name)),
            (9, 0),
            tmp_path,
        )
        for wide in (True, False)
    )
    operations = [
        re.findall(r"\b(?:add|sub|mul|fma|div|ex2)\.\S*f32", path.ptx) for path in (wide, narrow)
    ]
    assert len(operations[0]) > 50
    assert operations[0] == operations[1]
