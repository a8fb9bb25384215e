"""The CUDA tests in Numba's simulator, which needs a process of its own."""

import re
import subprocess
import sys

import _process
import pytest
from conftest import has_device

from numba_attn import _device

LEAST_TESTS = 200


@pytest.mark.skipif(_device.is_simulator(), reason="this is the simulator pass")
@pytest.mark.skipif(has_device(), reason="the CUDA tests ran on the device here")
def test_the_cuda_tests_pass_in_the_simulator(pytestconfig):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "cuda and not slow",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    run = subprocess.run(
        command,
        env=_process.environment(NUMBA_ENABLE_CUDASIM=1),
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stdout[-20000:] + run.stderr[-5000:]
    summary = run.stdout.strip().splitlines()[-1]
    passed = int(re.search(r"(\d+) passed", summary)[1])
    assert passed >= LEAST_TESTS, summary
    assert "failed" not in summary
    assert "error" not in summary
