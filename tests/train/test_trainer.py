"""The trainer as a whole, with a tiny Qwen3-Omni on clips with sound and text."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from schemas.errors import ConfigError, IncompleteSourceError, OmniloomError, ResumableError, StoppedError
from tests import dist as processes
from tests.train.tiny import omni_config, write_data
from train import evaluation
from train.callbacks.base import Callback
from train.config import OmniConfig
from train.data.prepare import open_data
from train.mesh import Degrees, Mesh
from train.step import StepResult
from train.trainer import BaseTrainer, VLMTrainer, make_trainer
from train.validate import validate_config

STEPS = 6
STOP_AFTER = 3


class Watch(Callback):
    """Keeps what the steps came to, and may stop or fail."""

    def __init__(self, stop_after: int = 0, fail_after: int = 0) -> None:
        self.stop_after, self.fail_after = stop_after, fail_after
        self.losses: list[float] = []
        self.rates: list[dict[str, float]] = []
        self.calls: list[str] = []
        self.evaluated: list[dict[str, float]] = []

    def on_train_begin(self, trainer: BaseTrainer) -> None:
        self.calls.append(f"begin {trainer.state.step}")

    def on_step_end(self, trainer: BaseTrainer, result: StepResult) -> None:
        total = result.loss_sum.clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        self.losses.append(float(total / result.step_tokens))
        self.rates.append(result.lr)
        trainer.should_stop = trainer.state.step == self.stop_after
        if trainer.state.step == self.fail_after:
            raise RuntimeError("a step failed")

    def on_epoch_end(self, trainer: BaseTrainer) -> None:
        self.calls.append(f"epoch {trainer.state.epoch}")

    def on_evaluate(self, trainer: BaseTrainer, metrics: dict[str, float]) -> None:
        self.evaluated.append(metrics)

    def on_save(self, trainer: BaseTrainer, path: Path) -> None:
        self.calls.append(f"save {path.name}")

    def on_exception(self, trainer: BaseTrainer, error: BaseException) -> None:
        self.calls.append(type(error).__name__)

    def on_train_end(self, trainer: BaseTrainer) -> None:
        self.calls.append("end")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return write_data(tmp_path_factory.mktemp("data"))


def test_an_interrupted_training_goes_on_bit_by_bit(tmp_path: Path, sources: list[dict[str, Any]]) -> None:
    keys: dict[str, Any] = {"max_steps": STEPS, "optimizer": {"lr": 1e-3, "lr_warmup_steps": 2, "weight_decay": 0.1}}
    whole = Watch()
    state = make_trainer(omni_config(tmp_path / "whole", sources, **keys), callbacks=[whole]).train()
    assert len(whole.losses) == STEPS and whole.losses[-1] < whole.losses[0] - 0.2
    assert (state.step, state.samples) == (STEPS, 24 * STEPS // state_steps(state))
    first, second = Watch(stop_after=STOP_AFTER), Watch()
    config = omni_config(tmp_path / "parts", sources, **keys)
    with pytest.raises(ResumableError, match=f"after step {STOP_AFTER}"):
        make_trainer(config, callbacks=[first]).train()
    assert first.calls[-2:] == [f"save step_{STOP_AFTER}", "StoppedError"]
    again = make_trainer(config, callbacks=[second])
    end = again.train()
    assert first.losses + second.losses == whole.losses
    assert first.rates + second.rates == whole.rates
    assert second.calls[0] == f"begin {STOP_AFTER}" and second.calls[-1] == "end"
    assert end.to_json() == state.to_json()


def state_steps(state: Any) -> int:
    """Steps of an epoch, all epochs being alike."""
    return STEPS // state.epoch


def test_a_failing_step_is_told_to_all_callbacks(tmp_path: Path, sources: list[dict[str, Any]]) -> None:
    watches = [Watch(fail_after=1), Watch()]
    trainer = BaseTrainer(omni_config(tmp_path, sources), callbacks=watches[:1])
    trainer.add_callback(watches[1])
    with pytest.raises(RuntimeError, match="a step failed"):
        trainer.train()
    assert [watch.calls[-1] for watch in watches] == ["RuntimeError", "RuntimeError"]
    assert watches[1].losses == []  # hooks run in order


def test_rates_of_modules_and_evaluation(tmp_path: Path, sources: list[dict[str, Any]]) -> None:
    watch = Watch()
    config = omni_config(
        tmp_path,
        sources,
        max_steps=3,
        deterministic=True,
        vit_lr=1e-4,
        audio_lr=2e-4,
        module_lr={"lm_head": 5e-4, "model.layers.0.*": 7e-4},
        freeze_modules=["model.layers.1"],
        freeze_audio_tower=False,
        optimizer={
            "lr": 1e-3,
            "lr_decay_style": "cosine",
            "lr_min": 1e-4,
            "weight_decay": 0.1,
            "no_decay_params": ["bias"],
        },
        evaluation={"sources": sources, "steps": 2, "max_batches": 3},
    )
    trainer = make_trainer(config, callbacks=[watch])
    assert isinstance(trainer, VLMTrainer)
    trainer.build()
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    for rates in watch.rates:  # always in proportion
        main = rates["default"]
        for name, share in (("vit", 0.1), ("audio", 0.2), ("lm_head", 0.5), ("model.layers.0.*", 0.7)):
            assert rates[name] == pytest.approx(main * share, rel=1e-12)
            assert rates.get(f"{name}, no decay", rates[name]) == rates[name]
    assert [round(rates["default"] * 1e3, 4) for rates in watch.rates] == [1.0, 0.775, 0.325]
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert not any(name.startswith("model.layers.1.") for name in moved)
    assert {"visual.merger.mlp.0.weight", "audio_tower.proj1.weight", "lm_head.weight"} <= moved
    assert len(watch.evaluated) == 2  # at step 2 and at the end
    for metrics in watch.evaluated:
        assert metrics.keys() == {"loss", "loss/clips", "loss/text"}
        assert min(metrics.values()) < metrics["loss"] < max(metrics.values())
    assert trainer.state.best_loss == min(metrics["loss"] for metrics in watch.evaluated)


def _differs(config: OmniConfig) -> str:
    trainer = make_trainer(config)
    trainer._setup_group = dist.group.WORLD
    trainer.mesh = Mesh(Degrees(dp_shard=2), dist.get_rank(), torch.device("cpu"))
    trainer._agree_on("the same", "never differ")
    with pytest.raises(ConfigError) as found:
        trainer._agree_on(str(dist.get_rank()), "chose other operations")
    return str(found.value)


def test_ranks_that_differ_are_told(tmp_path: Path, sources: list[dict[str, Any]]) -> None:
    for said in processes.run(2, _differs, omni_config(tmp_path, sources)):
        assert said.startswith("ranks 0 and 1 chose other operations; give all nodes the same packages")


def test_a_damaged_checkpoint_names_the_one_before_it(tmp_path: Path, sources: list[dict[str, Any]]) -> None:
    output = tmp_path / "output"
    checkpoint = {"output_dir": str(output), "save_steps": 1, "save_hf_weights": False, "keep_last": 2}
    config = omni_config(tmp_path, sources, max_steps=2, checkpoint=checkpoint)
    make_trainer(config).train()
    shard = next((output / "step_2").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-9])
    more = omni_config(tmp_path, sources, max_steps=3, checkpoint=checkpoint)
    with pytest.raises(IncompleteSourceError, match="is truncated") as found:
        make_trainer(more).train()
    assert str(found.value).endswith(
        f"; go on from another, train.checkpoint.load_path={output}/step_1, or move step_2 away"
    )
    (output / "step_1").rename(tmp_path / "elsewhere")
    with pytest.raises(IncompleteSourceError, match="no other checkpoint lies beside it"):
        make_trainer(more).train()
    (tmp_path / "elsewhere").rename(output / "step_1")
    (output / "step_2").rename(tmp_path / "damaged")
    watch = Watch()
    make_trainer(more, callbacks=[watch]).train()
    assert len(watch.losses) == 2


def test_a_training_that_has_ended_says_so_and_is_not_evaluated_again(
    tmp_path: Path, sources: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    keys: dict[str, Any] = {"max_steps": 2, "evaluation": {"sources": sources[1:], "max_batches": 1}}
    first, again = Watch(), Watch()
    make_trainer(omni_config(tmp_path, sources, **keys), callbacks=[first]).train()
    lines = (tmp_path / "output/metrics.jsonl").read_text().splitlines()
    assert len(first.evaluated) == 1  # at the end, although evaluation.steps is 0
    with caplog.at_level(logging.INFO, "omniloom.train"):
        make_trainer(omni_config(tmp_path, sources, **keys), callbacks=[again]).train()
    assert "nothing is left to train: step 2 is done and train.max_steps is 2; raise train.max_steps" in caplog.text
    assert "going on after" not in caplog.text
    assert again.losses == [] and again.evaluated == []
    assert (tmp_path / "output/metrics.jsonl").read_text().splitlines() == lines
    found = validate_config(omni_config(tmp_path, sources, **keys | {"max_steps": 1}), 1)
    facts = [how for what, how in found.facts if what in ("goes on", "note")]
    assert facts[0] == f"after step 2 from {tmp_path}/output/step_2"
    assert any("nothing is left to train: step 2 is done and train.max_steps is 1" in how for how in facts)
    assert found.faults == []


def test_held_out_data_and_the_base_of_exports_are_checked_before_the_first_step(
    tmp_path: Path, sources: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = str(tmp_path / "gone.jsonl")
    source = {"path": gone, "source_name": "openai_messages"}
    with pytest.raises(IncompleteSourceError, match=r"gone\.jsonl does not exist"):
        make_trainer(omni_config(tmp_path, sources, evaluation={"sources": [source]})).build()
    checkpoint = {"output_dir": str(tmp_path / "output"), "hf_base": gone}
    with pytest.raises(OmniloomError, match=r"train\.checkpoint\.hf_base: .* no such directory"):
        make_trainer(omni_config(tmp_path, sources, checkpoint=checkpoint)).build()
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="needs the package wandb"):
        make_trainer(omni_config(tmp_path, sources, logging={"wandb": {"enable": True}})).build()


def test_evaluating_plans_nothing_again(
    tmp_path: Path, sources: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []

    def watched(*args: Any, **keys: Any) -> Any:
        opened.append(1)
        return open_data(*args, **keys)

    monkeypatch.setattr(evaluation, "open_data", watched)
    keys: dict[str, Any] = {"max_steps": 2, "evaluation": {"sources": sources[1:], "steps": 1, "max_batches": 1}}
    trainer = make_trainer(omni_config(tmp_path, sources, **keys))
    trainer.build()
    assert opened == [1]
    planned = trainer.evaluator
    trainer.train()
    assert opened == [1] and trainer.evaluator is planned


@pytest.mark.parametrize(
    ("keys", "kind", "said"),
    [
        ({"accelerator": {"dp_shard_size": 3}}, ConfigError, "dp_shard_size 3 x ulysses_size 1 = 3, but there are 1"),
        ({"init_device": "cuda"}, ConfigError, "train.init_device: cuda"),
        (
            {"optimizer": {"type": "muon", "muon_head_group_size": 3, "muon_head_split_modules": ["q_proj"]}},
            ConfigError,
            "train.optimizer.muon_head_group_size: 3 does not divide the",
        ),
        ({"module_lr": {"lm_haed": 1e-4}}, ConfigError, "did you mean 'lm_head'"),
        ({"freeze_modules": ["lm_haed"]}, ConfigError, "did you mean 'lm_head'"),
        ({"global_batch_size": 3, "micro_batch_size": 2}, ConfigError, "no multiple of train.micro_batch_size 2"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path, sources: list[dict[str, Any]], keys: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind) as caught:
        make_trainer(omni_config(tmp_path, sources, **keys)).build()
    assert said in str(caught.value)


def _course(config: Any) -> tuple[list[float], list[dict[str, float]]]:
    watch = Watch()
    make_trainer(config, callbacks=[watch]).train()
    return watch.losses, watch.evaluated


def test_two_processes_have_the_losses_of_one(tmp_path: Path, sources: list[dict[str, Any]]) -> None:
    keys: dict[str, Any] = {"max_steps": 3, "evaluation": {"sources": sources}}
    losses, evaluated = _course(omni_config(tmp_path / "one", sources, coef=0.0, **keys))
    found = processes.run(2, _course, omni_config(tmp_path / "two", sources, coef=0.0, **keys))
    assert found[0] == found[1]
    assert found[0][0] == pytest.approx(losses, rel=1e-5)
    assert found[0][1][0] == pytest.approx(evaluated[0], rel=1e-4)


class Signalled(Callback):
    """Gets a signal while the last step is saved."""

    def on_before_save(self, trainer: BaseTrainer) -> None:
        if trainer.state.step == STEPS:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_during_the_last_save_loses_no_step(tmp_path: Path, sources: list[dict[str, Any]]) -> None:
    config = omni_config(tmp_path, sources, max_steps=STEPS)
    with pytest.raises(StoppedError, match=rf"^SIGTERM: saved after step {STEPS}, the last; start again"):
        make_trainer(config, callbacks=[Signalled()]).train()
    assert (tmp_path / f"output/step_{STEPS}/COMPLETE").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    watch = Watch()
    make_trainer(config, callbacks=[watch]).train()
    assert watch.losses == []


@pytest.mark.parametrize("auto", [True, False])
def test_a_stop_says_how_to_go_on(tmp_path: Path, sources: list[dict[str, Any]], auto: bool) -> None:
    """A load_path of a folder, or none, would begin from there again."""
    config = omni_config(tmp_path, sources, max_steps=STEPS)
    values = config.model_dump()
    values["train"]["checkpoint"]["load_path"] = "auto" if auto else None
    how = "" if auto else r" with train\.checkpoint\.load_path=auto"
    with pytest.raises(StoppedError, match=rf"^stopped and saved after step 1; start again{how} to go on$"):
        make_trainer(type(config).model_validate(values), callbacks=[Watch(stop_after=1)]).train()


def test_a_full_disk_is_a_failure_and_no_stop(
    tmp_path: Path, sources: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What starts a stopped training again would do so for ever."""
    full = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(OmniloomError, match="make room and run the same command again") as told:
        make_trainer(omni_config(tmp_path, sources, max_steps=1)).train()
    assert told.value.exit_code == 1


@pytest.mark.parametrize(("first", "then"), [("adamw", "muon"), ("muon", "adamw")])
def test_another_type_of_optimizer_is_named(
    tmp_path: Path, sources: list[dict[str, Any]], first: str, then: str
) -> None:
    def config(kind: str) -> OmniConfig:
        optimizer = {"type": kind, "lr": 1e-3, "lr_decay_style": "constant"}
        return omni_config(tmp_path, sources, optimizer=optimizer)

    with pytest.raises(StoppedError):
        make_trainer(config(first), callbacks=[Watch(stop_after=1)]).train()
    said = rf"step_1/state\.json: was saved with train\.optimizer\.type: {first}, and now it is {then}; set it back"
    with pytest.raises(ConfigError, match=said):
        make_trainer(config(then)).build()
