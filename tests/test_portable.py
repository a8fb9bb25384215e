"""The vector building blocks on CPUs that are not this one: cross-compiled, and by name."""

import re
import subprocess
import sys

import llvmlite.binding as llvm
import numba
import pytest
from _process import TESTS, environment
from numba import float32, int32, int64

from numba_attn.kernels import logits, simd

ADDRESSES = (int64,) * 7
BLOCKS = {
    "score": ("4, 128, 0, 0", ADDRESSES),
    "absorb": (
        "4, 7",
        (int64, int32, int64, int64, int64, float32, float32, int64, int32, int64),
    ),
    "accumulate": ("4, 128, 0, 8", ADDRESSES),
}
BUILDING_BLOCKS = (  # tests of every format; the sweeps over sizes and ratios are this CPU's
    "test_widen_and_natural_order",
    "test_every_code_is_widened_exactly",
    "test_score_of_other_formats",
    "test_absorb_shapes_logits",
    "test_softcap_is_exact_near_0_and_bounded",
    "test_accumulate_other_formats",
    "test_store_state",
)
# CPU: (triple, packed multiply-add or multiply, the same one scalar)
CPUS = {
    "haswell": ("x86_64-unknown-linux-gnu", r"vfmadd\d+ps\s.*%ymm", r"vfmadd\d+ss|vmulss"),
    "skylake-avx512": (
        "x86_64-unknown-linux-gnu",
        r"vfmadd\d+ps\s.*%[yz]mm",
        r"vfmadd\d+ss|vmulss",
    ),
    "x86-64-v2": ("x86_64-unknown-linux-gnu", r"mulps\s", r"mulss\s"),
    "cortex-a76": ("aarch64-unknown-linux-gnu", r"fmla\s+v\d+\.4s", r"fmadd\s|fmul\s+s\d"),
}


def intermediate(name):
    """Compile a building block for the CPU of this process; return its LLVM code."""
    literals, signature = BLOCKS[name]
    names = ", ".join(f"a{i}" for i in range(len(signature)))
    scope = {"block": getattr(simd, name, None) or getattr(logits, name)}
    exec(f"def call({names}):\n    block({names}, {literals})", scope)
    function = numba.njit(scope["call"])
    function.compile(signature)
    return function.inspect_llvm(signature)


def assembly(code, triple, cpu):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(code)
    module.triple = triple
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    module.data_layout = str(machine.target_data)
    return machine.emit_assembly(module)


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("block", BLOCKS)
def test_other_cpus_get_packed_arithmetic(block, cpu):
    triple, packed, scalar = CPUS[cpu]
    text = assembly(intermediate(block), triple, cpu)
    assert len(re.findall(packed, text)) >= 16
    # A fused multiply-add that the CPU lacks would be a call of fmaf per lane.
    assert not re.findall(r"(call|bl)\S*\s+\S*fma", text)
    assert len(re.findall(scalar, text)) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("cpu", ["x86-64-v2", "haswell", "skylake-avx512"])
def test_the_suite_passes_on_another_cpu(cpu):
    """Code for the named CPU alone, with the features it has; its golden vectors and promises."""
    if not llvm.get_process_triple().startswith("x86_64"):
        pytest.skip("these are x86-64 CPUs")
    features = llvm.get_host_cpu_features()
    if cpu == "skylake-avx512" and not features.get("avx512vl"):
        pytest.skip("this CPU has no AVX-512")
    if cpu == "haswell" and not features.get("avx2"):
        pytest.skip("this CPU has no AVX2")
    files = [str(TESTS / f"test_{name}.py") for name in ("golden", "promises", "nonfinite")]
    files += [f"{TESTS / 'test_simd.py'}::{name}" for name in BUILDING_BLOCKS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not cuda", "-p", "no:cacheprovider", *files],
        env=environment(NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES=""),
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\d{3,} passed", done.stdout), done.stdout[-300:]
