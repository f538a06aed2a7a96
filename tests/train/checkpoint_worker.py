"""What one of two ranks does in the checks that need two, all in one process group."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from schemas.errors import OmniloomError
from tests.train.metric_steps import of_two_ranks
from tests.train.tiny_training import Training, checkpointer, equal
from train import checkpoint
from train.stopping import Stopper

WORLD = 2


@dataclass(frozen=True)
class Ranks:
    """What two ranks came to, by rank. one, rates: tensors and learning rates of the process that saved folder/one."""

    folder: Path
    results: list[dict[str, Any]]
    one: dict[str, Tensor]
    rates: list[Any]


def resumed(folder: Path, rank: int) -> dict[str, Any]:
    """Two ranks, stopped and gone on, saved in the background and in the foreground."""
    found = {}
    for name, save_async in (("async", True), ("sync", False)):
        keeper = checkpointer(folder / name, rank, WORLD, save_async=save_async)
        course = Training.start(WORLD)
        course.steps(3)
        course.save(keeper, 3)
        losses, rates, whole = course.steps(3), course.rates(), course.whole()
        keeper.wait()
        again = Training.start(WORLD, seed=5)
        again.load(keeper, keeper.find() or Path())
        found[name] = {
            "losses": again.steps(3) == losses,
            "rates": again.rates() == rates,
            "whole": equal(again.whole(), whole),
            "committed": [path.name for path in keeper.take_committed()],
        }
        if rank == 0:
            save_file({name: it.contiguous() for name, it in whole.items()}, folder / f"{name}.safetensors")
    return found


def elastic(folder: Path, rank: int) -> dict[str, Any]:
    """What one process saved; the tensors that two hold after it, and after three more steps."""
    keeper = checkpointer(folder / "one", rank, WORLD)
    course = Training.start(WORLD, seed=7)
    course.load(keeper, keeper.find() or Path())
    whole = course.whole()
    if rank == 0:
        save_file(whole, folder / "two_of_one.safetensors")
    return {"rates": course.rates()}


def replicated(folder: Path, rank: int) -> None:
    """Three steps of whole copies, saved from inside DistributedDataParallel, and loaded into it."""
    keeper = checkpointer(folder / "ddp", rank, WORLD)
    course = Training.start(1)
    course.model = DistributedDataParallel(course.model, find_unused_parameters=True)
    course.steps(3)
    course.save(keeper, 3, final=True)
    again = Training.start(1, seed=2)
    again.model = DistributedDataParallel(again.model, find_unused_parameters=True)
    again.load(keeper, folder / "ddp" / "step_3")
    assert equal(again.whole(), course.whole())


def failures(folder: Path, rank: int) -> dict[str, Any]:
    """Every rank hears of what one of them meets."""
    course = Training.start(WORLD)
    course.steps(1)
    keeper = checkpointer(folder / "failing", rank, WORLD, save_async=False)
    found = {
        "foreign": told(
            lambda: checkpointer(folder / "one", rank, WORLD, family="other").load(
                folder / "one" / "step_3", course.model, course.optimizer
            )
        )
    }
    if rank == 1:  # its random state cannot be written
        checkpoint.write_rng = full_disk
    found["one_rank"] = told(lambda: course.save(keeper, 1))
    dist.barrier()
    found["left"] = sorted(path.name for path in (folder / "failing").iterdir())
    dist.barrier()
    checkpoint.write_rng = real_write_rng
    course.save(keeper, 1)
    found["after"] = [path.name for path in keeper.take_committed()]
    return found


real_write_rng = checkpoint.write_rng


def full_disk(path: Path, content: bytes) -> None:
    raise OSError(28, "No space left on device", str(path))


def told(action: Callable[[], Any]) -> list[Any]:
    """[exit code, message] of an error."""
    try:
        action()
    except OmniloomError as error:
        return [error.exit_code, str(error)]
    return []


def stopping(rank: int) -> dict[str, Any]:
    """Rank 1 gets a signal during its second step; the step at which each rank stops."""
    with Stopper(WORLD) as stopper:
        for step in range(5):
            stopper.begin_step()
            if rank == 1 and step == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            if stopper.should_stop():
                return {"step": step, "reason": stopper.reason}
    return {"step": None}


def two_ranks(folder: Path) -> dict[str, Any]:
    """All checks in one process group. folder/one: a checkpoint of a single process."""
    rank = dist.get_rank()
    replicated(folder, rank)
    return {
        "resumed": resumed(folder, rank),
        "elastic": elastic(folder, rank),
        "failures": failures(folder, rank),
        "stopping": stopping(rank),
        "metrics": of_two_ranks(),
    }
