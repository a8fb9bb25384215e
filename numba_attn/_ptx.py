"""Compile CUDA kernels and assemble them, on a machine without a GPU, for tests and estimates."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from typing import Any, NamedTuple

from . import _device


class Compiled(NamedTuple):
    """A kernel for one compute capability, and what it needs."""

    ptx: str
    registers: int  # of a thread
    stack: int  # bytes of a thread
    spilled: int  # bytes of a thread
    shared: int  # bytes of a block
    sass: str = ""  # the disassembly, where asked for


def tool(name: str) -> str | None:
    """Return the path of a program of the CUDA toolkit, or None."""
    folders = []
    if (spec := importlib.util.find_spec("nvidia")) and spec.submodule_search_locations:
        wheels = [pathlib.Path(place) for place in spec.submodule_search_locations]
        folders += [bin for wheel in wheels for bin in sorted(wheel.glob("*/bin"), reverse=True)]
    if "CUDA_HOME" in os.environ:
        folders.append(pathlib.Path(os.environ["CUDA_HOME"]) / "bin")
    path = os.pathsep.join([*map(str, folders), os.environ.get("PATH", "")])
    return shutil.which(name, path=path)


def missing(*, disassembler: bool = False) -> str | None:
    """Say what is missing here to compile kernels, or to disassemble them too; else None."""
    if _device.is_simulator():
        return "the simulator compiles nothing"
    if importlib.util.find_spec("numba_cuda") is None:
        return "numba-cuda is not installed: pip install 'numba_attn[ptx]'"
    if not importlib.import_module("numba.cuda.cudadrv.nvvm").is_available():
        return "no NVVM library: pip install 'numba_attn[ptx]'"
    for name in ("ptxas", "nvdisasm") if disassembler else ("ptxas",):
        if tool(name) is None:
            return f"no {name}: pip install 'numba_attn[ptx]'"
    return None


def compile_kernel(
    kernel: Any,
    signature: tuple[Any, ...],
    capability: tuple[int, int],
    folder: pathlib.Path,
    *,
    disassemble: bool = False,
) -> Compiled:
    """Compile a kernel and assemble it.

    Parameters
    ----------
    kernel
        Made by `kernels._jit.cuda_kernel`.
    signature : tuple
        The Numba types of its arguments.
    capability : tuple of int
        Such as (9, 0).
    folder : pathlib.Path
        For the files in between; a kernel that was there before is overwritten.
    disassemble : bool
        Fill in `Compiled.sass`, where there is an ``nvdisasm``.

    Returns
    -------
    Compiled

    Raises
    ------
    RuntimeError
        If a program of the toolkit fails; the message is its own.
    """
    bounds = kernel.targetoptions.get("launch_bounds")
    ptx, _ = _device.cuda().compile_ptx(
        kernel.py_func, signature, cc=capability, launch_bounds=bounds
    )
    source, binary = folder / "kernel.ptx", folder / "kernel.cubin"
    source.write_text(ptx)
    target = "-arch=sm_{}{}".format(*capability)
    said = _run("ptxas", "-v", target, source, "-o", binary).stderr

    def figure(pattern: str) -> int:
        return sum(map(int, re.findall(pattern, said)))

    return Compiled(
        ptx,
        figure(r"Used (\d+) registers"),
        figure(r"(\d+) bytes stack frame"),
        figure(r"(\d+) bytes spill"),
        figure(r"(\d+) bytes smem"),
        _run("nvdisasm", "-c", binary).stdout if disassemble and tool("nvdisasm") else "",
    )


@functools.cache
def compile_named(
    name: str, variant: Any, capability: tuple[int, int], *, disassemble: bool = False
) -> Compiled:
    """Compile a kernel of a decode step, once: it takes seconds.

    Parameters
    ----------
    name : str
        As in `kernels._signatures`.
    variant : StepVariant or None
        Of `simple` and `split`; the others have none.
    capability, disassemble
        As in `compile_kernel`.

    Returns
    -------
    Compiled
    """
    signatures: Any = importlib.import_module(".kernels._signatures", __package__)
    named = signatures.others()[name] if variant is None else signatures.step(name, variant)
    kernel, signature = named
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        return compile_kernel(kernel, signature, capability, place, disassemble=disassemble)


def _run(name: str, *arguments: str | pathlib.Path) -> subprocess.CompletedProcess[str]:
    path = tool(name)
    assert path is not None, f"{name} is not here"
    said = subprocess.run([path, *arguments], capture_output=True, text=True)
    if said.returncode:
        raise RuntimeError(f"{name}: {said.stderr}")
    return said
