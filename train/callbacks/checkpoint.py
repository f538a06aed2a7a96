"""Saves every `checkpoint.save_steps` steps, every `checkpoint.save_epochs` epochs, where an export is due, and at the
end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.callbacks.base import Callback

if TYPE_CHECKING:
    from train.step import StepResult
    from train.trainer import BaseTrainer


class CheckpointCallback(Callback):
    """`trainer.save` does it, also for epochs at the end of their last step, before what comes behind it can fail; a
    step that is saved twice is written once."""

    def __init__(self) -> None:
        self._epochs = 0  # complete before this step

    def on_train_begin(self, trainer: BaseTrainer) -> None:
        self._epochs = trainer.state.epoch

    def on_step_end(self, trainer: BaseTrainer, result: StepResult) -> None:
        config, state = trainer.args.train.checkpoint, trainer.state
        epoch_ended, self._epochs = state.epoch > self._epochs, state.epoch
        exported = config.hf_save_steps if trainer.lora is None else 0  # adapters are exported as they are
        due = any(every and state.step % every == 0 for every in (config.save_steps, exported))
        due = due or bool(epoch_ended and config.save_epochs and state.epoch % config.save_epochs == 0)
        if due and not trainer.should_stop:  # a stop saves by itself
            trainer.save()

    def on_train_end(self, trainer: BaseTrainer) -> None:
        trainer.save(final=True)

    def on_exception(self, trainer: BaseTrainer, error: BaseException) -> None:
        """What is being written when training fails is still brought to its end, as it is from before the failure; but
        not for a user who interrupts, who wants to get out."""
        if isinstance(error, KeyboardInterrupt):
            return
        try:
            trainer.checkpointer.wait()
        except Exception as fault:  # noqa: BLE001 (noted with the error that ends the training)
            error.add_note(f"the checkpoint that was being written failed, too: {fault}")
