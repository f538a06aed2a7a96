"""A second run in the folder of one that trains."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.errors import ConfigError
from train import run_lock
from train.run_lock import LOCK_FILE, RunLock

HOLD = """
import sys, time
from pathlib import Path
from train.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    return other


def test_a_second_run_is_told_whose_folder_it_is_and_a_killed_one_leaves_it(tmp_path: Path) -> None:
    folder = tmp_path / "output"
    with holder(folder) as other:
        with pytest.raises(ConfigError, match=rf"output_dir: process {other.pid} on .* is training into .*output"):
            RunLock(folder)
        other.send_signal(signal.SIGKILL)
        other.wait()
    lock = RunLock(folder)
    assert lock.note is None and (folder / LOCK_FILE).read_text().startswith(f"process {os.getpid()} on ")
    lock.release()
    with holder(folder) as other:  # a released one, too
        other.kill()


def test_a_second_one_in_this_process_is_refused_and_reading_the_file_releases_nothing(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    (tmp_path / LOCK_FILE).read_text()
    with pytest.raises(ConfigError, match=rf"process {os.getpid()} on .* is training into"):
        RunLock(tmp_path)
    lock.release()
    RunLock(tmp_path).release()


def test_a_folder_that_cannot_be_made_names_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / LOCK_FILE).mkdir(parents=True)
    for name in ("file", "folder"):
        with pytest.raises(ConfigError, match=rf"train.checkpoint.output_dir: .*{name} cannot be written to"):
            RunLock(tmp_path / name)


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "flock", fails)
    assert "No locks available" in str(RunLock(tmp_path).note)
