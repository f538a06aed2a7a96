"""Gathering over NCCL for the hub's names, from shards on GPUs and in CPU memory; a frozen audio tower on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import dist as processes
from tests.train.models import checkpoints
from tests.train.models.families import FAMILIES, randomise
from tests.train.parallel.steps import FP32, fill, make_parts
from train.models.foundation import FoundationModel
from train.models.frozen_audio import FrozenAudioTower
from train.ops.registry import eager_ops
from train.parallel.hub_export import export_tensors

RANKS = min(2, torch.cuda.device_count())
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not RANKS, reason="needs a CUDA device")]
LAYOUTS: list[dict[str, Any]] = [
    {"ep_size": RANKS, "fsdp_config": FP32},
    {"fsdp_config": FP32 | {"offload": True}},
    {"fsdp_config": {"mixed_precision": {"enable": True, "param_dtype": "bfloat16"}}},
]


def on_meta(name: str) -> FoundationModel:
    with torch.device("meta"):
        return FAMILIES[name].ours(FAMILIES[name].make_config(), eager_ops())


def _sent() -> list[dict[str, Tensor]]:
    found = []
    for keys in LAYOUTS:
        parts = make_parts(keys, on_meta("omni"), device="cuda")
        assert isinstance(parts.model, FoundationModel)
        fill(parts.model)
        sent = dict(export_tensors(parts.model, ranks="first"))
        assert all(value.is_cuda for value in sent.values())
        found.append({name: value.cpu() for name, value in sent.items()})
    return found


def test_shards_on_gpus_give_what_one_process_gives() -> None:
    first, *others = processes.run(RANKS, _sent, backend="cpu:gloo,cuda:nccl")
    model = on_meta("omni").to_empty(device="cpu")
    randomise(model)
    expected = dict(export_tensors(model))
    for keys, got in zip(LAYOUTS, first, strict=True):
        assert list(got) == list(expected), str(keys)
        assert all(torch.equal(got[name], value) for name, value in expected.items()), str(keys)
    assert not any(got for rank in others for got in rank)


def test_a_frozen_tower_reads_its_weights_where_the_sound_is(tmp_path: Path) -> None:
    checkpoints.save_model("omni", tmp_path, "per-expert")
    mel = torch.randn(128, 330, generator=torch.Generator().manual_seed(3))
    rows = FrozenAudioTower(tmp_path, eager_ops(), 48, torch.float32)(mel, [230, 100])
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        tower = FrozenAudioTower(tmp_path, eager_ops("cuda"), 48, dtype)
        found = tower(mel.cuda(), [230, 100])
        assert found.is_cuda and found.dtype == dtype and not found.requires_grad
        assert (found.cpu().float() - rows).norm() <= limit * rows.norm()
