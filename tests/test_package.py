"""What the repository and the package look like: their layout, and the rules of the house."""

import ast
import hashlib
import importlib.metadata
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "numba_attn"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TOP_LEVEL = {"pyproject.toml", "numba_attn", "tests", "bench", "README.md", "LICENSE"}
AGPL_3 = "0d96a4ff68ad6d4b6f1f30f713b18d5184912ba8dd389f86aa7710db079abcb0"


def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_by(path):
    """List what a module of the package imports: absolute names, relative ones resolved."""
    names = set()
    package = ("numba_attn", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


def tracked_files():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode or not listed.stdout:
        pytest.skip("not a git checkout")
    return listed.stdout.splitlines()


def test_top_level():
    names = {file.split("/")[0] for file in tracked_files()}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL


def test_tracked_files_are_sources():
    for name in tracked_files():
        assert not re.search(r"\.(pyc|so|egg-info|whl|nbi|nbc|log)$|__pycache__", name), name


def test_no_file_names_a_path_of_one_machine():
    paths = re.compile(r"(?<![\w.])/(?:work|home|root|opt|tmp/w)/|\.\./shared")
    for name in tracked_files():
        path = ROOT / name
        if path.suffix == ".npz" or not path.exists() or path == pathlib.Path(__file__):
            continue
        assert not paths.search(path.read_text(encoding="utf-8")), name


def test_license_is_the_unmodified_agpl():
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == AGPL_3


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_source_file(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    assert ast.get_docstring(ast.parse(text)), "a module says what it is"
    if path.name != "_jit.py":
        assert not {"fastmath", "cache"} & set(keywords(path)), "_jit.py owns the compile options"


def keywords(path):
    """Map the names of keyword arguments to the source of their values."""
    calls = (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call))
    return {word.arg: ast.unparse(word.value) for call in calls for word in call.keywords}


def test_fastmath_never_implies_nnan_or_ninf():
    from numba_attn.kernels import _jit

    used = keywords(PACKAGE / "kernels" / "_jit.py")
    assert {"fastmath", "cache"} <= set(used)
    assert used["fastmath"] == "_FASTMATH"
    assert _jit._FASTMATH is not True
    assert not {"fast", "nnan", "ninf", "reassoc"} & set(_jit._FASTMATH or ())


def test_twins_do_not_import_each_other():
    cpu, cuda = (imported_by(PACKAGE / "kernels" / name) for name in ("cpu.py", "cuda.py"))
    assert "numba_attn.kernels.cuda" not in cpu
    assert "numba_attn.kernels.warp" not in cpu
    assert "numba_attn.kernels.cpu" not in cuda
    assert "numba_attn.kernels.simd" not in cuda
    assert any("recurrence" in name for name in cpu)
    assert any("recurrence" in name for name in imported_by(PACKAGE / "kernels/attend_cuda.py"))


def test_the_reference_shares_no_code():
    assert not {name for name in imported_by(PACKAGE / "reference.py") if "numba" in name}


def test_dependencies_run_one_way():
    """Kernels know nothing of the API; the edge knows kernels by name only, through _device."""
    for path in sorted((PACKAGE / "kernels").glob("*.py")):
        upper = {f"numba_attn.{name}" for name in ("api", "state", "_validate", "reference")}
        assert not imported_by(path) & upper, path.name
    for name in ("api.py", "state.py", "_validate.py", "_arrays.py", "_plan.py"):
        assert not [one for one in imported_by(PACKAGE / name) if "kernels" in one], name


OPTIONAL = {  # by file: imported where it is asked for
    "_stream_progress.py": {"tqdm"},
    **{f"_{name}_arrays.py": {name} for name in ("torch", "jax", "cupy")},
    "_continuous_batching.py": {"torch", "transformers"},
    "_dense_op.py": {"torch"},
    "_fall_through.py": {"torch", "transformers"},
    "_interval_mask.py": {"torch", "transformers"},
    "torch_op.py": {"torch"},
    "transformers.py": {"torch", "transformers"},
}


def test_imports_are_the_declared_dependencies():
    allowed = {"numba", "llvmlite", "numpy", "ml_dtypes", "numba_attn"}
    for path in SOURCES:
        outside = {name.split(".")[0] for name in imported_by(path)} - set(stdlib())
        assert outside <= allowed | OPTIONAL.get(path.name, set()), path.name


def stdlib():
    import sys

    return sys.stdlib_module_names


def test_the_installed_metadata():
    try:
        meta = importlib.metadata.metadata("numba_attn")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("numba_attn is not installed, only on the path")
    assert meta["License-Expression"] == "AGPL-3.0-only"
    assert meta["Requires-Python"] == ">=3.10"
    needed = [line for line in meta.get_all("Requires-Dist") if "extra ==" not in line]
    assert {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in needed} == {
        "numba",
        "numpy",
        "ml_dtypes",
    }
    assert not any("<" in line for line in needed), "no upper bounds"
    assert {"test", "cuda", "cuda12", "ptx", "dev", "bench"} <= set(meta.get_all("Provides-Extra"))
