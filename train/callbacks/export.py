"""Exports checkpoints every `checkpoint.hf_save_steps`, and the last one if `checkpoint.save_hf_weights`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from train.callbacks.base import Callback
from train.checkpoint_layout import saved_steps, step_folder
from train.export import Exporter, check_exportable

if TYPE_CHECKING:
    from train.step import StepResult
    from train.trainer import BaseTrainer


class ExportCallback(Callback):
    """Every rank has one; the exporter is rank 0's, None elsewhere."""

    def __init__(self, exporter: Exporter | None) -> None:
        self.exporter = exporter

    def on_train_begin(self, trainer: BaseTrainer) -> None:
        config = trainer.args.train.checkpoint
        if config.save_hf_weights or config.hf_save_steps:
            check_exportable(trainer.checkpointer.family)
        if self.exporter is not None and config.hf_save_steps:
            self._start_left(trainer, self.exporter)

    def on_step_end(self, trainer: BaseTrainer, result: StepResult) -> None:
        if self.exporter is not None:
            self._start_committed(trainer, self.exporter)
            self.exporter.poll()

    def on_train_end(self, trainer: BaseTrainer) -> None:
        """All ranks wait: a launcher gives those that are left behind some minutes only."""
        trainer.ranks.on_first(partial(self._export_last, trainer))

    def _export_last(self, trainer: BaseTrainer) -> None:
        assert self.exporter is not None, "rank 0 has the exporter"
        self._start_committed(trainer, self.exporter)
        if trainer.args.train.checkpoint.save_hf_weights:
            last = step_folder(trainer.checkpointer.output_dir, trainer.state.step)
            self.exporter.start(last)
        self.exporter.wait()

    def on_exception(self, trainer: BaseTrainer, error: BaseException) -> None:
        if self.exporter is not None:
            self.exporter.stop()

    def _start_left(self, trainer: BaseTrainer, exporter: Exporter) -> None:
        """Checkpoints whose export a stop or a kill came before; the exporter knows those that were exported."""
        for saved in saved_steps(trainer.checkpointer.output_dir):
            due = saved.step % trainer.args.train.checkpoint.hf_save_steps == 0
            if due and saved.step <= trainer.state.step:
                exporter.start(saved.path)

    def _start_committed(self, trainer: BaseTrainer, exporter: Exporter) -> None:
        """A checkpoint is exported when it is complete, which for one in the background is some steps later."""
        every = trainer.args.train.checkpoint.hf_save_steps
        for path in trainer.checkpointer.take_committed():
            if every and int(path.name.removeprefix("step_")) % every == 0:
                exporter.start(path)
