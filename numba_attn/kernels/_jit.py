"""Every Numba option of the package, and its compile cache.

Nothing else in the package says ``fastmath=`` or ``cache=``. Numba's own cache notices a change
only in the file that defines a function, not in the files it calls into; ours lives in a folder
named by a hash of all sources, so that an edit or an upgrade anywhere starts afresh.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import numba

# No reassociation: bits must not depend on a loop's shape. No nnan or ninf, which the full set of
# flags has: the recurrence starts from -inf. No contraction: scale * x - m in one rounding would
# weigh the largest logit by something other than 1. Where a product is fused, the code says fma.
_FASTMATH = False


def _digest() -> str:
    """Return a name for this state of the package's sources and of Numba."""
    package = pathlib.Path(__file__).parent.parent
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(package.rglob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _usable(folder: pathlib.Path) -> bool:
    """Create a folder only we can write to; say whether it is there, ours and writable."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The cache holds pickles: a folder that another user made could run their code.
        ours = not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid()
        if not ours:
            return False
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def cache_folder() -> pathlib.Path | None:
    """Return the folder of compiled kernels, or None where no folder can be written.

    ``NUMBA_CACHE_DIR`` is honoured; otherwise the user's cache folder, then the temporary folder.
    """
    roots = []
    if "NUMBA_CACHE_DIR" in os.environ:
        roots.append(pathlib.Path(os.environ["NUMBA_CACHE_DIR"]) / "numba_attn")
    else:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        user = str(os.getuid()) if hasattr(os, "getuid") else "user"
        roots.append(pathlib.Path(home) / "numba_attn")
        roots.append(pathlib.Path(tempfile.gettempdir()) / f"numba_attn-{user}")
    name = _digest()
    return next((root / name for root in roots if _usable(root) and _usable(root / name)), None)


_CACHE_FOLDER = cache_folder()


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a CPU kernel on its first call: no GIL, cached on disk in the package's folder."""
    jit = functools.partial(
        numba.njit, nogil=True, error_model="numpy", fastmath=_FASTMATH, boundscheck=False
    )
    if _CACHE_FOLDER is None:
        return jit()(function)
    # Numba fixes the cache path while the decorator runs.
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(_CACHE_FOLDER)
    try:
        return jit(cache=True)(function)
    finally:
        numba.config.CACHE_DIR = before


def shared(function: Callable[..., Any]) -> Any:
    """Make a scalar function that kernels of both twins can call; it is inlined into them."""
    return numba.njit(inline="always")(function)


def cuda_kernel(function: Callable[..., Any], launch_bounds: tuple[int, int] | None = None) -> Any:
    """Compile a CUDA kernel on its first launch; only here and below is ``numba.cuda`` imported.

    Launch bounds, threads of a block and blocks on a multiprocessor, limit a thread's registers.
    """
    from numba import cuda

    if numba.config.ENABLE_CUDASIM or launch_bounds is None:
        return cuda.jit(function)
    return cuda.jit(launch_bounds=launch_bounds)(function)


def cuda_function(function: Callable[..., Any]) -> Any:
    """Make a function that CUDA kernels call; it is inlined into them."""
    from numba import cuda

    if numba.config.ENABLE_CUDASIM:
        return function  # the simulator's own wrapper swaps globals, a race between threads
    return cuda.jit(device=True, inline="always")(function)
