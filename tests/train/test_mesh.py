"""Degrees, the grid of ranks, and what torchrun's variables say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from schemas.errors import ConfigError
from schemas.strict import check_config
from tests import dist as processes
from train.config_trainer import AcceleratorConfig
from train.mesh import Degrees, Mesh, Process

CPU = torch.device("cpu")


def accelerator(**keys: Any) -> AcceleratorConfig:
    return check_config(keys, AcceleratorConfig)


@pytest.mark.parametrize(
    ("keys", "world_size", "expected"),
    [
        ({}, 1, Degrees()),
        ({}, 8, Degrees(1, 8)),
        ({"dp_replicate_size": 2}, 8, Degrees(2, 4)),
        ({"dp_replicate_size": 2, "ulysses_size": 2, "ep_size": 4}, 8, Degrees(2, 2, 2, 4)),
        ({"dp_shard_size": 2, "ulysses_size": 4, "ep_size": 8}, 8, Degrees(1, 2, 4, 8)),
        ({"fsdp_config": {"fsdp_mode": "ddp"}}, 4, Degrees(4, 1)),
        ({"ulysses_size": 2, "fsdp_config": {"fsdp_mode": "ddp"}}, 4, Degrees(2, 1, 2)),
    ],
)
def test_degrees_of_a_configuration(keys: dict[str, Any], world_size: int, expected: Degrees) -> None:
    found = Degrees.of(accelerator(**keys), world_size)
    assert found == expected and found.world == world_size
    assert found.dp * found.ulysses == world_size == found.dp_replicate * found.fsdp
    assert found.ep_fsdp * found.ep == found.fsdp


@pytest.mark.parametrize(
    ("keys", "world_size", "said"),
    [
        ({"dp_shard_size": 4}, 8, "dp_shard_size 4 x ulysses_size 1 = 4, but there are 8 ranks"),
        ({"ulysses_size": 3}, 8, "8 ranks are no multiple of dp_replicate_size 1 x ulysses_size 3 = 3"),
        ({"dp_replicate_size": 2, "ep_size": 8}, 8, "ep_size 8 does not divide dp_shard_size 4 x ulysses_size 1 = 4"),
        ({"ep_size": 2, "fsdp_config": {"fsdp_mode": "ddp"}}, 4, "ep_size 2 divides experts, but fsdp_mode ddp"),
    ],
)
def test_degrees_that_do_not_fit_name_both_numbers(keys: dict[str, Any], world_size: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Degrees.of(accelerator(**keys), world_size)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("degrees", "heads", "kv_heads", "said"),
    [
        (Degrees(ulysses=3), 8, 2, "ulysses_size 3 does not divide the 8 attention heads"),
        (Degrees(ulysses=6), 12, 4, "ulysses_size 6 neither divides the 4 key/value heads nor is a multiple of them"),
    ],
)
def test_heads_are_checked(degrees: Degrees, heads: int, kv_heads: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        degrees.check_heads(heads, kv_heads)
    Degrees(ulysses=8).check_heads(32, 4)


def test_experts_are_checked() -> None:
    with pytest.raises(ConfigError, match="ep_size 3 does not divide the model's 8 experts"):
        Degrees(dp_shard=3, ep=3).check_experts(8)
    Degrees(dp_shard=4, ep=4).check_experts(8)
    with pytest.raises(ConfigError, match="ep_size 4 divides experts, but the model has none"):
        Degrees(dp_shard=4, ep=4).check_experts(0)


def test_ranks_without_process_groups() -> None:
    found = [Mesh.make(accelerator(ulysses_size=2), 8, rank, CPU) for rank in range(8)]
    assert [(mesh.dp_rank, mesh.sp_rank) for mesh in found] == [(r // 2, r % 2) for r in range(8)]
    assert found[0].shards is None and found[0].dp_group is None
    assert found[0].describe() == "8 ranks on cpu: 4 shards x 2 sequence slices"
    ep = Mesh.make(accelerator(dp_replicate_size=2, ep_size=2), 8, 0, CPU)
    assert ep.describe() == "8 ranks on cpu: 2 replicas x 4 shards; experts: 2 parts x 2 shards"
    with pytest.raises(ValueError, match="rank 8 of 8"):
        Mesh.make(accelerator(), 8, 8, CPU)


def _groups() -> dict[str, Any]:
    mesh = Mesh.make(accelerator(dp_replicate_size=2, ulysses_size=2, ep_size=2), 4, dist.get_rank(), CPU)
    assert mesh.shards is not None and mesh.experts is not None
    assert mesh.dp_group is not None and mesh.sp_group is not None
    return {
        "names": mesh.shards.mesh_dim_names,
        "fsdp": dist.get_process_group_ranks(mesh.shards.get_group("fsdp")),
        "replicas": dist.get_process_group_ranks(mesh.shards.get_group("dp_replicate")),
        "dp": dist.get_process_group_ranks(mesh.dp_group),
        "sp": dist.get_process_group_ranks(mesh.sp_group),
        "ep": dist.get_process_group_ranks(mesh.experts.get_group("ep")),
    }


def test_groups_of_ranks() -> None:
    found = processes.run(4, _groups)
    assert found[0]["names"] == ("dp_replicate", "fsdp")
    for rank, groups in enumerate(found):
        half = [0, 1] if rank < 2 else [2, 3]
        assert groups["fsdp"] == groups["sp"] == groups["ep"] == half
        assert groups["dp"] == groups["replicas"] == [rank % 2, rank % 2 + 2]


def test_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert Process.from_environment() == Process(0, 1, 0)
    monkeypatch.setenv("RANK", "5")
    with pytest.raises(ConfigError, match="RANK are set, but not WORLD_SIZE, LOCAL_RANK"):
        Process.from_environment()
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert Process.from_environment() == Process(5, 8, 1)
