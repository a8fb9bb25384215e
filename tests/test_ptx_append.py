"""The kernels of append_kv compile without a GPU: no spills, no stack, no double precision."""

import re

import pytest

from numba_attn import _ptx

if reason := _ptx.missing():
    pytest.skip(reason, allow_module_level=True)

from numba.cuda import types

from numba_attn.kernels import _append, append_cuda

CARRIERS = dict.fromkeys(("bfloat16", "float16"), types.uint16)
CARRIERS |= dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), types.uint8)
CARRIERS |= {"float32": types.float32, "int8": types.int8}


def vector(dtype):
    return types.Array(dtype, 1, "C")


@pytest.mark.parametrize("target", _append.FORMATS)
@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32"])
def test_append(source, target, tmp_path):
    where = types.Tuple([types.UniTuple(types.int64, n) for n in (3, 4, 2, 4)])
    sizes = types.UniTuple(types.int64, 4)
    for scaled, computed in [(False, False), (True, False), (True, True)]:
        if computed and target not in _append.MOST:
            continue
        slots = types.int64 if scaled else types.int32
        plan = _append.plan((source, target), scaled, computed)
        arrays = (CARRIERS[source], CARRIERS[target], slots, types.float32 if scaled else slots)
        signature = (*map(vector, arrays), where, sizes)
        kernel = append_cuda._append_rows(plan)
        compiled = _ptx.compile_kernel(kernel, signature, (9, 0), tmp_path)
        assert compiled.spilled == compiled.stack == 0
        assert 0 < compiled.registers <= 64
        assert not re.findall(r"\S+\.f64\S*", compiled.ptx)
        if scaled:  # as on the CPU: a division, rounded once
            assert "div.rn.f32" in compiled.ptx
