"""What comes to a checkpoint after it was saved, such as the result of an evaluation."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.train.tiny_training import Training, checkpointer
from train.checkpoint_io import StepWriter


def state_of(folder: Path, step: int) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / f"step_{step}" / "state.json").read_text())
    return state


@pytest.mark.parametrize("when", ["while it is written", "when it is complete", "when it was waited for", "later"])
def test_what_comes_after_a_save_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """To the checkpoint of its step alone, and to the caller's keys; the rest stays as it is."""
    go_on, write = threading.Event(), StepWriter.write_data

    def slow(writer: StepWriter, *arguments: Any) -> Any:
        assert go_on.wait(20)
        return write(writer, *arguments)

    monkeypatch.setattr(StepWriter, "write_data", slow)
    keeper, course = checkpointer(tmp_path, save_async=True), Training.start(1)
    course.step()
    course.save(keeper, 1)
    if when != "while it is written":
        go_on.set()
        assert keeper._running is not None and keeper._running.thread is not None
        keeper._running.thread.join(20)
    if when in ("when it was waited for", "later"):
        keeper.wait()
    if when == "later":
        keeper = checkpointer(tmp_path)
        course.load(keeper, tmp_path / "step_1")
    for value in (1, 2):
        keeper.amend(1, {"scheduler": value})
    keeper.amend(7, {"scheduler": 3})
    go_on.set()
    keeper.wait()
    found = state_of(tmp_path, 1)
    assert found.pop("scheduler") == 2 and sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "step_1"]
    plain = checkpointer(tmp_path / "plain")
    course.save(plain, 1, final=True)
    wanted = state_of(tmp_path / "plain", 1)
    wanted.pop("scheduler")
    assert found == wanted
    course.save(keeper, 2, final=True)
    assert state_of(tmp_path, 2)["scheduler"]["last_epoch"] == 1
    keeper.amend(1, {"scheduler": 4})  # not the newest: another course may have it
    assert state_of(tmp_path, 1)["scheduler"] == 2


def test_what_cannot_be_added_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when the process ends in the middle."""
    keeper, course = checkpointer(tmp_path), Training.start(1)
    course.save(keeper, 1, final=True)
    before = state_of(tmp_path, 1)

    def half(path: Path, content: bytes) -> None:
        path.with_name(f"{path.name}.tmp").write_bytes(content[:20])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("train.checkpoint_io.write_atomic", half)
    keeper.amend(1, {"scheduler": 2})
    assert "step_1: what came after the save could not be added" in caplog.text and "No space left" in caplog.text
    assert state_of(tmp_path, 1) == before
    assert course.load(checkpointer(tmp_path), tmp_path / "step_1")["step"] == 1
    checkpointer(tmp_path, rank=1).amend(1, {"scheduler": 2})  # rank 0 does it
    assert state_of(tmp_path, 1) == before
