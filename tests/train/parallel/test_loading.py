"""Sharded models start with the values that a model in one process starts with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from schemas.errors import UnsupportedError
from schemas.strict import check_config
from tests import dist as processes
from tests.train.models.families import make_pair
from tests.train.parallel.steps import FP32, whole
from train.config import ModelConfig, TrainConfig
from train.mesh import Mesh
from train.model_build import ModelFiles, build_model, parallelize
from train.models.spec import build_foundation_model
from train.ops.registry import eager_ops
from train.parallel.loading import placed_box

SEED = 3


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A thinker saved by transformers."""
    folder = tmp_path_factory.mktemp("hub")
    make_pair("omni").reference.save_pretrained(folder)
    return folder


def values(folder: Path, *, random: bool, layout: dict[str, Any] | None = None, **train: Any) -> dict[str, Tensor]:
    """Of all parameters, gathered from the ranks."""
    accelerator = {"fsdp_config": FP32} | (layout or {})
    config = check_config({"accelerator": accelerator, "seed": SEED} | train, TrainConfig)
    model = ModelConfig(config_path=str(folder)) if random else ModelConfig(model_path=str(folder))
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    mesh = Mesh.make(config.accelerator, world, rank, torch.device("cpu"))
    built = build_model(model, eager_ops())
    built.requires_grad_(False)
    parallelize(built, mesh, config, ModelFiles.of(model), fill=True)
    assert not any(parameter.requires_grad for parameter in built.parameters())
    return {name: whole(parameter) for name, parameter in built.named_parameters()}


def _all_ways(folder: Path) -> list[dict[str, Tensor]]:
    """Random ones first, then those of the files."""
    ways: list[dict[str, Any]] = [{}, {"init_device": "cpu"}, {"layout": {"fsdp_config": {**FP32, "offload": True}}}]
    if dist.get_world_size() == 4:
        ways.append({"layout": {"dp_replicate_size": 2}})
    return [values(folder, random=random, **way) for random in (True, False) for way in ways]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_values_do_not_depend_on_the_ranks(world_size: int, hub: Path) -> None:
    drawn = build_foundation_model(hub, eager_ops(), init="random", seed=SEED)
    read = build_foundation_model(hub, eager_ops())
    found = processes.run(world_size, _all_ways, hub)[world_size - 1]
    for number, got in enumerate(found):
        expected = drawn if number < len(found) / 2 else read
        assert got.keys() == dict(expected.named_parameters()).keys()
        for name, want in expected.named_parameters():
            assert torch.equal(got[name], want), name


def test_values_in_one_process(hub: Path) -> None:
    drawn = build_foundation_model(hub, eager_ops(), init="random", seed=SEED)
    for way in ({}, {"init_device": "cpu"}):
        got = values(hub, random=True, **way)
        assert all(torch.equal(got[name], want) for name, want in drawn.named_parameters())


@pytest.mark.parametrize("rows", [1, 5, 6, 7, 8])
def test_boxes_are_those_of_torch(rows: int) -> None:
    """Every rank's box against torch.chunk, of one and of two dimensions that shard."""
    tensor = torch.arange(rows * 6).view(rows, 6)
    for placements in ([Replicate(), Shard(0)], [Shard(1), Shard(0)], [Shard(0), Shard(0)]):
        pieces = {}
        for first in range(2):
            for second in range(3):
                part, coordinate = tensor, (first, second)
                for dim, placement in enumerate(placements):
                    if isinstance(placement, Shard):
                        chunks = part.chunk((2, 3)[dim], placement.dim)
                        empty = part.narrow(placement.dim, 0, 0)
                        part = chunks[coordinate[dim]] if coordinate[dim] < len(chunks) else empty
                pieces[coordinate] = part
        for coordinate, part in pieces.items():
            box = placed_box(tensor.shape, placements, (2, 3), coordinate)
            assert torch.equal(tensor[tuple(slice(*bounds) for bounds in box)], part)


def test_a_placement_that_is_no_slice_is_refused() -> None:
    class Strided(Shard):
        pass

    with pytest.raises(UnsupportedError, match="cannot be read in one slice"):
        placed_box((4, 4), [Replicate(), Strided(0)], (1, 2), (0, 0))
