"""Every CUDA kernel compiles without a GPU: no spills, no stack, no double precision."""

import re

import _ptx
import pytest

from numba_attn import _plan

if reason := _ptx.missing():
    pytest.skip(reason, allow_module_level=True)

from numba.cuda import types

from numba_attn.kernels import cuda

CAPABILITIES = [(8, 0), (9, 0), (10, 0)]
HEAD_DIMS = [1, 8, 20, 64, 80, 96, 112, 128, 192, 256, 512]
VARIANTS = [
    _plan.StepVariant(d, dv, wide)
    for d, dv in [*zip(HEAD_DIMS, HEAD_DIMS, strict=True), (192, 128), (20, 33)]
    for wide in (False, True)
    if not wide or d % 8 == dv % 8 == 0
]

INT32, UINT16 = types.Array(types.int32, 1, "C"), types.Array(types.uint16, 1, "C")
ROWS, COLUMNS = types.Array(types.float32, 2, "C"), types.Array(types.float32, 3, "C")
STATE = (ROWS, ROWS, COLUMNS)


def integers(count):
    return types.UniTuple(types.int64, count)


STEP = (
    *(UINT16, UINT16, UINT16, INT32, INT32),
    types.Tuple([integers(n) for n in (4, 5, 5, 3, 2)]),
    *(integers(3), types.float32, *STATE),
)
OTHERS = {
    "_merge_splits": (*STATE, INT32, *STATE),
    "_finalize": (*STATE, UINT16, integers(4), ROWS),
    "_reset": STATE,
    "_times": (INT32, integers(2), types.int64, INT32),
}


def check(compiled):
    assert compiled.spilled == 0
    assert compiled.stack == 0
    assert 0 < compiled.registers <= 128
    assert compiled.shared <= 48 * 1024
    assert not re.findall(r"\S+\.f64\S*", compiled.ptx)
    assert not re.findall(r"(?:div|rem)\.[us]64", compiled.ptx)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: "sm_{}{}".format(*c))
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{v[0]}-{v[1]}-{v[2] * 14 + 2}")
def test_step(variant, capability, tmp_path):
    compiled = _ptx.compile_kernel(cuda._step_kernel(variant), STEP, capability, tmp_path)
    check(compiled)
    global_loads = re.findall(r"ld\.global\S*(?:v4\S*|u16|b16)", compiled.ptx)
    assert any("v4" in load for load in global_loads) == variant.wide


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: "sm_{}{}".format(*c))
@pytest.mark.parametrize("name", OTHERS)
def test_other_kernels(name, capability, tmp_path):
    kernel = getattr(cuda, name)
    check(_ptx.compile_kernel(kernel, OTHERS[name], capability, tmp_path))


@pytest.mark.parametrize("head_dim", [80, 128])
def test_both_paths_do_the_same_arithmetic(head_dim, tmp_path):
    """The order of the roundings decides the bits: it may not depend on the alignment of a pool."""
    wide, narrow = (
        _ptx.compile_kernel(
            cuda._step_kernel(_plan.StepVariant(head_dim, head_dim, wide)), STEP, (9, 0), tmp_path
        )
        for wide in (True, False)
    )
    operations = [
        re.findall(r"\b(?:add|sub|mul|fma|div|ex2)\.\S*f32", path.ptx) for path in (wide, narrow)
    ]
    assert len(operations[0]) > 50
    assert operations[0] == operations[1]
