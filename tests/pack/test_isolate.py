"""Spool, guards and the child process for single rows."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from pack.guard import (
    OOM_EXIT,
    CrumbWriter,
    attempt_name,
    environment,
    new_crumb,
    one_thread_each,
    read_crumbs,
    start_process,
)
from pack.isolate import DirectRunner, IsolatedRunner, RowTask, describe_exit
from pack.row import as_row_error, pack_row
from pack.spool import RowSpool, read_spool, shard_bytes
from schemas.errors import RegistryError, RowError, VerificationError
from schemas.manifest import parse_row
from schemas.sample import PackedSample, to_columns
from tests.pack.job_fakes import MEDIA, job_config, row, write_clips


def _task(folder: Path, value: Any, offset: int = 0) -> RowTask:
    return RowTask(offset, value, str(folder), (f"{folder}/m.jsonl", offset), 0)


def _samples(folder: Path, count: int) -> Iterator[PackedSample]:
    config = job_config(folder / "m.jsonl", folder / "out")
    for i in range(count):
        parsed = parse_row(row(i), base=str(folder), location=(f"{folder}/m.jsonl", i))
        yield from pack_row(parsed, config, MEDIA)


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    write_clips(tmp_path, 4, 0.5)
    return tmp_path


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("in_memory", [True, False])
def test_spool_gives_back_what_it_took(clips: Path, count: int, in_memory: bool) -> None:
    expected = [{**c, "meta": json.dumps(c["meta"])} for c in map(to_columns, _samples(clips, count))]
    spool = RowSpool(clips / "spool", 10**9, in_memory)
    spool.fill(_samples(clips, count))
    assert (clips / "spool").exists() == (count > 1 or not in_memory)
    assert [{**c, "meta": json.dumps(c["meta"])} for c in spool.samples()] == expected
    spool.close()
    assert not (clips / "spool").exists()


def test_a_cut_spool_file_is_noticed(clips: Path) -> None:
    spool = RowSpool(clips / "spool", 10**9, in_memory=False)
    spool.fill(_samples(clips, 2))
    data = (clips / "spool").read_bytes()
    for cut in (len(data) - 1, len(data) // 2, 10, 0):
        (clips / "cut").write_bytes(data[:cut])
        with pytest.raises(VerificationError, match="ends before its 2 samples"):
            list(read_spool(clips / "cut", 2))


def test_the_limit_counts_the_bytes_in_the_shard(clips: Path) -> None:
    (sample,) = _samples(clips, 1)
    size = shard_bytes(to_columns(sample))
    RowSpool(clips / "spool", size).fill([sample])
    with pytest.raises(RowError, match=r"too_large: sample r0 takes .* MiB and a shard holds"):
        RowSpool(clips / "spool", size - 1).fill([sample])


def test_isolated_rows_survive_each_other(clips: Path) -> None:
    config = job_config(clips / "m.jsonl", clips / "out", rows={"timeout_s": 1.5, "max_memory_gb": 0.3})
    spool = RowSpool(clips / "spool", 10**9)
    deeds = ["", "exit", "", "segv", "sleep", "eat", "raise", "quit", ""]
    runner = IsolatedRunner(config, MEDIA, spool)
    found = []
    try:
        for i, deed in enumerate(deeds):
            fault = runner.run(_task(clips, row(i % 4, do=deed), i))
            found.append(fault.reason if fault else [c["id"] for c in spool.samples()])
    finally:
        runner.close()
        spool.close()
    assert found == [
        ["r0"],
        "crashed",
        ["r2"],
        "crashed",
        "timeout",
        "oom",
        "preprocessor_failed",
        "preprocessor_failed",
        ["r0"],
    ]
    assert not any("omniloom-row" in " ".join(p.cmdline()) for p in psutil.Process().children(recursive=True))


def _exits_once(source: Any, config: Any) -> Any:
    """Ends its process the first time it sees a clip."""
    mark = Path(source.uri + ".seen")
    if not mark.exists():
        mark.write_text("")
        os._exit(3)
    return MEDIA.load_video(source, config)


@pytest.mark.parametrize(("suspects", "packed"), [(frozenset(), True), (frozenset([0]), False)])
def test_one_more_try_alone_and_none_for_a_row_that_had_its_first(
    clips: Path, suspects: frozenset[int], packed: bool
) -> None:
    config = job_config(clips / "m.jsonl", clips / "out")
    spool = RowSpool(clips / "spool", 10**9)
    runner = IsolatedRunner(config, replace(MEDIA, load_video=_exits_once), spool, suspects)
    try:
        fault = runner.run(_task(clips, row(0)))
    finally:
        runner.close()
    assert (fault is None) == packed
    if fault is not None:
        assert (fault.reason, fault.detail) == ("crashed", "ended its process twice, the last time with exit code 3")


def test_the_same_rows_in_this_process(clips: Path) -> None:
    config = job_config(clips / "m.jsonl", clips / "out")
    spool = RowSpool(clips / "spool", 10**9)
    runner = DirectRunner(config, MEDIA, spool)
    assert runner.run(_task(clips, row(1))) is None
    assert [c["id"] for c in spool.samples()] == ["r1"]
    for value, reason in (("the line is not JSON", "bad_row"), ({"videos": 3}, "bad_row"), (row(9), "missing_file")):
        fault = runner.run(_task(clips, value))
        assert fault is not None
        assert fault.reason == reason
    runner.close()


def test_names_of_rows_that_cannot_be_parsed(clips: Path) -> None:
    assert _task(clips, "no JSON", 5).names() == ("m.jsonl#row5", "")
    assert _task(clips, {"id": 7, "source": "s"}).names() == ("7", "s")
    bare = {"conversations": "x"}
    assert _task(clips, bare).names() == (parse_row(bare, base="", location=("", 0)).id, "")
    assert replace(_task(clips, {"conversations": "x"}), occurrence=2).names()[0].endswith("-2")


def test_whose_fault_an_error_is() -> None:
    assert as_row_error(MemoryError("1 TiB")).reason == "oom"
    assert as_row_error(KeyError("x")).detail == "KeyError: 'x'"
    with pytest.raises(OSError, match="No space"):
        as_row_error(OSError(28, "No space left"))
    with pytest.raises(RegistryError):
        as_row_error(RegistryError("unknown preprocessor"))
    with pytest.raises(KeyboardInterrupt):
        as_row_error(KeyboardInterrupt())


@pytest.mark.parametrize(
    ("code", "said"),
    [(7, "exit code 7"), (-11, "signal 11 (SIGSEGV)"), (None, "no exit code"), (-9, "killed from outside")],
)
def test_exits_are_described(code: int | None, said: str) -> None:
    assert said in describe_exit(code)


def test_a_crumb_tells_living_from_dead_and_from_elsewhere(tmp_path: Path) -> None:
    mine = new_crumb("job", "p", 5, False)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    other = replace(mine, pid=process.pid, pid_started=psutil.Process(process.pid).create_time())
    assert not mine.owner_is_dead
    assert not other.owner_is_dead
    assert replace(other, pid_started=other.pid_started - 100).owner_is_dead  # the pid was given to another process
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert other.owner_is_dead
    assert not replace(other, host="elsewhere").owner_is_dead
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    writer = CrumbWriter(tmp_path / "a", mine)
    writer.update(row=3, id="x", media_s=1.5)
    (tmp_path / "b/crumb.json").write_text("{torn")
    ((folder, crumb, _),) = read_crumbs(tmp_path)
    assert (folder.name, crumb.row, crumb.id, crumb.media_s) == ("a", 3, "x", 1.5)


def test_a_folder_without_a_crumb_still_has_an_owner(tmp_path: Path) -> None:
    """Its process was killed before the first breadcrumb, or while it removed the folder."""
    mine = new_crumb("job", "000001-k.retry", 5, False)
    for crumb in (mine, replace(mine, pid=2**22 - 7), replace(mine, host="elsewhere")):
        (tmp_path / attempt_name(crumb)).mkdir()
    (tmp_path / "stray").mkdir()
    found = {crumb.is_local: crumb.owner_is_dead for _, crumb, _ in read_crumbs(tmp_path) if crumb.pid == mine.pid}
    assert found == {True: False, False: False}
    (dead,) = [crumb for _, crumb, _ in read_crumbs(tmp_path) if crumb.pid != mine.pid]
    assert (dead.job, dead.partition, dead.owner_is_dead) == ("job", "000001-k.retry", True)


_GUARDED = """
import sys, time, numpy as np
from pack.guard import MemoryWatch, RowTimer, end_with_parent
match sys.argv[1]:
    case "time":
        with RowTimer(0.3):
            sum(range(10**12))
    case "memory":
        with MemoryWatch(50e6, poll_s=0.01):
            held = [np.ones(1 << 20)]
            while True:
                held.append(np.ones(1 << 20)); time.sleep(0.001)
    case "in time":
        timer = RowTimer(0.3)
        for _ in range(3):
            with timer:
                time.sleep(0.15)
        time.sleep(0.5)
        timer.close()
    case "little":
        with MemoryWatch(500e6, poll_s=0.01):
            held = np.ones(1 << 22); time.sleep(0.1)
"""


@pytest.mark.parametrize(("what", "code"), [("time", 1), ("memory", OOM_EXIT), ("in time", 0), ("little", 0)])
def test_guards_end_a_process_only_over_their_limit(what: str, code: int) -> None:
    assert subprocess.run([sys.executable, "-c", _GUARDED, what], check=False, timeout=60).returncode == code


_FAMILY = """
import subprocess, sys, time
code = "import time, pack.guard; pack.guard.end_with_parent(0.05); print(1, flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_worker_ends_soon_after_its_parent_was_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _FAMILY], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.is_running()
    parent.kill()
    parent.wait()
    end = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
        time.sleep(0.05)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def _tell_environment(path: str) -> None:
    Path(path).write_text(json.dumps([os.environ.get("OMNILOOM_TEST"), os.environ.get("OMP_NUM_THREADS")]))


def test_a_started_process_has_the_environment_of_its_start_and_one_thread(tmp_path: Path) -> None:
    before = os.environ.get("OMP_NUM_THREADS")
    for value in ("a", "b"):
        with environment(OMNILOOM_TEST=value):
            start_process(_tell_environment, (str(tmp_path / value),), "test", []).join()
        assert json.loads((tmp_path / value).read_text()) == [value, "1"]
    with one_thread_each():
        assert os.environ["OMP_NUM_THREADS"] == "1"
    assert os.environ.get("OMP_NUM_THREADS") == before
    assert "OMNILOOM_TEST" not in os.environ


@pytest.mark.parametrize("raised", [asyncio.CancelledError, GeneratorExit, type("Panic", (BaseException,), {})])
def test_what_is_no_exception_rejects_its_row_too(raised) -> None:
    error = as_row_error(raised("boom"))
    assert (error.reason, "boom" in error.detail) == ("preprocessor_failed", True)


def test_ctrl_c_is_nobodys_fault() -> None:
    with pytest.raises(KeyboardInterrupt):
        as_row_error(KeyboardInterrupt())
