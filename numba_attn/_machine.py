"""What this machine is: for the head of a report, and to fit measurements into its memory."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform

import llvmlite.binding
import numba

from . import __version__, _device, _threads


def versions() -> dict[str, str]:
    """Return the versions a result depends on."""
    found = {"numba_attn": __version__, "python": platform.python_version()}
    for package in ("numba", "llvmlite", "numpy", "ml_dtypes", "numba-cuda"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """Return the CPU's name, and LLVM's name for what code is compiled for."""
    name = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        name = models[0].partition(":")[2].strip() if models else name
    compiled_for = getattr(numba.config, "CPU_NAME", None) or llvmlite.binding.get_host_cpu_name()
    return f"{name} ({compiled_for})"


def available_memory() -> int:
    """Return the bytes this process may still allocate; 4 GB where the system does not say."""
    limits = [_mem_available(), _cgroup_room()]
    return min((limit for limit in limits if limit is not None), default=4_000_000_000)


def _mem_available() -> int | None:
    """Return what the system calls available, or half of the physical memory."""
    meminfo = pathlib.Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return None


def _cgroup_room(folder: pathlib.Path = pathlib.Path("/sys/fs/cgroup")) -> int | None:
    """Return what is left under this container's memory limit; None without one."""
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        stat = dict(map(str.split, (folder / "memory.stat").read_text().splitlines()))
        return max(0, limit - used + int(stat["inactive_file"]))  # cached files make room
    except (OSError, ValueError, KeyError):  # no cgroup v2 here, or the limit is "max"
        return None


def describe() -> dict[str, object]:
    """Return everything a report needs to say about where it was made."""
    return {
        "versions": versions(),
        "cpu": cpu_name(),
        "threads": _threads.get_num_threads(),
        "usable_cores": _threads.usable_cores(),
        "devices": _device.available_devices(),
        "cuda_problem": _device.cuda_problem(),
    }
