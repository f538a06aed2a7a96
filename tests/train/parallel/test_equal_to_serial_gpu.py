"""Two GPUs against one: sequence and expert parallelism over NCCL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import dist as processes
from tests.train.models import media
from tests.train.parallel.steps import FP32, Outcome, make_parts, meta_model, outcome
from tests.train.parallel.test_equal_to_serial import batches_of as cpu_batches
from tests.train.parallel.test_equal_to_serial import degrees_of
from train.config import ModelConfig, TrainConfig
from train.data.batch import Batch
from train.data.device import make_features
from train.model_build import choose_ops
from train.ops.registry import eager_ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
LAYOUTS: list[dict[str, int]] = [
    {},
    {"dp_replicate_size": 2},
    {"ulysses_size": 2},
    {"ep_size": 2},
    {"ulysses_size": 2, "ep_size": 2},
]


def batches_of(layout: dict[str, int], device: torch.device) -> list[Batch]:
    moved = [b.to(device) for b in cpu_batches("mixed", dist.get_rank(), degrees_of(dist.get_world_size(), layout))]
    return [replace(batch, features=make_features(batch, media.omni_assets())) for batch in moved]


def _outcomes(layouts: list[dict[str, int]], exact: bool) -> list[Outcome]:
    """exact: float32 and the plain operations; otherwise bfloat16 and the fastest."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = torch.device("cuda", dist.get_rank())
    ops = eager_ops("cuda") if exact else choose_ops(ModelConfig(config_path="unused"), TrainConfig(), device)
    found = []
    for number, layout in enumerate(layouts):
        keys: dict[str, Any] = layout | {"fsdp_config": FP32 if exact else {}}
        parts = make_parts(keys, meta_model(ops=ops, aligned=True), device=device, checkpointing=number % 2 == 1)
        found.append(outcome(parts, batches_of(layout, device)))
    return found


@pytest.mark.parametrize(("exact", "losses", "gradients"), [(True, 1e-5, 1e-3), (False, 2e-2, 0.15)])
def test_two_gpus_equal_one(exact: bool, losses: float, gradients: float) -> None:
    """Relative: losses and norms within one limit, each large gradient by its norm within the other."""
    backend = "cpu:gloo,cuda:nccl"
    (want,) = processes.run(1, _outcomes, [{}], exact, backend=backend)[0]
    largest = max(gradient.norm() for gradient in want.gradients.values())
    for layout, got in zip(LAYOUTS, processes.run(2, _outcomes, LAYOUTS, exact, backend=backend)[0], strict=True):
        assert got.losses == pytest.approx(want.losses, rel=losses), layout
        assert got.norms == pytest.approx(want.norms, rel=gradients), layout
        for name, gradient in want.gradients.items():
            if gradient.norm() > 1e-2 * largest:
                share = float((got.gradients[name] - gradient).norm() / gradient.norm())
                assert share < gradients, (layout, name, share)
