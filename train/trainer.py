"""The trainer: builds everything in a fixed order, then takes steps until the end or until it is asked to stop."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np

from convert.trainer import STATE_FILE
from schemas.errors import ConfigError, IncompleteSourceError, StoppedError
from train.callbacks.base import Callback
from train.callbacks.standard import standard_callbacks
from train.checkpoint_layout import way_on
from train.config import OmniConfig
from train.data.loader import StepBatches
from train.model_build import ModelFiles, check_model_folder, towers_of
from train.models.spec import read_model
from train.optim.groups import LearningRate, learning_rates
from train.run_lock import RunLock
from train.signals import OutsideSteps
from train.state import TrainerState, finished_note
from train.step import StepResult, train_step
from train.trainer_build import TrainerParts


class BaseTrainer(TrainerParts):
    """Trains what a configuration describes; see `TrainerParts` for how it is built and what it owns."""

    def __init__(self, config: OmniConfig, *, callbacks: Sequence[Callback] = ()) -> None:
        super().__init__(config)
        self.callbacks: list[Callback] = []
        self.should_stop = False
        self.run_lock: RunLock | None = None
        self._own_callbacks = list(callbacks)

    def add_callback(self, callback: Callback) -> None:
        """Runs after those of the configuration and those added before."""
        (self.callbacks if self.built else self._own_callbacks).append(callback)

    def build(self) -> None:
        """Everything that training needs, once; then goes to where a checkpoint was saved."""
        if self.built:
            return
        try:
            super().build()
            self.build_callbacks()
            self.restore()
        except BaseException:
            self._unlock()
            raise

    def build_checkpointer(self) -> None:
        """In a folder that no other run writes to."""
        folder = Path(self.args.train.checkpoint.output_dir)
        if "://" not in str(self.args.train.checkpoint.output_dir):
            note = self.ranks.on_first(lambda: self._lock(folder))
            if note is not None:
                self.say(note)
        super().build_checkpointer()

    def _lock(self, folder: Path) -> str | None:
        self.run_lock = RunLock(folder)
        return self.run_lock.note

    def _unlock(self) -> None:
        """Another run may go on in the folder, of this process, too."""
        if self.run_lock is not None:
            self.run_lock.release()

    def build_callbacks(self) -> None:
        """Those of the configuration, then the user's own."""
        self.callbacks = [*standard_callbacks(self), *self._own_callbacks]

    def restore(self) -> None:
        """Goes to where the checkpoint was saved."""
        if self.resume_from is None:
            return
        try:
            saved = self.checkpointer.load(self.resume_from, self.model, self.optimizer)
        except IncompleteSourceError as error:
            raise IncompleteSourceError(f"{error}; {way_on(self.resume_from)}") from error
        self.checkpointer.mend()
        try:
            self.state = TrainerState.from_json(saved["trainer"])
            self.train_dataloader.load_state_dict(saved["data"])
            change = self.lr_scheduler.change_since(saved["scheduler"])
            self.lr_scheduler.load_state_dict(saved["scheduler"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise IncompleteSourceError(
                f"{self.resume_from / STATE_FILE}: is not what a training wrote ({type(error).__name__}: {error}); "
                f"{way_on(self.resume_from)}"
            ) from error
        if change is not None:
            self.say(change)
        total = self.train_dataloader.total_steps()
        going_on = f"going on after step {self.state.step} from {self.resume_from}"
        self.say(finished_note(self.state.step, total, self.args.train) or going_on)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint notes beside tensors. JSON."""
        degrees = self.mesh.degrees
        return {
            "epoch": self.state.epoch,
            "tokens": self.state.tokens,
            "trainer": self.state.to_json(),
            "data": self.train_dataloader.state_dict(),
            "scheduler": self.lr_scheduler.state_dict(),
            "degrees": {name: getattr(degrees, name) for name in ("dp_replicate", "dp_shard", "ulysses", "ep")},
            "config": self.args.model_dump(mode="json"),
        }

    def save(self, *, final: bool = False) -> Path:
        """A checkpoint of the step that was taken last."""
        self.call("on_before_save")
        path = self.checkpointer.save(self.state.step, self.model, self.optimizer, self.state_dict(), final=final)
        self.call("on_save", path)
        return path

    def train(self) -> TrainerState:
        """To the end of the training. StoppedError after a signal to stop, when all is saved."""
        with OutsideSteps() as outside:
            try:
                self.build()
                self.call("on_train_begin")
                if self.resume_from is not None:
                    self.call("on_resume")
                self._steps()
                outside.said = f"after step {self.state.step}, the last, was saved; {self.start_again} for what is left"
                self.call("on_train_end")
            except BaseException as error:
                self._tell(error)
                raise
            finally:
                self._unlock()
        return self.state

    @property
    def start_again(self) -> str:
        """What makes the same line go on from the newest checkpoint, for the end of a message."""
        auto = self.args.train.checkpoint.load_path == "auto"
        return "start again" if auto else "start again with train.checkpoint.load_path=auto"

    def _steps(self) -> None:
        steps = cast(Generator[StepBatches, None, None], iter(self.train_dataloader))
        with closing(steps):
            for batches in steps:
                self._step(batches)
                if self.should_stop:
                    self.save(final=True)
                    raise StoppedError(f"stopped and saved after step {self.state.step}; {self.start_again} to go on")

    def evaluate(self) -> dict[str, float]:
        """The losses on the sources of `evaluation`; a collective call. The checkpoint of this step, if there is one,
        and the callbacks hear of them, too."""
        if self.evaluator is None:
            raise ConfigError("train.evaluation.sources: there are none to evaluate on")
        metrics = self.evaluator.run(self.model)
        self.state.evaluated(metrics["loss"])
        self.call("on_evaluate", metrics)
        # of the checkpoint that was saved before: last, so that a kill leaves nothing out that it says was done
        self.checkpointer.amend(self.state.step, {"trainer": self.state.to_json()})
        return metrics

    def _step(self, batches: StepBatches) -> None:
        rows = self.plans.epoch(batches.epoch).step_rows(batches.step)
        tokens = int(self.plans.planner.table.tokens[rows].astype(np.int64).sum())
        self.call("on_step_begin")
        result = self.take_step(batches)
        self.state.count(tokens, len(rows), epoch_ends=batches.last)
        self.call("on_step_end", result)
        if batches.last:
            self.call("on_epoch_end")

    def take_step(self, batches: StepBatches) -> StepResult:
        """One optimizer step."""
        return train_step(self.parts, batches.micro_batches, batches.wait_s)

    def call(self, hook: str, *arguments: Any) -> None:
        """A hook of all callbacks, in order."""
        for callback in self.callbacks:
            getattr(callback, hook)(self, *arguments)

    def _tell(self, error: BaseException) -> None:
        """Every callback hears of the error; what fails there is noted with it."""
        for callback in reversed(self.callbacks):
            try:
                callback.on_exception(self, error)
            except Exception as fault:  # noqa: BLE001  # must not hide why training ended
                error.add_note(f"{type(callback).__name__} failed, too: {type(fault).__name__}: {fault}")


class VLMTrainer(BaseTrainer):
    """For models with towers, which may have learning rates of their own."""

    def learning_rates(self) -> list[LearningRate]:
        return learning_rates(self.args.train, towers_of(self.model))


def make_trainer(config: OmniConfig, *, callbacks: Sequence[Callback] = ()) -> BaseTrainer:
    """The trainer for the model of a configuration. ConfigError: the model is not where it says."""
    check_model_folder(config.model)
    towers = config.model.backend == "native" and read_model(ModelFiles.of(config.model).config_file).spec.names.visual
    return (VLMTrainer if towers else BaseTrainer)(config, callbacks=callbacks)
