"""How the demo runs its trainings: what they say is told as it comes, and all of it when they fail."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from jobs import demo_train
from schemas.errors import OmniloomError

# a training that ends when it is asked to, and waits for what it said to be seen before it says more
STANDS_IN = """
import signal, sys, time
from pathlib import Path

folder, code = Path(sys.argv[1]), int(sys.argv[2])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
print("step 1 of 12, loss 9.1", flush=True)
print("attention   sdpa\\n\\nlast words", file=sys.stderr, flush=True)
while not (folder / "seen").exists():
    time.sleep(0.01)
metrics = folder / "training/metrics.jsonl"
metrics.parent.mkdir()
metrics.write_text("".join('{"step": %d, "loss": 9.0}\\n' % n for n in range(1, 5)))
time.sleep(60)
"""


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> list[str]:
    """A list for what is told of a training that ends with this code."""
    command = [sys.executable, "-c", STANDS_IN, str(folder), str(code)]
    monkeypatch.setattr(demo_train, "_command", lambda out: command)
    return []


def test_lines_are_told_while_the_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = stand_in(tmp_path, monkeypatch, 5)

    def tell(line: str) -> None:
        told.append(line)
        if line == "last words":
            (tmp_path / "seen").touch()  # else it would never end

    began = time.monotonic()
    stopped = demo_train.train_and_stop(tmp_path, tell)
    assert time.monotonic() - began < 50
    assert set(told) == {"step 1 of 12, loss 9.1", "last words"}  # no table, no empty line
    assert stopped.losses == dict.fromkeys(range(1, 5), 9.0)


def test_all_that_it_said_is_told_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = stand_in(tmp_path, monkeypatch, 3)
    (tmp_path / "seen").touch()
    with pytest.raises(OmniloomError, match="ended with 3, not with 5 after SIGTERM") as failed:
        demo_train.train_and_stop(tmp_path, told.append)
    assert {"step 1 of 12, loss 9.1", "attention   sdpa", "last words"} <= set(str(failed.value).splitlines())
    monkeypatch.setattr(demo_train, "_command", lambda out: [sys.executable, "-c", "print('no'); raise SystemExit(7)"])
    with pytest.raises(OmniloomError, match="training ended with 7:\nno"):
        demo_train.train_on(tmp_path, told.append)


def test_conversions_are_told_before_they_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(demo_train, "_omniloom", lambda *arguments: order.append(arguments[1]))
    demo_train.convert_and_back(tmp_path, lambda line: order.append(" ".join(line.split()[:3])))
    names = ("dcp-to-hf", "omni-to-vl", "vl-to-omni")
    expected = [said for name in names for said in (f"omniloom convert {name}", name)]
    assert order == [*expected, "comparing all tensors"]
