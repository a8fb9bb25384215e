"""The kernels that try the building blocks compile, so that a GPU machine need not find out."""

import re

import numpy as np
import pytest

from numba_attn import _ptx

if reason := _ptx.missing():
    pytest.skip(reason, allow_module_level=True)

from numba import cuda
from numba.cuda import types
from numba.np.numpy_support import from_dtype

from numba_attn.kernels import warp

SOME = {  # check: what is in its PTX
    "every code float8_e5m2": r"cvt\.f32\.f16",
    "blend": r"fma\.rn\.f32",
    "row sums 8": r"shfl\.sync\.bfly\.b32",
    "exchanges 4": r"shfl\.sync\.bfly\.b32",
    "products 3 8": r"fma\.rn\.f32",
    "gather and fold 3 5 7": r"fma\.rn\.f32",
    "scattered 3 5 7": r"st\.global",
    "shares of bfloat16 128-8-16-1 1": r"ld\.shared\.v4",
    "added shares 130-4-32-2 3": r"st\.shared\.f32|st\.shared\.b32",
    "copied rows int8 element": r"st\.shared\.[bu]8",
    "copied rows float32 at once": r"st\.shared\.v4",
    "copied rows bfloat16 in time": r"cp\.async\.cg\.shared\.global",
}


class Compiled(Exception):
    """In place of a launch."""


@pytest.mark.parametrize("name", SOME)
def test_a_check_compiles(name, monkeypatch):
    monkeypatch.setattr(warp, "copies_are_asynchronous", lambda: True)  # asks the device
    import _primitives

    class Twin:
        def launch(kernel, blocks, threads, *args):
            ptx, _ = cuda.compile_ptx(kernel.py_func, tuple(map(kind, args)), cc=(9, 0))
            raise Compiled(ptx)

    monkeypatch.setattr(_primitives, "twin", lambda: Twin)
    monkeypatch.setattr(_primitives, "to_device", lambda array: array)
    with pytest.raises(Compiled) as compiled:
        _primitives.CHECKS[name]()
    assert re.search(SOME[name], str(compiled.value))


def kind(x):
    if not isinstance(x, np.ndarray):
        return types.int64
    return types.Array(from_dtype(x.dtype), 1, "C")
