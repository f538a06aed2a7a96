"""Saves that are killed at every point, each in a forked process of its own; `python -m tests.train.checkpoint_kill
FOLDER` prints as JSON what each left and how training went on."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.train.tiny_training import Training, checkpointer
from train import checkpoint_io, checkpoint_layout

POINTS = ("write", "metadata", "complete", "rename", "latest", "tidy")
CASES = [*(("sync", point) for point in POINTS), ("async", "write"), ("async", "rename")]


def kill(*arguments: Any, **keys: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: str) -> None:
    """Kills this process at a point of the next save."""
    write_atomic = checkpoint_layout.write_atomic

    def killing(path: Path, content: bytes) -> None:
        if point == "latest" and path.name == "LATEST":
            kill()
        if path.name == "COMPLETE" and point == "complete":
            kill()
        write_atomic(path, content)
        if path.name == "COMPLETE" and point == "rename":
            kill()

    def half(writer: checkpoint_io.StepWriter, *arguments: Any) -> None:
        Path(writer.checkpoint_id, "__0_0.distcp").write_bytes(b"half")
        kill()

    if point == "write":
        checkpoint_io.StepWriter.write_data = half  # type: ignore[method-assign,assignment]
    elif point == "metadata":
        checkpoint_io.StepWriter.finish = kill  # type: ignore[method-assign]
    elif point == "tidy":
        checkpoint_layout.shutil.rmtree = kill  # type: ignore[attr-defined]
    else:
        checkpoint_layout.write_atomic = killing


def first_run(folder: Path, save_async: bool, point: str) -> None:
    """Step 1 is saved, step 2 is killed while it is saved; in the background training goes on meanwhile."""
    keeper = checkpointer(folder, save_async=save_async, keep_last=1)
    course = Training.start(1)
    course.step()
    course.save(keeper, 1)
    keeper.wait()
    course.step()
    arm(point)
    course.save(keeper, 2)
    course.steps(2)
    keeper.wait()


def second_run(folder: Path) -> dict[str, Any]:
    """Goes on from what is there, to step 4."""
    left = sorted(path.name.partition("-")[0] for path in folder.iterdir())
    keeper = checkpointer(folder, keep_last=1)
    found = keeper.find()
    assert found is not None
    course = Training.start(1, seed=9)
    step = course.load(keeper, found)["step"]
    losses = course.steps(4 - step)
    course.save(keeper, 4, final=True)
    return {"left": left, "from": step, "loss": losses[-1], "at_end": sorted(path.name for path in folder.iterdir())}


def in_fork(action: Callable[[], Any], result: Path) -> int:
    """The status of a child that writes what an action returns."""
    child = os.fork()
    if child == 0:
        try:
            result.write_text(json.dumps(action()))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    undisturbed = folder / "undisturbed.json"
    in_fork(lambda: Training.start(1).steps(4)[-1], undisturbed)
    for mode, point in CASES:
        name = f"{mode}-{point}"
        place, result = folder / name, folder / f"{name}.json"
        status = in_fork(partial(first_run, place, mode == "async", point), folder / "first.json")
        in_fork(partial(second_run, place), result)
        results[name] = {"signal": os.WTERMSIG(status), **json.loads(result.read_text())}
    print(json.dumps({"loss": json.loads(undisturbed.read_text()), "killed": results}))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
