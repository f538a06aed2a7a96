from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from train.data.worker_context import NOTE, SHARED, SemaphoreNote, sweep, worker_context

HOLD = """
import sys, time
sys.path.insert(0, ".")
from pathlib import Path
from train.data.worker_context import SemaphoreNote
folder = Path(sys.argv[1])
(folder / "sem.mine").write_text("x")
note = SemaphoreNote(folder)
note.add("sem.mine")
print("held", flush=True)
time.sleep(600)
"""


def test_what_a_killed_run_left_is_removed_and_nothing_of_a_live_one(tmp_path: Path) -> None:
    (tmp_path / "sem.other").write_text("of somebody without a note")
    run = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert run.stdout is not None and run.stdout.readline() == b"held\n"
        sweep(tmp_path)
        assert (tmp_path / "sem.mine").exists() and len(list(tmp_path.glob(f"{NOTE}*"))) == 1
        run.send_signal(signal.SIGKILL)
        run.wait()
        sweep(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["sem.other"]
    finally:
        run.kill()
        run.wait()


def test_a_name_that_is_another_file_by_now_stays(tmp_path: Path) -> None:
    (tmp_path / "sem.a").write_text("x")
    note = SemaphoreNote(tmp_path)
    note.add("sem.a")
    (found,) = tmp_path.glob(f"{NOTE}*")
    dead = tmp_path / f"{NOTE}dead"
    dead.write_text(found.read_text())
    (tmp_path / "sem.b").write_text("y")
    os.replace(tmp_path / "sem.b", tmp_path / "sem.a")
    sweep(tmp_path)
    assert (tmp_path / "sem.a").read_text() == "y" and found.exists() and not dead.exists()
    del note
    assert not found.exists()


@pytest.mark.skipif(not os.access(SHARED, os.W_OK), reason="no /dev/shm")
def test_queues_and_events_are_noted_and_gone_in_the_end() -> None:
    context = worker_context("spawn")
    made = [context.Queue(), context.Event(), context.Lock()]
    (note,) = SHARED.glob(f"{NOTE}{os.getpid()}.*")
    names = [line.split()[0] for line in note.read_text().splitlines()]
    assert len(names) >= 6 and all((SHARED / name).exists() for name in names)
    del context, made
    assert not note.exists()
