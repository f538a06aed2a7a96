"""Checkpoints go from any degrees to any others, and the trainer has the losses of one process under all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from tests import dist as processes
from tests.train.models import media
from tests.train.parallel.steps import make_parts, meta_model, whole
from tests.train.tiny import omni_config, write_data
from tests.train.tiny_training import checkpointer, equal
from train.callbacks.base import Callback
from train.data.model_inputs import model_inputs
from train.step import StepParts, StepResult
from train.trainer import BaseTrainer, make_trainer

LAYOUTS: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [{}, {"ulysses_size": 2, "ep_size": 2}],
    4: [
        {"ulysses_size": 2, "ep_size": 4},
        {"ulysses_size": 4},
        {"dp_replicate_size": 2, "ep_size": 2},
    ],
}
SAVED_BY: list[tuple[int, int]] = [(1, 0), (2, 1), (4, 2)]  # processes, number of the layout


def parts_of(layout: dict[str, int]) -> tuple[StepParts, AdamW]:
    parts = make_parts(dict(layout), meta_model())
    return parts, AdamW(parts.model.parameters(), lr=0.01)


def state(model: torch.nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    """Everything, whole; a collective call."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {name: whole(parameter).clone() for parameter, name in names.items()}
    for parameter, values in optimizer.state.items():
        found |= {f"{names[parameter]}.{key}": whole(value).clone() for key, value in values.items()}
    return found


def train_once(parts: StepParts, optimizer: AdamW) -> None:
    mesh = parts.mesh
    batch = media.batch_of(
        media.omni_assets(),
        [media.text_mix(), media.image_mix()],
        sp_rank=mesh.sp_rank,
        sp_size=mesh.degrees.ulysses,
    )
    loss = parts.model(model_inputs(batch, parts.assets, dummy_towers=mesh.world_size > 1)).loss
    assert loss is not None
    loss.backward()
    for parameter in parts.model.parameters():  # towers that had nothing to do have a state, too
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def save(folder: Path, ranks: int, number: int) -> dict[str, Tensor]:
    parts, optimizer = parts_of(LAYOUTS[ranks][number])
    train_once(parts, optimizer)
    keeper = checkpointer(folder / f"{ranks}_{number}", parts.mesh.rank, ranks)
    keeper.save(1, parts.model, optimizer, {}, final=True)
    return state(parts.model, optimizer)


@torch.no_grad()
def spoil(model: torch.nn.Module, optimizer: AdamW) -> None:
    """Leaves nothing that a load might not write."""
    for tensor in [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]:
        tensor.fill_(float("nan"))


def load_all(folder: Path, ranks: int) -> dict[str, dict[str, Tensor]]:
    """Every checkpoint under every layout of so many processes."""
    found = {}
    for number, layout in enumerate(LAYOUTS[ranks]):
        parts, optimizer = parts_of(layout)
        for saved in sorted(path for path in folder.iterdir() if path.name[0].isdigit()):
            spoil(parts.model, optimizer)
            keeper = checkpointer(saved, parts.mesh.rank, ranks)
            keeper.load(keeper.find() or Path(), parts.model, optimizer)
            found[f"{saved.name} to {ranks}_{number}"] = state(parts.model, optimizer)
    return found


def _save_on_ranks(folder: Path, numbers: list[int]) -> dict[str, dict[str, Tensor]] | None:
    ranks = dist.get_world_size()
    found = {f"{ranks}_{number}": save(folder, ranks, number) for number in numbers}
    return found if dist.get_rank() == 0 else None


def _load_on_ranks(folder: Path) -> dict[str, dict[str, Tensor]] | None:
    found = load_all(folder, dist.get_world_size())
    return found if dist.get_rank() == 0 else None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_checkpoints_go_to_any_degrees(tmp_path: Path) -> None:
    saved = {"1_0": save(tmp_path, 1, 0)}
    for ranks in (2, 4):
        numbers = [number for other, number in SAVED_BY if other == ranks]
        saved |= processes.run(ranks, _save_on_ranks, tmp_path, numbers)[0]
    loaded = load_all(tmp_path, 1)
    for ranks in (2, 4):
        loaded |= processes.run(ranks, _load_on_ranks, tmp_path)[0]
    assert len(loaded) == len(saved) * sum(map(len, LAYOUTS.values()))
    for name, found in loaded.items():
        assert len(found) == 4 * len(dict(meta_model().named_parameters()))  # values, two averages, steps
        assert equal(found, saved[name.partition(" ")[0]]), name


class Losses(Callback):
    """Of all steps, over all ranks."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step_end(self, trainer: BaseTrainer, result: StepResult) -> None:
        total = result.loss_sum.clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        self.found.append(float(total / result.step_tokens))


def train(folder: Path, sources: list[dict[str, Any]], layout: dict[str, int]) -> tuple[list[float], dict[str, Any]]:
    """Losses, and the last line of metrics."""
    watch = Losses()
    exact = {"fsdp_config": {"mixed_precision": {"enable": False}}}
    evaluation = {"sources": sources, "steps": 3, "max_batches": 2}
    config = omni_config(folder, sources, coef=0.0, max_steps=3, accelerator=exact | layout, evaluation=evaluation)
    make_trainer(config, callbacks=[watch]).train()
    lines = (folder / "output" / "metrics.jsonl").read_text().splitlines()
    return watch.found, {key: value for line in lines for key, value in json.loads(line).items()}


def _train_all(folder: Path, sources: list[dict[str, Any]]) -> list[tuple[list[float], dict[str, Any]]]:
    layouts = [{"ulysses_size": 2, "ep_size": 2}, {"ep_size": 2}]
    return [train(folder / f"two_{number}", sources, layout) for number, layout in enumerate(layouts)]


def test_the_trainer_has_the_losses_of_one_process(tmp_path: Path) -> None:
    sources = write_data(tmp_path)
    alone, expected = train(tmp_path / "one", sources, {})
    held_out = {name for name in expected if name.startswith("eval/loss")}
    assert held_out >= {"eval/loss", "eval/loss/clips", "eval/loss/text"}
    for number, (losses, metrics) in enumerate(processes.run(2, _train_all, tmp_path, sources)[0]):
        assert losses == pytest.approx(alone, rel=1e-5)
        # ranks that read other sequences take more of the held-out data at once
        for name in {"loss", "loss/clips", "loss/text", "grad_norm", *(held_out if number == 0 else ())}:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4), name
        for name in ("tokens", "label_tokens", "samples", "tokens/video", "tokens/audio"):
            assert metrics[name] == expected[name], name
