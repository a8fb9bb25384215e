"""The compile cache: never stale, works without a home, and under a race."""

import os
import pathlib

import pytest
from _process import copy_of_package, edit, result, run, start

ATTEND = """
import numpy as np, numba_attn
one = np.full((1, 1, 8), 0x3F80, np.uint16)
pool = one[None]
out = numba_attn.paged_attention(one, pool, pool, np.array([[0]]), np.array([1]))
print(out[0, 0, 0])
"""
FINALIZE = """
import numpy as np, numba_attn
state = numba_attn.AttentionState(1, 1, 8)
state.m[:], state.l[:], state.o[:] = 0, 2, 2
print(numba_attn.finalize(state, dtype=np.uint16)[0, 0, 0])
"""
ONE, TWO = str(0x3F80), str(0x4000)
NO_CACHE = {"NUMBA_CACHE_DIR": None, "XDG_CACHE_HOME": None}
NOWHERE = "/dev/null/nowhere"

posix = pytest.mark.skipif(os.name != "posix", reason="/dev/null is a file on POSIX only")


def compiled(folder):
    """Return the compiled kernels under a folder, with the time each was written."""
    return {path: path.stat().st_mtime_ns for path in pathlib.Path(folder).rglob("*.nbc")}


def test_an_edit_of_a_shared_file_is_seen(tmp_path):
    package = copy_of_package(tmp_path)
    cache = {"NUMBA_CACHE_DIR": tmp_path / "cache"}
    assert run(ATTEND, package, **cache) == ONE
    before = compiled(tmp_path / "cache")
    assert before
    for code in (ATTEND, FINALIZE):
        assert run(code, package, **cache) == ONE
    assert compiled(tmp_path / "cache") == before, "the later runs compile nothing"
    source = package / "kernels" / "recurrence.py"
    times = source.stat()
    edit(source, "else o / l", "else (o + o) / l")
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert run(FINALIZE, package, **cache) == TWO, "an answer of the old source"
    assert compiled(tmp_path / "cache").items() > before.items()


@posix
def test_a_home_that_cannot_be_written_to(tmp_path):
    env = NO_CACHE | {"HOME": NOWHERE, "TMPDIR": tmp_path}
    assert run(FINALIZE, **env) == ONE
    assert compiled(tmp_path), "the temporary folder serves instead"


@posix
def test_nothing_that_can_be_written_to():
    code = f"import tempfile; tempfile.tempdir = {NOWHERE!r}\n{FINALIZE}"
    assert run(code, **NO_CACHE, HOME=NOWHERE) == ONE


@posix
def test_a_cache_folder_that_cannot_be_made():
    assert run(FINALIZE, NUMBA_CACHE_DIR=NOWHERE) == ONE


def test_two_processes_that_compile_at_once(tmp_path):
    children = [start(ATTEND, NUMBA_CACHE_DIR=tmp_path) for _ in range(2)]
    assert [result(child) for child in children] == [ONE, ONE]
    assert compiled(tmp_path)


def test_numbas_own_cache_setting_is_left_alone(tmp_path):
    code = "import numba, numba_attn.kernels.cpu; print(numba.config.CACHE_DIR)"
    assert run(code, NUMBA_CACHE_DIR=tmp_path) == str(tmp_path)
