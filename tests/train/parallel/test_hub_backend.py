"""A dense model of transformers, sharded: the values and the steps of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from schemas.errors import UnsupportedError
from schemas.strict import check_config
from tests import dist as processes
from tests.train.models import families, media
from tests.train.parallel.steps import FP32, LR, STEPS, Outcome, Recorder, assert_equal, batches_of, long_text, outcome
from train.config import ModelConfig, TrainConfig
from train.mesh import Mesh
from train.model_build import ModelFiles, build_model, parallelize, set_gradient_checkpointing
from train.models.checkpointing import CheckpointPolicy
from train.ops.registry import eager_ops
from train.optim.groups import parameter_groups
from train.optim.schedule import LrScheduler, Schedule
from train.parallel.fsdp import GradientSync
from train.step import StepParts

ROWS = [
    [[media.text_mix], [long_text], [media.text_mix, long_text], [media.text_mix]],
    [[long_text], [media.text_mix], [media.text_mix], [long_text, long_text]],
]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    sizes = {name: value for name, value in families.TEXT.items() if name != "head_dim"}
    model = LlamaForCausalLM(LlamaConfig(**sizes | {"rope_parameters": families.ROPE}))
    families.randomise(model)
    model.save_pretrained(folder)
    return folder


def run(folder: Path, *, random: bool, **train: Any) -> Outcome:
    config = check_config({"accelerator": {"fsdp_config": FP32}} | train, TrainConfig)
    place = {"config_path": str(folder)} if random else {"model_path": str(folder)}
    model_config = ModelConfig(backend="transformers", **place)
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    mesh = Mesh.make(config.accelerator, world, rank, torch.device("cpu"))
    model = build_model(model_config, eager_ops())
    set_gradient_checkpointing(model, CheckpointPolicy())
    parallelize(model, mesh, config, ModelFiles.of(model_config), fill=True)
    optimizer = Recorder(parameter_groups(model, config.optimizer), model)
    constant = config.optimizer.model_copy(update={"lr": LR, "lr_decay_style": "constant"})
    scheduler = LrScheduler(optimizer, Schedule.of(constant, STEPS))
    fsdp = config.accelerator.fsdp_config
    parts = StepParts(model, optimizer, scheduler, mesh, GradientSync(model, fsdp), 1.0, media.omni_assets())
    return outcome(parts, batches_of(rank, world, ROWS))


def _both(folder: Path) -> list[Outcome]:
    with pytest.raises(UnsupportedError, match=r"write train.init_device: cpu"):
        run(folder, random=True)
    return [run(folder, random=False), run(folder, random=True, init_device="cpu")]


def test_two_processes_equal_one(hub: Path) -> None:
    found = processes.run(2, _both, hub)[0]
    for random, got in enumerate(found):
        assert_equal(got, run(hub, random=bool(random)))
