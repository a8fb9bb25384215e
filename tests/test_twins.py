"""The twins: same host functions, same words, answers within the bound of each other."""

import ast
import inspect
import pathlib

import _backends
import pytest
from _bound import check_close, normalise
from _cases import Answer, absorb, draw, place
from _checks import CHECKS

import numba_attn

KERNELS = pathlib.Path(numba_attn.__file__).parent / "kernels"
HOST_FUNCTIONS = ("step_tile", "merge_splits", "finalize")
STAGES = ("load", "score", "absorb", "accumulate", "store")
RECURRENCES = ["cpu", "attend_cuda"]  # the files that hold a twin's walk over the tokens
WHERE = {"device", "kernel", "stream"}  # arguments that say where to run, not what


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_each_implementation_passes_the_checks(backend, check):
    check(backend)


def host_signatures(name):
    tree = ast.parse((KERNELS / f"{name}.py").read_text())
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    return {function: ast.unparse(found[function].args) for function in HOST_FUNCTIONS}


def test_host_functions_have_the_same_arguments():
    assert host_signatures("cpu") == host_signatures("cuda")


@pytest.mark.parametrize("name", RECURRENCES)
def test_stage_comments_come_in_order(name):
    lines = [line.strip() for line in (KERNELS / f"{name}.py").read_text().splitlines()]
    comments = [line[2:] for line in lines if line.startswith("# ")]
    named = [word for comment in comments for word in comment.split(", ") if word in STAGES]
    assert set(named) == set(STAGES)
    rank = [STAGES.index(word) for word in named]
    # A file may hold several kernels: each runs through the stages in order.
    starts = [i for i, r in enumerate(rank) if r == 0]
    for begin, end in zip(starts, [*starts[1:], len(rank)], strict=True):
        assert rank[begin:end] == sorted(rank[begin:end])
    assert starts[0] == 0


def imports(path):
    """Name the modules that a module imports from its package."""
    return {
        name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [*(alias.name for alias in node.names), getattr(node, "module", None)]
    }


@pytest.mark.parametrize("name", RECURRENCES)
def test_twins_share_the_recurrence(name):
    assert "recurrence" in imports(KERNELS / f"{name}.py")


def test_twins_never_import_each_other():
    of_cuda = {p for p in KERNELS.glob("*cuda.py")} | {KERNELS / "warp.py", KERNELS / "shares.py"}
    of_cpu = {KERNELS / f"{name}.py" for name in ("cpu", "append_cpu", "rows", "simd", "_vector")}
    assert all(path.exists() for path in of_cuda | of_cpu)
    for ours, others in ((of_cuda, of_cpu), (of_cpu, of_cuda)):
        names = {path.stem for path in others}
        for path in ours:
            assert not imports(path) & names, path


def test_the_reference_has_the_public_names_and_arguments():
    reference = numba_attn.reference
    for name in ("paged_attention", "step_tile", "merge", "finalize"):
        ours, theirs = (inspect.signature(getattr(x, name)) for x in (numba_attn, reference))
        expected = [p for p in ours.parameters if p not in WHERE]
        assert list(theirs.parameters) == expected
    tree = ast.parse(pathlib.Path(reference.__file__).read_text())
    relative = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level]
    assert not relative, "the reference shares no code with the kernels"


@pytest.mark.cuda
@pytest.mark.parametrize(("gqa", "head_dim", "block_size"), [(3, 20, 3), (1, 64, 16), (2, 80, 1)])
def test_twins_agree(gqa, head_dim, block_size):
    cpu, cuda = _backends.get("cpu"), _backends.get("cuda")
    lens = cuda.size((300, 0, 17), (18,))
    seqs = draw(lens, gqa=gqa, num_kv_heads=1, head_dim=head_dim)
    paged = place(seqs, block_size)
    states = [twin.read(absorb(twin, seqs, paged)) for twin in (cpu, cuda)]
    a, b = (Answer(*normalise(state)) for state in states)
    check_close(seqs, a, b)
