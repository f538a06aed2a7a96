"""Gradients that are no numbers end the training, and no checkpoint is made of what they left."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.errors import OmniloomError
from tests.train.tiny import omni_config, write_data
from train.callbacks.base import Callback
from train.trainer import BaseTrainer, make_trainer


class Poison(Callback):
    """From a step on the gradient of one parameter has one NaN."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_begin(self, trainer: BaseTrainer) -> None:
        parameter = next(p for p in trainer.model.parameters() if p.requires_grad)

        def spoil(gradient):  # type: ignore[no-untyped-def]
            if trainer.state.step + 1 >= self.step:
                gradient = gradient.clone()
                gradient.view(-1)[0] = float("nan")
            return gradient

        parameter.register_hook(spoil)


@pytest.mark.parametrize(("log_steps", "told_after"), [(1, 3), (10, 4)])
def test_the_last_checkpoint_is_from_before(tmp_path: Path, log_steps: int, told_after: int) -> None:
    sources = write_data(tmp_path / "data")
    config = omni_config(tmp_path / "out", sources, max_steps=5)
    values = config.model_dump()
    values["train"]["logging"] |= {"log_steps": log_steps}
    values["train"]["checkpoint"] |= {"save_steps": 2, "save_hf_weights": False, "save_async": False}
    trainer = make_trainer(type(config).model_validate(values), callbacks=[Poison(3)])
    with pytest.raises(OmniloomError, match="step 3: the norm of the gradients is nan") as error:
        trainer.train()
    assert trainer.state.step == told_after
    steps = sorted(path.name for path in trainer.checkpointer.output_dir.glob("step_*"))
    assert steps == ["step_2"]
    assert f"from the checkpoint before it, {trainer.checkpointer.output_dir / 'step_2'}, with" in str(error.value)


def test_without_a_checkpoint_none_is_promised(tmp_path: Path) -> None:
    config = omni_config(tmp_path / "out", write_data(tmp_path / "data"), max_steps=2)
    with pytest.raises(OmniloomError, match=r"step 1: .* There is no checkpoint before it in .*/output: begin anew"):
        make_trainer(config, callbacks=[Poison(1)]).train()


def test_an_adapter_that_is_no_numbers_is_not_exported(tmp_path: Path) -> None:
    """It is exported as it is, without a checkpoint."""
    config = omni_config(tmp_path, write_data(tmp_path / "data"), max_steps=6)
    values = config.model_dump()
    values["model"]["lora_config"] = {"r": 2, "target_modules": ["q_proj"]}
    values["train"]["logging"] |= {"log_steps": 10}
    values["train"]["checkpoint"] |= {"hf_save_steps": 2}
    trainer = make_trainer(type(config).model_validate(values), callbacks=[Poison(3)])
    with pytest.raises(OmniloomError, match="step 3: the norm of the gradients is nan"):
        trainer.train()
    assert trainer.state.step == 4
    assert [path.name for path in (tmp_path / "output" / "hf").iterdir()] == ["step_2"]
