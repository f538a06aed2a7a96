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
from pathlib import Path

import numpy as np

from train.data.plan import EpochPlan, Planner

_ARRAYS = ("rows", "bounds", "cost")
_KEPT_EPOCHS = 8  # on disk
_RECENT = 2  # in memory: the one that is trained and the one that is read ahead

log = logging.getLogger("omniloom.train")


class PlanStore:
    """The plans of one planner. folder: None keeps them in memory only; advance: told (windows done, windows) while a
    plan is made."""

    def __init__(
        self, planner: Planner, folder: Path | None, advance: Callable[[int, int], None] | None = None
    ) -> None:
        self.planner, self._advance = planner, advance
        self.digest = planner.digest()
        self._folder = None if folder is None else folder / "plans" / self.digest
        self._steps: dict[int, int] = {}
        self._recent: dict[int, EpochPlan] = {}
        self._lock = threading.Lock()

    def epoch(self, epoch: int) -> EpochPlan:
        """The plan of an epoch; made when nobody made it yet. Safe for threads."""
        with self._lock:
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
        if self._folder is not None:
            try:
                return int(json.loads((self._folder / f"{epoch:06d}.json").read_text())["steps"])
            except (FileNotFoundError, ValueError, KeyError):
                pass  # not known yet
        return self.epoch(epoch).steps

    def _find_or_make(self, epoch: int) -> EpochPlan:
        if self._folder is None:
            return self.planner.epoch(epoch, self._advance)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._only_one(self._folder / ".lock"):
                found = self._read(self._folder / f"{epoch:06d}", epoch)
                if found is not None:
                    return found
                plan = self.planner.epoch(epoch, self._advance)
                self._write(self._folder / f"{epoch:06d}", plan)
                return self._read(self._folder / f"{epoch:06d}", epoch) or plan
        except OSError as error:
            log.warning("the plan of epoch %d is not kept (%s: %s)", epoch, self._folder, error.strerror)
            return self.planner.epoch(epoch, self._advance)

    @contextmanager
    def _only_one(self, path: Path) -> Iterator[None]:
        with open(path, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # freed with the file, however this process ends
            yield

    def _read(self, folder: Path, epoch: int) -> EpochPlan | None:
        if not folder.is_dir():
            return None
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS}
        return EpochPlan(epoch, self.planner.lanes.count, self.planner.budget.global_batch_size, **arrays)

    def _write(self, folder: Path, plan: EpochPlan) -> None:
        beside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
        beside.mkdir()
        try:
            for name in _ARRAYS:
                np.save(beside / f"{name}.npy", getattr(plan, name), allow_pickle=False)
            (folder.parent / f"{folder.name}.json").write_text(json.dumps({"steps": plan.steps}))
            os.rename(beside, folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        older = sorted(p for p in folder.parent.iterdir() if p.is_dir() and p.name.isdigit())
        for old in older[:-_KEPT_EPOCHS]:
            shutil.rmtree(old, ignore_errors=True)  # others that have it mapped keep it
