"""The suite has teeth: a fault planted in a CUDA kernel, or a barrier less, fails its small cases.

They run in Numba's simulator, whether there is a device or not.
"""

import ast

import pytest
from _process import PACKAGE, copy_of_package, run

pytestmark = pytest.mark.slow

ATTEND, STEP, STATE = (f"kernels/{name}_cuda.py" for name in ("attend", "step", "state"))
ROWS = "kernels/rows_cuda.py"
BARRIER = "cuda.syncthreads()"
SCORED, ADDED = (
    "turn * rows_at_once\n            start =",
    "turn * rows_at_once\n            if t < tile_tokens and",
)
FAULTS = {
    # where tiles are
    "another slot of the ring": (ATTEND, "((tile & ring_mask) * tile", "(0 * tile"),
    "a ring without an end": (ATTEND, "tile_tokens, tile & ring_mask", "tile_tokens, tile"),
    "one group of copies less": (ATTEND, "waiter(max(ahead - 1, 0))", "waiter(ahead)"),
    "the tile after the next": (ATTEND, "tile + ahead, count", "tile + ahead + 1, count"),
    "columns from the split's start": (ATTEND, "divide(begin + t, block_size)", "divide(t, 4)"),
    "padding that is not 0": (ATTEND, "k_ring[i] = zero", "pass"),
    # score
    "a query's second part is its first": (
        ATTEND,
        "queries_at = first_head * pitch",
        "queries_at = 0",
    ),
    "later heads scored as the first": (ATTEND, "(first_head + first) * tokens", "first * tokens"),
    "a lane's sums at the lane": (ATTEND, "lane // stride * sums", "lane // stride"),
    "a row scored a turn early": (ATTEND, SCORED, SCORED.replace("turn ", "(turn - 1) ", 1)),
    "the last rows are not scored": (
        ATTEND,
        "in range(_plan.ceil_div(tokens, rows_at_once))",
        "in range(max(1, _plan.ceil_div(tokens, rows_at_once) - 1))",
    ),
    "the scale of another kv head": (
        ATTEND,
        "scale(where.k_scale, 0, 0, row.kv_head)",
        "scale(where.k_scale, 0, 0, 0)",
    ),
    # absorb
    "stale rows weigh": (ATTEND, "if token < count and head <", "if head <"),
    "a distance within the split": (ATTEND, "begin + token - row.place", "token - row.place"),
    "l is not rescaled": (ATTEND, "memory.l[head] * rescale +", "memory.l[head] +"),
    "a token's scale in its tile": (ATTEND, "memory.v_scales[token]", "memory.v_scales[t]"),
    # accumulate and store
    "stale rows are added": (
        ATTEND,
        "t < tile_tokens and tile * tile_tokens + t < count",
        "t < tile_tokens",
    ),
    "a row added a turn early": (ATTEND, ADDED, ADDED.replace("turn ", "(turn - 1) ", 1)),
    "the last rows are not added": (
        ATTEND,
        "_plan.ceil_div(variant.tile, rows_at_once)",
        "max(1, _plan.ceil_div(variant.tile, rows_at_once) - 1)",
    ),
    "o is not rescaled": (ATTEND, "rescale(o, load_heads(memory.factors, 0, 0))", "o"),
    "the scale of V is lost": (ATTEND, "memory.o[i] *= v_factor", "pass"),
    # splits
    "a token less in `simple`": (STEP, "min(split + SPLIT, end)", "min(split + SPLIT - 1, end)"),
    "splits of `simple` from 0": (
        STEP,
        "((begin - origin) & (SPLIT - 1))",
        "(begin & (SPLIT - 1))",
    ),
    "a token less in `split`": (STEP, "min(low + SPLIT, end)", "min(low + SPLIT - 1, end)"),
    "splits of `split` from 0": (STEP, "origin + (split + i) * SPLIT", "(split + i) * SPLIT"),
    "a window's first split is whole": (STEP, "low = max(low, begin)", "pass"),
    "rows that all start at 0": (STEP, "start += before[i]", "pass"),
    "no end of the last row": (STEP, "= start + count", "= start"),
    "rounds that all begin at 0": (ROWS, "return first + skip, min", "return first, min"),
    # jobs
    "a block skips a job": (STEP, "job += cuda.gridDim.x", "job += cuda.gridDim.x + 1"),
    "a block does one job": (STEP, "job += cuda.gridDim.x", "return"),
    "the first group's heads": (
        STEP,
        "head = kv_head * sizes.gqa + first",
        "head = kv_head * sizes.gqa",
    ),
    "a group begins a head late": (STEP, "* jobs.groups) * heads", "* jobs.groups) * (heads + 1)"),
    "a last group of all heads": (
        STEP,
        "num_heads = min(heads, sizes.gqa - first)",
        "num_heads = heads",
    ),
    "the first kv head's pairs": (
        STEP,
        "item * sizes.num_q_heads + head",
        "item * sizes.num_q_heads + first",
    ),
    "o without its padding": (STEP, "memory.o[h * pitch + i - h * dim]", "memory.o[i]"),
    # merge
    "factors swapped in `fold`": (
        STATE,
        "a, b = recurrence.weight(m, m_new), recurrence.weight(m2, m_new)",
        "b, a = recurrence.weight(m, m_new), recurrence.weight(m2, m_new)",
    ),
    "factors swapped in `merge_splits`": (
        STATE,
        "recurrence.weight(before, after), recurrence.weight(part_m[lane], after)",
        "recurrence.weight(part_m[lane], after), recurrence.weight(before, after)",
    ),
    "an empty state has been seen": (STATE, "if not seen and first >= lane:", "if False:"),
    "empty partials have been seen": (
        STATE,
        "recurrence.ONE if seen or first < WARP else recurrence.ZERO",
        "recurrence.ONE",
    ),
    "the first partials again": (STATE, "start * num_heads + head", "begin * num_heads + head"),
    "partials weigh as the one before": (STATE, "if i < lane:", "if i < lane - 1:"),
}


def barriers():
    """Find every barrier: the file, its function and which it is there, line and column."""
    for file in (ATTEND, STEP, STATE):
        tree, seen = ast.parse((PACKAGE / file).read_text()), {}
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.Call) and ast.unparse(node) == BARRIER:
                        seen[node.lineno, node.col_offset] = function.name  # the innermost: last
        for (line, column), name in sorted(seen.items()):
            earlier = sum(other == name for at, other in seen.items() if at < (line, column))
            yield pytest.param(file, line, column, id=f"{name} {earlier + 1}")


def failure(package, file=""):
    """Run the cases: return which fails first, and how, or "none"."""
    likely = "many_partials" if file == STATE else ""
    code = f"import _cuda_cases; print(_cuda_cases.first_failure({likely!r}))"
    return run(code, package, timeout=60, NUMBA_ENABLE_CUDASIM=1)


def test_the_unharmed_kernels_pass(tmp_path):
    assert failure(copy_of_package(tmp_path)) == "none"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_a_kernel_fails(tmp_path, fault):
    file, *_ = FAULTS[fault]
    assert failure(copy_of_package(tmp_path, FAULTS[fault]), file) != "none"


@pytest.mark.parametrize(("file", "line", "column"), list(barriers()))
def test_a_missing_barrier_fails(tmp_path, file, line, column):
    package = copy_of_package(tmp_path)
    lines = (package / file).read_text().splitlines()
    before, after = lines[line - 1][:column], lines[line - 1][column:]
    assert after.startswith(BARRIER)
    lines[line - 1] = f"{before}pass{after.removeprefix(BARRIER)}"
    (package / file).write_text("\n".join(lines))
    assert failure(package, file) != "none"


def test_a_barrier_that_half_of_a_warp_never_reaches_is_an_error(tmp_path):
    shuffle = "first = _first(not empty, thread)"
    half = f"cuda.syncthreads() if thread < 16 else None; {shuffle}"
    found = failure(copy_of_package(tmp_path, (STATE, shuffle, half)), STATE)
    assert found == "many_partials, +1: RuntimeError"
