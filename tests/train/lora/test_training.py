"""Trainings by LoRA as a whole: resume, what is saved and exported, and what does not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule

from convert.adapter_config import CONFIG_FILE
from convert.dcp_index import read_index
from schemas.errors import ConfigError, ResumableError, UnsupportedError
from schemas.strict import check_config
from tests import dist as processes
from tests.train.models.checkpoints import write
from tests.train.parallel.steps import whole
from tests.train.test_trainer import Watch
from tests.train.tiny import omni_config, write_data, write_omni_config
from train.config import OmniConfig
from train.estimate import estimate_memory
from train.lora.apply import adapter_names
from train.mesh import Degrees
from train.model_build import build_model, plan_lora
from train.models.spec import build_foundation_model
from train.ops.registry import eager_ops
from train.trainer import BaseTrainer, make_trainer
from train.validate import validate_config

STEPS, STOP_AFTER = 4, 2
LORA: dict[str, Any] = {
    "r": 3,
    "lora_alpha": 6.0,
    "target_modules": ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "linear_fc1"],
    "modules_to_save": ["visual.merger"],
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


def make_base(folder: Path, seed: int = 0) -> Path:
    """A hub directory with random weights."""
    write_omni_config(folder, router_aux_loss_coef=0.0)
    model = build_foundation_model(folder, eager_ops(), init="random", seed=seed)
    write(folder, {name: parameter.detach() for name, parameter in model.named_parameters()})
    return folder


def config_of(
    folder: Path,
    sources: list[dict[str, Any]],
    base: Path | None,
    lora: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    **train: Any,
) -> OmniConfig:
    values = omni_config(folder, sources, coef=0.0, **{"max_steps": STEPS, **train}).model_dump()
    values["model"] |= {"lora_config": LORA if lora is None else lora or None}
    if base is not None:
        values["model"] |= {"model_path": str(base), "config_path": None}
    values["train"]["checkpoint"] |= checkpoint or {}
    return check_config(values, OmniConfig)


def stopped(config: OmniConfig) -> BaseTrainer:
    """A training that was stopped and saved."""
    trainer = make_trainer(config, callbacks=[Watch(stop_after=STOP_AFTER)])
    with pytest.raises(ResumableError):
        trainer.train()
    return trainer


@pytest.mark.parametrize("kind", ["from files", "from a seed, with dropout"])
def test_an_interrupted_training_goes_on_bit_by_bit(
    tmp_path: Path, sources: list[dict[str, Any]], base: Path, kind: str
) -> None:
    lora = LORA if kind == "from files" else {"lora_modules": ["q_proj", "lm_head"], "lora_dropout": 0.2}
    start = base if kind == "from files" else None
    whole, first, second = Watch(), Watch(stop_after=STOP_AFTER), Watch()
    end = make_trainer(config_of(tmp_path / "whole", sources, start, lora), callbacks=[whole])
    end.train()
    config = config_of(tmp_path / "parts", sources, start, lora)
    with pytest.raises(ResumableError):
        make_trainer(config, callbacks=[first]).train()
    again = make_trainer(config, callbacks=[second])
    again.train()
    assert first.losses + second.losses == whole.losses
    assert len(set(whole.losses)) == STEPS
    values = dict(end.model.named_parameters())
    assert all(torch.equal(p, values[name]) for name, p in again.model.named_parameters())


def bf16(**fsdp: Any) -> dict[str, Any]:
    return {"fsdp_config": {"mixed_precision": {"enable": True, "param_dtype": "bfloat16"}, **fsdp}}


def test_adapters_alone_in_one_process_need_no_copy_of_the_base(
    tmp_path: Path, sources: list[dict[str, Any]], base: Path
) -> None:
    """Their factors are cast where they are used; offload gathers and casts everything, and gives the same."""
    alone = {key: value for key, value in LORA.items() if key != "modules_to_save"}
    found = []
    for name, lora, fsdp in (("plain", alone, {}), ("gathered", alone, {"offload": True}), ("saved", LORA, {})):
        watch = Watch()
        values = config_of(tmp_path / name, sources, base, lora, accelerator=bf16(**fsdp)).model_dump()
        values["model"]["ops_implementation"]["moe_implementation"] = "eager"  # odd sizes of bfloat16
        trainer = make_trainer(check_config(values, OmniConfig), callbacks=[watch])
        trainer.train()
        assert isinstance(trainer.model, FSDPModule) == (name != "plain")
        trained = [p for p in trainer.model.parameters() if p.requires_grad]
        frozen = [p for p in trainer.model.parameters() if not p.requires_grad]
        assert {p.dtype for p in trained} == {torch.float32} and {p.dtype for p in frozen} == {torch.bfloat16}
        found.append((watch.losses, [whole(p) for p in trained]))
    (losses, made), (gathered_losses, gathered), _ = found
    assert len(set(losses)) == STEPS
    assert losses == pytest.approx(gathered_losses, rel=1e-3)
    for got, want in zip(made, gathered, strict=True):
        assert float((got - want).norm()) <= 5e-2 * float(want.norm())


def test_only_what_is_trained_is_saved_and_the_base_stays_bit_by_bit(
    tmp_path: Path, sources: list[dict[str, Any]], base: Path
) -> None:
    trainer = make_trainer(config_of(tmp_path, sources, base))
    trainer.train()
    before = load_file(base / "model.safetensors")
    adapters = set(adapter_names(trainer.model))
    saved = {name for name in before if name.startswith("visual.merger.")}
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert trained == adapters | saved
    for name, parameter in trainer.model.named_parameters():
        if name not in trained:
            assert torch.equal(parameter, before[name]), name
            assert parameter.grad is None and parameter not in trainer.optimizer.state
    moved = {n for n, p in trainer.model.named_parameters() if n in saved and not torch.equal(p, before[n])}
    assert moved == saved
    index = read_index(tmp_path / "output" / f"step_{STEPS}")
    assert {n.removeprefix("model.") for n in index.tensors if n.startswith("model.")} == trained
    states = {n for n in index.tensors if n.startswith("optimizer.state.")}
    assert {n.removeprefix("optimizer.state.").rpartition(".")[0] for n in states} == trained


def test_exports_and_a_training_that_starts_from_one(tmp_path: Path, sources: list[dict[str, Any]], base: Path) -> None:
    checkpoint = {"save_hf_weights": True, "hf_save_steps": 3, "lora_per_expert": True}
    first = make_trainer(config_of(tmp_path / "first", sources, base, checkpoint=checkpoint))
    first.train()
    exports = tmp_path / "first" / "output" / "hf"
    assert sorted(path.name for path in exports.iterdir()) == ["per_expert", "step_3", "step_4"]
    assert sorted(path.name for path in (exports / "per_expert").iterdir()) == ["step_3", "step_4"]
    settings = json.loads((exports / "step_4" / CONFIG_FILE).read_text())
    assert settings["base_model_name_or_path"] == str(base)
    assert not torch.equal(*(next(iter(load_file(exports / s / "adapter_model.safetensors").values()))
                             for s in ("step_3", "step_4")))  # fmt: skip
    lora = {"lora_adapter": str(exports / "step_4")}
    second = make_trainer(config_of(tmp_path / "second", sources, base, lora))
    second.build()
    values = dict(first.model.named_parameters())
    found = dict(second.model.named_parameters())
    assert found.keys() == values.keys()
    assert all(torch.equal(parameter, values[name]) for name, parameter in found.items())
    assert {n for n, p in found.items() if p.requires_grad} == {n for n, p in values.items() if p.requires_grad}


def test_checkpoints_that_do_not_fit(tmp_path: Path, sources: list[dict[str, Any]], base: Path) -> None:
    stopped(config_of(tmp_path, sources, base))

    def refused(said: str, lora: dict[str, Any], there: Path = base, kind: type[Exception] = ConfigError) -> None:
        with pytest.raises(kind) as caught:
            make_trainer(config_of(tmp_path, sources, there, lora)).build()
        assert said in str(caught.value)

    refused("holds adapters only, and model.lora_config is not set", {})
    refused("has the scale 2 in the checkpoint and 4 now", {**LORA, "lora_alpha": 12.0})
    refused("has the scale 2 in the checkpoint and 3.4", {**LORA, "use_rslora": True})
    refused("has other adapters than model.lora_config asks for", {**LORA, "target_modules": ["q_proj"]})
    refused("modules_to_save was ['visual.merger'] and is []", {**LORA, "modules_to_save": None})
    refused("share_expert_lora was False and is True", {**LORA, "share_expert_lora": True})
    more = {**LORA, "r": 4, "lora_alpha": 8.0}
    refused("has rank 3 in the checkpoint and 4 now; model.lora_config.rank and rank_pattern must be", more)
    note = tmp_path / "output" / f"step_{STOP_AFTER}" / "state.json"
    state = json.loads(note.read_text())
    del state["lora"]["ranks"]  # as checkpoints had it before
    note.write_text(json.dumps(state))
    refused("[3, 40] in the checkpoint and float32 [4, 40] in the model", more)
    refused("were trained on another base", LORA, make_base(tmp_path / "other", seed=1))


def test_a_checkpoint_of_a_full_training(tmp_path: Path, sources: list[dict[str, Any]], base: Path) -> None:
    stopped(config_of(tmp_path, sources, base, {}))
    with pytest.raises(ConfigError, match="is a checkpoint of a full training"):
        make_trainer(config_of(tmp_path, sources, base)).build()


def test_convert_says_what_to_do_with_a_checkpoint_of_adapters(
    tmp_path: Path, sources: list[dict[str, Any]], base: Path
) -> None:
    from convert.trainer import dcp_to_hf_conversion  # noqa: PLC0415

    stopped(config_of(tmp_path, sources, base))
    with pytest.raises(UnsupportedError, match="tensors are of LoRA adapters"):
        dcp_to_hf_conversion(tmp_path / "output", base)


def test_validate_counts_adapters(tmp_path: Path, sources: list[dict[str, Any]], base: Path) -> None:
    """Their memory, and that of the base in the dtype that is computed in."""
    half = {"fsdp_config": {"mixed_precision": {"enable": True}}}
    config = config_of(tmp_path, sources, base, accelerator=half)
    found = validate_config(config, 1, data=False)
    assert found.faults == []
    facts = dict(found.facts)
    trainer = make_trainer(config_of(tmp_path, sources, base))
    trainer.build()
    parameters = list(trainer.model.parameters())
    trained, total = (sum(p.numel() for p in parameters if p.requires_grad), sum(p.numel() for p in parameters))
    assert facts["adapters"].startswith(f"{trained:,} of {total:,} parameters are trained")
    assert "all names and shapes fit" in facts["weights"]
    model = build_model(config.model, eager_ops())
    plan = plan_lora(model, config.model, config.train, ())
    assert plan is not None
    plan.add(model, torch.float32)
    memory = estimate_memory(model, Degrees(), config.train, 512)
    assert memory.parameters == 2 * (total - trained) + 4 * trained
    assert (memory.gradients, memory.optimizer) == (4 * trained, 8 * trained)
    wrong = {**LORA, "target_modules": ["q_porj"]}
    faults = validate_config(config_of(tmp_path, sources, base, wrong), 1, data=False).faults
    assert len(faults) == 1 and "did you mean 'q_proj'" in str(faults[0])


def _course(config: OmniConfig, stop: bool) -> list[float]:
    watch = Watch(stop_after=STOP_AFTER if stop else 0)
    trainer = make_trainer(config, callbacks=[watch])
    if not stop:
        trainer.train()
        return watch.losses
    try:
        trainer.train()
    except ResumableError:
        return watch.losses
    raise AssertionError("was not stopped")


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "output" / "hf" / f"step_{STOP_AFTER}" / "adapter_model.safetensors")


def _times(folder: Path) -> dict[str, int]:
    files = [path for path in (folder / "output" / "hf").rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in files}


def test_adapters_that_are_there_are_left_alone(
    tmp_path: Path, sources: list[dict[str, Any]], base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {"save_hf_weights": True, "hf_save_steps": 2, "save_steps": 2, "lora_per_expert": True}
    config = config_of(tmp_path, sources, base, checkpoint=keys)
    make_trainer(config).train()
    before, last = _times(tmp_path), tmp_path / "output" / "hf" / f"step_{STEPS}"
    assert len(before) == 2 * 2 * 2  # steps, forms, files
    with caplog.at_level("INFO", "omniloom.train"):
        make_trainer(config).train()
    assert _times(tmp_path) == before
    assert f"{last}: the adapter is exported already" in caplog.text

    weights = (last / "adapter_model.safetensors").read_bytes()
    damages: list[Callable[[], object]] = [
        lambda: shutil.rmtree(last),
        lambda: (last / "adapter_config.json").unlink(),
        lambda: (last / "adapter_config.json").write_text('{"edited": true}'),
        lambda: (last / "adapter_model.safetensors").write_bytes(weights[:-1]),
        lambda: (last / "adapter_model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1])),
        lambda: shutil.copytree(last.with_name("step_2"), last, dirs_exist_ok=True),  # of another step
    ]
    said = [
        "cannot be read (",
        "has another adapter_config.json",
        "cannot be read (",
        "has other values, in base_model.",
        "has other values, in base_",
    ]
    for number, damage in enumerate(damages):
        damage()
        caplog.clear()
        make_trainer(config).train()
        aside = last.with_name(f"{last.name}.before-1")
        assert aside.is_dir() == (number > 0)
        if number:
            assert f"{last}: {said[number - 1]}" in caplog.text and f"it is called {aside.name} now" in caplog.text
            shutil.rmtree(aside)
        assert (last / "adapter_model.safetensors").read_bytes() == weights
        assert (last / "adapter_config.json").is_file()
        changed = {name for name, time in _times(tmp_path).items() if before.get(name) != time}
        assert changed and all(name.startswith(f"output/hf/step_{STEPS}/") for name in changed)


def test_an_adapter_that_a_kill_came_before_is_exported(
    tmp_path: Path, sources: list[dict[str, Any]], base: Path
) -> None:
    keys = {"hf_save_steps": STOP_AFTER, "save_steps": STOP_AFTER}
    config = config_of(tmp_path, sources, base, checkpoint=keys)
    stopped(config)
    wanted = exported(tmp_path)
    shutil.rmtree(tmp_path / "output" / "hf")
    make_trainer(config).train()
    assert all(torch.equal(exported(tmp_path)[name], value) for name, value in wanted.items())
    begun_elsewhere = keys | {"load_path": str(tmp_path / "output" / f"step_{STOP_AFTER}")}
    make_trainer(config_of(tmp_path / "next", sources, base, checkpoint=begun_elsewhere)).train()
    assert not (tmp_path / "next" / "output" / "hf" / f"step_{STOP_AFTER}").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "shared"])
def test_another_number_of_ranks_goes_on(tmp_path: Path, sources: list[dict[str, Any]], base: Path, kind: str) -> None:
    """Two processes with the experts divided between them, then one; and what the two export."""
    lora, early = {**LORA, "share_expert_lora": kind == "shared"}, {"hf_save_steps": STOP_AFTER}
    expected = _course(config_of(tmp_path / "one", sources, base, lora, early), stop=False)
    precise = {"fsdp_config": {"mixed_precision": {"enable": False}}}
    two = config_of(tmp_path / "two", sources, base, lora, early, accelerator={"ep_size": 2, **precise})
    begun = processes.run(2, _course, two, True)
    assert begun[0] == begun[1]
    rest = _course(config_of(tmp_path / "two", sources, base, lora), stop=False)
    assert begun[0] + rest == pytest.approx(expected, rel=1e-5)
    one, other = exported(tmp_path / "one"), exported(tmp_path / "two")
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (other[name] - value).abs().max() <= 1e-4 * value.abs().max() + 1e-6, name
