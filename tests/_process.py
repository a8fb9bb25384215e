"""Run code in a fresh Python process, against the package under test or a changed copy of it."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import numba_attn

TESTS = pathlib.Path(__file__).parent
PACKAGE = pathlib.Path(numba_attn.__file__).parent


def environment(package=PACKAGE, **changes):
    """Return the environment of a child; a change to None removes a variable."""
    path = os.pathsep.join([str(package.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    merged = os.environ | {"PYTHONPATH": path} | changes
    return {name: str(value) for name, value in merged.items() if value is not None}


def stay_on_one_core():
    """Keep this process to one core: there, the simulator's threads hand over three times as fast.

    They run one at a time anyway.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def start(code, package=PACKAGE, **changes):
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", code],
        env=environment(package, **changes),
        cwd=package.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process, timeout=300):
    """Wait for a child, so many seconds at most; return what it printed."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert process.returncode == 0, f"exit status {process.returncode}\n{out}\n{err}"
    return out.strip()


def run(code, package=PACKAGE, timeout=300, **changes):
    return result(start(code, package, **changes), timeout)


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


def check_forks(bits, close=lambda: None):
    """Check that a forked child of this process, and its child, find the same bits, as it does."""
    before = bits()
    child = os.fork()
    if child == 0:
        same = bits() == before
        grandchild = os.fork()
        if grandchild == 0:
            close()
            os._exit(0 if bits() == before else 3)
        same = same and os.waitpid(grandchild, 0)[1] == 0
        close()
        os._exit(0 if same else 3)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, status
    assert bits() == before


def copy_of_package(folder, *edits):
    """Copy the package and change its source: edits are (file, old text, new text)."""
    copy = folder / "numba_attn"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in edits:
        edit(copy / file, old, new)
    return copy


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name}: {old!r} stands {text.count(old)} times"
    path.write_text(text.replace(old, new))
