"""Whether a device computes what it should: the tasks of `device_check.py` that time nothing."""

import _checks
import _primitives
import numpy as np
import test_golden
from _backends import get
from _bound import assert_same_bits, check_answer, check_close, check_state, normalise
from _cases import FORMATS, Answer, absorb, attend, draw, place, tiles
from _device_arrays import KERNELS, BothKernels

from numba_attn import _check, _plan
from numba_attn._workloads import Workload

CASES = (
    _check.RAGGED,
    Workload("long", (32768, 5000), 8, 1, 128),
    Workload("odd", (0, 1, 50, 333), 21, 3, 20, block_size=3),
    Workload("page of 1", (17, 200), 8, 8, 80, block_size=1),
    Workload("one kv head", (300, 4), 71, 1, 64, block_size=64),
    Workload("large heads", (0, 130), 2, 2, 512, block_size=17),
    Workload("small heads", (400,), 5, 1, 1, block_size=256),
)
HEADS = (1, 2, 64), (4, 2, 128), (3, 1, 20), (7, 1, 128), (8, 1, 128)  # G, Hkv, D
DRAWS = 8  # of each


def primitives(report, tiny):
    """Check each building block, against NumPy."""
    for name, check in _primitives.CHECKS.items():
        report.check(name, check)


def golden(report, tiny, library):
    """Hold arrays of a library against answers of an independent implementation."""
    backend = BothKernels(library)
    for path in test_golden.GOLDEN[: 1 if tiny else None]:
        report.check(f"{path.stem} tiles", test_golden.test_state_after_every_tile, backend, path)
        report.check(f"{path.stem} one call", test_golden.test_one_call, backend, path)


def properties(report, tiny, library):
    """Run the checks that any right implementation passes."""
    backend = BothKernels(library)
    for check in _checks.CHECKS[: 1 if tiny else None]:
        report.check(check.__name__, check, backend)


def formats(report, tiny):
    """Check every number format of K and V, from host arrays."""
    backend = BothKernels("host")
    for i, name in enumerate(FORMATS):
        dtypes = "float32", name, FORMATS[i - 1]
        seqs = draw((9,) if tiny else (600, 0, 33), dtypes=dtypes, k_scale=0.5, v_scale=2.0)
        report.check(" ".join(dtypes), lambda s: _answers(backend, s), seqs)


def _answers(backend, seqs):
    check_answer(seqs, attend(backend, seqs, place(seqs, 16)))


def cases(report, tiny):
    """Hold both twins, in one call and tile by tile, against the float64 reference."""
    devices = ("cpu", "auto"), *(("cuda", kernel) for kernel in KERNELS)
    for case in (_check.TINY,) if tiny else CASES:
        for device, kernel in devices:
            name = f"{case.name}, {device} {kernel}"
            report.check(name, _hold, device, kernel, case, report.figures)


def _hold(device, kernel, case, figures):
    results = list(_check.check_device(device, case, kernel=kernel))
    figures[f"{case.name} {device} {kernel}"] = {
        f"{result.way} {result.quantity}": [result.error, result.bound] for result in results
    }
    wrong = [str(result) for result in results if not result.ok]
    assert not wrong, "; ".join(wrong)


def ragged(report, tiny):
    """Draw ragged batches: within the bound, whatever the tiles, the blocks and the batch."""
    backend, rng = BothKernels("numba"), np.random.default_rng(0)
    for gqa, num_kv_heads, head_dim in HEADS[-2:-1] if tiny else HEADS:
        for seed in range(1 if tiny else DRAWS):
            lens = rng.integers(0, 20 if tiny else 1500, 1 if tiny else 5)
            sizes = {"gqa": gqa, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
            seqs = draw(lens, **sizes, seed=seed)
            name = f"G {gqa}, D {head_dim}, tokens {' '.join(map(str, lens))}"
            report.check(name, _any_layout, backend, seqs, rng)


def _any_layout(backend, seqs, rng):
    block_size = int(rng.choice([1, 3, 16, 40, 256]))
    paged = place(seqs, block_size)
    whole = attend(backend, seqs, paged)
    check_answer(seqs, whole)
    moved = place(seqs, 5, seed=1, fill=np.inf, ids=(-5,))
    assert_same_bits(*zip(whole, attend(backend, seqs, moved), strict=True))
    alone = seqs.rows(len(seqs.q) - 1)
    answer = attend(backend, alone, place(alone, block_size))
    assert_same_bits(*((x[-1:], y) for x, y in zip(whole, answer, strict=True)))
    cut = list(tiles(paged, _plan.ceil_div(700, block_size)))
    rng.shuffle(cut)
    check_state(seqs, backend.read(absorb(backend, seqs, paged, cut)))


def twins(report, tiny):
    """Hold the twins against each other, and say how far apart they are."""
    cpu, cuda = get("cpu"), BothKernels("host")
    for gqa, num_kv_heads, head_dim in HEADS[2:3] if tiny else HEADS:
        sizes = {"gqa": gqa, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        seqs = draw((18,) if tiny else (3000, 0, 17, 512), **sizes)
        name = f"G {gqa}, D {head_dim}"
        report.check(name, _compare, cpu, cuda, seqs, report.figures, name)


def _compare(cpu, cuda, seqs, figures, name):
    paged = place(seqs, 16)
    a, b = (Answer(*normalise(twin.read(absorb(twin, seqs, paged)))) for twin in (cpu, cuda))
    seen = a.lse != -np.inf
    figures[name] = {
        "out": float(np.abs(a.out - b.out).max()),
        "lse": float(np.abs(a.lse[seen] - b.lse[seen]).max(initial=0)),
    }
    check_close(seqs, a, b)
    outs = [attend(twin, seqs, paged).out.view(np.uint16) for twin in (cpu, cuda)]
    figures[name]["bfloat16 that differ"] = float((outs[0] != outs[1]).mean())
