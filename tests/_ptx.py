"""Compile CUDA kernels to PTX and assemble them, on a machine without a GPU."""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
from typing import NamedTuple

from numba_attn import _device


class Compiled(NamedTuple):
    ptx: str
    registers: int
    stack: int  # bytes of a thread
    spilled: int  # bytes of a thread
    shared: int  # bytes of a block


def tool(name):
    """Return the path of a program of the CUDA toolkit, or None."""
    folders = []
    if spec := importlib.util.find_spec("nvidia"):
        wheels = [pathlib.Path(place) for place in spec.submodule_search_locations]
        folders += [bin for wheel in wheels for bin in sorted(wheel.glob("*/bin"), reverse=True)]
    if "CUDA_HOME" in os.environ:
        folders.append(pathlib.Path(os.environ["CUDA_HOME"]) / "bin")
    path = os.pathsep.join([*map(str, folders), os.environ.get("PATH", "")])
    return shutil.which(name, path=path)


def missing():
    """Say what is missing here to compile kernels, or None."""
    if _device.is_simulator():
        return "the simulator compiles nothing"
    if importlib.util.find_spec("numba_cuda") is None:
        return "numba-cuda is not installed: pip install 'numba_attn[ptx]'"
    from numba.cuda.cudadrv import nvvm

    if not nvvm.is_available():
        return "no NVVM library: pip install 'numba_attn[ptx]'"
    if tool("ptxas") is None:
        return "no ptxas: pip install 'numba_attn[ptx]'"
    return None


def compile_kernel(kernel, signature, capability, folder):
    """Compile a kernel for a compute capability, such as (9, 0); assemble it, keep its figures."""
    from numba import cuda

    bounds = kernel.targetoptions.get("launch_bounds")
    ptx, _ = cuda.compile_ptx(kernel.py_func, signature, cc=capability, launch_bounds=bounds)
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    target = "-arch=sm_{}{}".format(*capability)
    command = [tool("ptxas"), "-v", target, source, "-o", folder / "kernel.cubin"]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr

    def figure(pattern):
        return sum(map(int, re.findall(pattern, said.stderr)))

    return Compiled(
        ptx,
        figure(r"Used (\d+) registers"),
        figure(r"(\d+) bytes stack frame"),
        figure(r"(\d+) bytes spill"),
        figure(r"(\d+) bytes smem"),
    )
