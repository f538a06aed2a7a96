"""Plans of epochs, kept below the cache folder: made by one process of a node, mapped into memory by the others."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from train.data.durable import sync_file, write_durably
from train.data.plan import EpochPlan, Planner

_ARRAYS = ("rows", "bounds", "cost")
_KEPT_EPOCHS = 8  # on disk: the epoch in training, those that follow, then those before
_RECENT = 2  # in memory: the one that is trained and the one that is read ahead

log = logging.getLogger("omniloom.train")


@dataclass(frozen=True)
class _Counted:
    """Steps of an epoch without its plan."""

    steps: int


class PlanStore:
    """The plans of one planner. folder: None keeps them in memory only; advance: told (windows done, windows) while a
    plan is made, until it is set to None.

    Numbers of steps are kept for all epochs, plans for those nearest to the epoch in training. Counting the steps of
    an epoch takes its plan once per node.
    """

    def __init__(
        self, planner: Planner, folder: Path | None, advance: Callable[[int, int], None] | None = None
    ) -> None:
        self.planner, self.advance = planner, advance
        self.digest = planner.digest()
        self._folder = None if folder is None else folder / "plans" / self.digest
        self._steps: dict[int, int] = {}
        self._recent: dict[int, EpochPlan] = {}
        self._trained = 0  # the epoch in training: the one asked for last
        self._lock = threading.Lock()

    def epoch(self, epoch: int) -> EpochPlan:
        """The plan of an epoch; made when nobody made it yet. Safe for threads."""
        with self._lock:
            self._trained = epoch
            if epoch not in self._recent:
                self._recent[epoch] = self._find_or_make(epoch)
                for old in sorted(self._recent, key=lambda other: abs(other - epoch))[_RECENT:]:
                    del self._recent[old]
            self._steps[epoch] = self._recent[epoch].steps
            return self._recent[epoch]

    def steps(self, epoch: int) -> int:
        """Steps of an epoch."""
        if epoch not in self._steps:
            self._steps[epoch] = self._known_steps(epoch)
        return self._steps[epoch]

    def total_steps(self, epochs: int) -> int:
        """Steps of the first `epochs` epochs."""
        return sum(self.steps(epoch) for epoch in range(epochs))

    def _known_steps(self, epoch: int) -> int:
        with self._lock:
            if epoch in self._recent:
                return self._recent[epoch].steps
            kept = self._counted(epoch)
            return self._made(epoch, lambda: self._counted(epoch)).steps if kept is None else kept.steps

    def _counted(self, epoch: int) -> _Counted | None:
        kept = self._kept_steps(epoch)
        return None if kept is None else _Counted(kept)

    def _kept_steps(self, epoch: int) -> int | None:
        if self._folder is None:
            return None
        try:
            return int(json.loads((self._folder / f"{epoch:06d}.json").read_text())["steps"])
        except (OSError, ValueError, KeyError, TypeError):
            return None  # not known yet, or cut off: it is counted

    def _find_or_make(self, epoch: int) -> EpochPlan:
        found = self._made(epoch, lambda: None)
        assert isinstance(found, EpochPlan)  # nothing else was offered
        return found

    def _made(self, epoch: int, otherwise: Callable[[], _Counted | None]) -> EpochPlan | _Counted:
        """The plan of an epoch, found or made; `otherwise` is asked first, once no other process is at work."""
        if self._folder is None:
            return self.planner.epoch(epoch, self.advance)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._only_one(self._folder / ".lock"):
                if (instead := otherwise()) is not None:
                    return instead
                found = self._read(self._folder / f"{epoch:06d}", epoch)
                if found is not None:
                    self._keep_steps(found)
                    return found
                plan = self.planner.epoch(epoch, self.advance)
                self._keep_steps(plan)
                if epoch not in self._nearest(epoch):
                    return plan
                self._write(self._folder / f"{epoch:06d}", plan)
                return self._read(self._folder / f"{epoch:06d}", epoch) or plan
        except OSError as error:
            log.warning("the plan of epoch %d is not kept (%s: %s)", epoch, self._folder, error.strerror)
            return self.planner.epoch(epoch, self.advance)

    def _keep_steps(self, plan: EpochPlan) -> None:
        assert self._folder is not None  # the caller looked
        if self._kept_steps(plan.epoch) != plan.steps:
            write_durably(self._folder / f"{plan.epoch:06d}.json", json.dumps({"steps": plan.steps}).encode())

    def _nearest(self, epoch: int) -> list[int]:
        """Of the epochs on disk and this one, those that are kept."""
        assert self._folder is not None  # the caller looked
        there = {int(path.name) for path in self._folder.iterdir() if path.is_dir() and path.name.isdigit()}
        return sorted({*there, epoch}, key=lambda e: (e < self._trained, abs(e - self._trained)))[:_KEPT_EPOCHS]

    @contextmanager
    def _only_one(self, path: Path) -> Iterator[None]:
        with open(path, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # freed with the file, however this process ends
            yield

    def _read(self, folder: Path, epoch: int) -> EpochPlan | None:
        """None when there is none; a damaged one is removed, and it is said."""
        if not folder.is_dir():
            return None
        try:
            arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS}
            if len(arrays["bounds"]) != len(arrays["cost"]) + 1 or int(arrays["bounds"][-1]) != len(arrays["rows"]):
                raise ValueError("its arrays do not belong together")
        except (OSError, ValueError, EOFError, IndexError) as error:
            log.warning("%s is damaged and is made again: %s", folder, error)
            shutil.rmtree(folder)
            return None
        return EpochPlan(epoch, self.planner.lanes.count, self.planner.budget.global_batch_size, **arrays)

    def _write(self, folder: Path, plan: EpochPlan) -> None:
        beside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
        beside.mkdir()
        try:
            for name in _ARRAYS:
                np.save(beside / f"{name}.npy", getattr(plan, name), allow_pickle=False)
                sync_file(beside / f"{name}.npy")
            os.rename(beside, folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        kept = {f"{epoch:06d}" for epoch in self._nearest(plan.epoch)}
        for old in folder.parent.iterdir():
            if old.is_dir() and old.name.isdigit() and old.name not in kept:
                shutil.rmtree(old, ignore_errors=True)  # others that have it mapped keep it
