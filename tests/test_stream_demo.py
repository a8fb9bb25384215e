import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from _process import environment

from numba_attn import KVFile, _memory, _stream_demo, reference
from numba_attn import __main__ as main_job
from numba_attn._progress import Progress

SMALL = ["stream", "--context", "20000", "--heads", "4/2", "--head-dim", "32"]
SMALL += ["--resident-blocks", "60"]
RATE = r" +([\d.]+) s +([\d.]+) GB/s"
linux = pytest.mark.skipif(sys.platform != "linux", reason="it limits memory on Linux")


def test_it_writes_attends_and_checks(tmp_path, capsys):
    assert main_job.main([*SMALL, "--dir", str(tmp_path)]) == 0
    output = capsys.readouterr()
    for name in ("written", "read before", "attention", "read after"):
        assert len(re.findall(rf"^{name}{RATE}$", output.out, re.MULTILINE)) == 1
    assert "heads 0, 1, 2, 3 of 4 against float64:" in output.out
    for quantity in ("out", "lse"):
        assert re.search(rf"streamed +{quantity} +ok +error \S+, bound \S+", output.out)
    assert re.search(
        r"room in memory: 60 of 1250 blocks, 0.2 MiB; most memory .*: \S+ .iB", output.out
    )
    last = output.out.splitlines()[-1]
    assert re.fullmatch(
        r"Attention over 20000 tokens on disk reads K/V at [\d.]+ GB/s, \d+% of the faster plain "
        r"read \(by one thread\), with 4\.8% of the cache in memory\.",
        last,
    )
    for stage in ("compiling", "writing 4.9 MiB", "attending", "checking against float64"):
        assert f"{stage}\n" in output.err
    assert not list(tmp_path.iterdir())


@linux
def test_the_limit_is_told_and_taken_back(tmp_path, capsys):
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    assert main_job.main([*SMALL, "--dir", str(tmp_path)]) == 0
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("memory limit"))
    assert "256.2 MiB left, 0.2 MiB of them for blocks" in line
    assert line.endswith("is not larger than what is left: a longer --context shows more")


@linux
def test_the_limit_binds():
    with _memory.limited(1 << 26) as limit:
        assert limit - _memory.addresses() <= 1 << 26
        with pytest.raises(MemoryError):
            np.empty(1 << 27, np.uint8)
    assert np.empty(1 << 27, np.uint8).size == 1 << 27


def test_without_a_limit_it_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(_memory, "_resource", None)
    assert main_job.main([*SMALL, "--dir", str(tmp_path)]) == 0
    assert "memory: no limit, this system cannot set one" in capsys.readouterr().out


def test_what_a_system_does_not_tell(tmp_path, monkeypatch):
    monkeypatch.setattr(_memory, "_STATUS", tmp_path / "none")
    assert _memory.addresses() is None
    assert (_memory.peak() is None) == (_memory._resource is None)
    monkeypatch.setattr(_memory, "_resource", None)
    assert _memory.peak() is None


def test_a_lost_token_ends_it_with_status_1(tmp_path, capsys, monkeypatch):
    correct = _stream_demo.stream_attention

    def short(q, source, tables, lens, **options):
        return correct(q, source, tables, [lens[0] - 1], **options)

    monkeypatch.setattr(_stream_demo, "stream_attention", short)
    assert main_job.main([*SMALL, "--dir", str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert re.search(r"streamed +out +FAIL", output)
    assert output.splitlines()[-1] == "The check failed: what was attended to on disk is wrong."
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("keep", [[], ["--keep"]])
def test_an_interrupt_removes_the_file(tmp_path, capsys, monkeypatch, keep):
    def interrupted(*args, progress, **options):
        if list(tmp_path.glob("*/*/*.npy")):  # not while it compiles
            raise KeyboardInterrupt
        return real(*args, progress=progress, **options)

    real = _stream_demo.stream_attention
    monkeypatch.setattr(_stream_demo, "stream_attention", interrupted)
    assert main_job.main([*SMALL, "--dir", str(tmp_path), *keep]) == 130
    assert "interrupted; the file is removed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_is_kept_is_a_kv_file_of_normal_numbers(tmp_path):
    arguments = [*SMALL, "--context", "1234", "--dir", str(tmp_path), "--keep"]
    for run in range(2):
        assert main_job.main(arguments) == 0
        assert len(list(tmp_path.iterdir())) == run + 1
    pools = []
    for path in tmp_path.glob("*/cache"):
        with KVFile(path) as file:
            pair = file.layer(0).pair(78)
            file.layer(0).read(np.arange(78), *pair)
            pools.append(pair)
    assert pools[0].tobytes() == pools[1].tobytes()
    values = pools[0].astype(np.float32)
    assert abs(values.mean()) < 0.01
    assert abs(values.std() - 1) < 0.01
    assert len(np.unique(values[0].reshape(-1, 32), axis=0)) == 78 * 16 * 2


def test_its_float64_attention_is_that_of_the_reference(tmp_path):
    """Its pieces, and a last block that is partly filled."""
    path = tmp_path / "cache"
    case = _stream_demo.Case(70_001, 4, 2, 16, 90, 2)
    q = _stream_demo._query(case)
    with _stream_demo._written(case, path, Progress()) as file:
        layer = file.layer(0)
        k, v = layer.pair(case.num_blocks)
        layer.read(np.arange(case.num_blocks), k, v)
        table = np.arange(case.num_blocks)[None]
        wide = q.astype(np.float64)
        out, lse = reference.paged_attention(wide, k, v, table, [case.context], return_lse=True)
        checks = _stream_demo._check(case, layer, q, (out, lse), Progress())
    assert [check.quantity for check in checks] == ["out", "lse"]
    assert all(check.error < 1e-12 < check.bound for check in checks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "1M"], "the following arguments are required: --dir"),
        (["--dir", "no/such/folder"], "argument --dir: no folder 'no/such/folder'"),
        (["--dir", ".", "--context", "1G"], "argument --context: expected 1 to 2147483647 tokens"),
        (["--dir", ".", "--context", "0"], "such as 20000, 128K or 1M, got '0'"),
        (["--dir", ".", "--context", "2048M"], "got '2048M'"),
        (["--dir", ".", "--heads", "9/4"], "argument --heads: expected Hq/Hkv, a multiple of Hkv"),
        (["--dir", ".", "--heads", "8/0"], "such as 32/8, got '8/0'"),
        (["--dir", ".", "--head-dim", "0"], "argument --head-dim: expected a whole number, at"),
        (["--dir", ".", "--resident-blocks", "0"], "argument --resident-blocks: expected a whole"),
        (["--dir", ".", "--prefetch", "-1"], "argument --prefetch: expected a whole number, at"),
        (["--dir", ".", "now"], "unrecognized arguments: now"),
    ],
)
def test_bad_arguments_end_it_with_status_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as error:
        main_job.main(["stream", *arguments])
    assert error.value.code == 2
    output = capsys.readouterr()
    assert message in output.err
    assert output.out == ""


def test_a_full_disk_is_a_bad_argument(tmp_path, capsys, monkeypatch):
    disk = shutil.disk_usage(tmp_path)._replace(free=2**32 - 1)
    monkeypatch.setattr(_stream_demo.shutil, "disk_usage", lambda path: disk)
    with pytest.raises(SystemExit) as error:
        main_job.main(["stream", "--dir", str(tmp_path)])
    assert error.value.code == 2
    assert "argument --dir: 4.00 GiB are needed, 4.00 GiB are free in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "count"), [("20000", 20000), ("128K", 131072), ("1M", 2**20), ("3k", 3072)]
)
def test_contexts_are_written_in_units_of_1024(tmp_path, text, count):
    options = _stream_demo._parse(["--dir", str(tmp_path), "--heads", "1/1", "--context", text])
    assert options.case.context == count


@pytest.mark.slow
@linux
def test_a_cache_that_is_larger_than_the_limit(tmp_path):
    if shutil.disk_usage(tmp_path).free < 3 * 2**30:
        pytest.skip("no room for a cache of 1 GiB")
    done = subprocess.run(
        [sys.executable, "-m", "numba_attn", "stream", "--context", "256K", "--dir", tmp_path],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"320\.0 MiB left, .*the cache of 1\.00 GiB is .*larger", done.stdout)
    assert "not larger than what is left" not in done.stdout
    peak = re.search(r"most memory resident in this process: ([\d.]+) MiB", done.stdout)
    assert float(peak[1]) < 900
    assert not os.listdir(tmp_path)
