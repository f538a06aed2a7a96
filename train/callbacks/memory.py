"""When memory runs out: what held it, as a file that pytorch.org/memory_viz shows."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from train.callbacks.base import Callback

if TYPE_CHECKING:
    from train.trainer import BaseTrainer

MAX_ENTRIES = 200_000  # allocations and frees that are remembered, the newest

log = logging.getLogger("omniloom.train")


class MemoryCallback(Callback):
    """Of every rank with a GPU; elsewhere there is nothing to record.

    Writes memory/rank_R.pickle and memory/rank_R.txt, a table of the allocator, when the device's memory is exhausted.
    """

    def __init__(self, output_dir: Path, device: torch.device, *, rank: int = 0, enable: bool = True) -> None:
        self.folder, self.device, self.rank = output_dir / "memory", device, rank
        self.enable = enable and device.type == "cuda"

    def on_train_begin(self, trainer: BaseTrainer) -> None:
        if self.enable:
            # not where memory is freed: looking for the stack there clears an error that is on its way through C++ in
            # torch 2.11, such as the one by which gradient checkpointing ends the second run of a block
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=MAX_ENTRIES)

    def on_train_end(self, trainer: BaseTrainer) -> None:
        self._forget()

    def on_exception(self, trainer: BaseTrainer, error: BaseException) -> None:
        if not self.enable:
            return
        if is_out_of_memory(error):
            self.folder.mkdir(parents=True, exist_ok=True)
            snapshot = self.folder / f"rank_{self.rank}.pickle"
            (self.folder / f"rank_{self.rank}.txt").write_text(torch.cuda.memory_summary(self.device))
            torch.cuda.memory._dump_snapshot(str(snapshot))
            error.add_note(f"what held the memory: {snapshot} (open it in pytorch.org/memory_viz)")
        self._forget()

    def _forget(self) -> None:
        if self.enable:
            torch.cuda.memory._record_memory_history(enabled=None)


def is_out_of_memory(error: BaseException | None) -> bool:
    """True when an error, or one that it came from, is the device's memory running out."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False
