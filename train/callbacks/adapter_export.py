"""Exports the adapters of a LoRA training as PEFT has them: every `checkpoint.hf_save_steps`, and at the end if
`checkpoint.save_hf_weights`. They are small: they are gathered and written at once, to output_dir/hf/step_N."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from schemas.errors import OmniloomError
from train.callbacks.base import Callback
from train.export import HF_FOLDER, free_name
from train.lora.write import AdapterWriter, difference, trained_tensors, write_adapter

if TYPE_CHECKING:
    from train.step import StepResult
    from train.trainer import BaseTrainer

PER_EXPERT = "per_expert"  # folder beside the steps, for engines that want a pair for each projection of each expert

log = logging.getLogger("omniloom.train")


class AdapterExportCallback(Callback):
    """Every rank has one; rank 0 writes. per_expert: also under the names that engines have for single experts."""

    def __init__(self, output_dir: Path, *, rank: int, per_expert: bool = False) -> None:
        self.folder, self.rank, self.per_expert = output_dir / HF_FOLDER, rank, per_expert
        self._last: int | None = None
        self._faults: list[OmniloomError] = []

    def on_resume(self, trainer: BaseTrainer) -> None:
        """A kill may have come between the save of this step and its export; a step of another run is not exported."""
        if trainer.resume_from is not None and trainer.resume_from.absolute().parent == self.folder.absolute().parent:
            self._export_if_due(trainer)

    def on_step_end(self, trainer: BaseTrainer, result: StepResult) -> None:
        self._export_if_due(trainer)

    def on_train_end(self, trainer: BaseTrainer) -> None:
        if trainer.args.train.checkpoint.save_hf_weights and self._last != trainer.state.step:
            self.export(trainer)
        if self._faults:
            raise self._faults[0]

    def _export_if_due(self, trainer: BaseTrainer) -> None:
        every = trainer.args.train.checkpoint.hf_save_steps
        if every and trainer.state.step % every == 0:
            self.export(trainer)

    def export(self, trainer: BaseTrainer) -> None:
        """Of the step that was taken last, unless it is there; a collective call. What cannot be written is told at the
        end of training."""
        trainer.call("on_before_save")
        self._last = trainer.state.step
        trained = trained_tensors(trainer.model, keep=self.rank == 0)
        if self.rank != 0:
            return
        assert trainer.lora is not None, "adapters are exported of a training that has them"
        base = trainer.files.weights or trainer.files.config
        writer = AdapterWriter(trainer.model, str(base), trainer.lora.config.lora_dropout)
        name = f"step_{trainer.state.step}"
        try:
            _write(self.folder / name, writer.tensors(trained), writer.settings())
            if self.per_expert:
                _write(self.folder / PER_EXPERT / name, *writer.per_expert(trained))
        except OmniloomError as error:
            log.warning("%s", error)
            self._faults.append(error)


def _write(folder: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
    """Moves aside what has the name and is something else, which a user may have edited."""
    there = folder.is_dir() and any(folder.iterdir())
    reason = difference(folder, tensors, settings) if there else None
    if there and reason is None:
        log.info("%s: the adapter is exported already", folder)
        return
    if reason is not None:
        aside = free_name(folder)
        try:
            folder.rename(aside)
        except OSError as error:
            raise OmniloomError(f"{folder}: {reason}, and cannot be moved aside: {error}") from error
        log.warning("%s: %s; it is called %s now, and the adapter is exported anew", folder, reason, aside.name)
    write_adapter(folder, tensors, settings)
    log.info("%s: the adapter is exported", folder)
