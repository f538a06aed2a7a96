"""Steps on a GPU: nothing waits for it, the results are those of the CPU, and NCCL gives what gloo gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import dist as processes
from tests.train.models import media
from tests.train.parallel.steps import FP32, Outcome, batches_of, make_parts, meta_model, outcome
from train.config import ModelConfig, TrainConfig
from train.data.batch import Batch
from train.data.device import make_features
from train.mesh import Process, start_process_group
from train.model_build import choose_ops
from train.ops.registry import Ops, eager_ops
from train.step import train_step
from train.trainer_build import seed_everything

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "ddp": {"fsdp_config": {**FP32, "fsdp_mode": "ddp"}},
    "summed once per step": {"fsdp_config": {**FP32, "sync_every_micro_batch": False}},
    "offloaded": {"fsdp_config": {**FP32, "offload": True}},
}


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    """With a process group of this process alone, which mixed precision needs."""
    found = torch.device("cuda", 0)
    start_process_group(Process(), found, 60)
    yield found
    dist.destroy_process_group()


def on_device(batches: list[Batch], device: torch.device) -> list[Batch]:
    """As the loader gives them."""
    moved = [batch.to(device) for batch in batches]
    return [replace(batch, features=make_features(batch, media.omni_assets())) for batch in moved]


def fastest(device: torch.device) -> Ops:
    return choose_ops(ModelConfig(config_path="unused"), TrainConfig(), device)


@cache
def on_cpu() -> Outcome:
    return outcome(make_parts({}, meta_model(aligned=True)), batches_of(0, 1))


def assert_near(found: Outcome, expected: Outcome, limit: float, gradients: float) -> None:
    """Relative: losses and norms within the limit, each large gradient by its norm."""
    assert found.losses == pytest.approx(expected.losses, rel=limit)
    assert found.norms == pytest.approx(expected.norms, rel=gradients)
    largest = max(gradient.norm() for gradient in expected.gradients.values())
    for name, want in expected.gradients.items():
        if want.norm() > 1e-2 * largest:
            share = float((found.gradients[name] - want).norm() / want.norm())
            assert share < gradients, f"{name}: {share:.2g}"


def test_nothing_waits_for_the_device(device: torch.device) -> None:
    parts = make_parts(
        {"fsdp_config": {}},
        meta_model(ops=fastest(device), aligned=True),
        checkpointing=True,
        max_grad_norm=1.0,
        device=device,
    )
    for _ in range(2):  # kernels are compiled
        train_step(parts, on_device(batches_of(0, 1), device))
    batches = on_device(batches_of(0, 1), device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = train_step(parts, batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(result.loss_sum)


@pytest.mark.parametrize("offload", [False, True])
def test_float32_is_that_of_the_cpu(device: torch.device, offload: bool) -> None:
    layout = {"fsdp_config": {**FP32, "offload": offload}}
    parts = make_parts(layout, meta_model(ops=eager_ops("cuda"), aligned=True), device=device, checkpointing=True)
    assert_near(outcome(parts, on_device(batches_of(0, 1), device)), on_cpu(), 1e-4, 2e-2)


def test_bfloat16_is_near(device: torch.device) -> None:
    parts = make_parts(
        {"fsdp_config": {}}, meta_model(ops=fastest(device), aligned=True), device=device, checkpointing=True
    )
    assert_near(outcome(parts, on_device(batches_of(0, 1), device)), on_cpu(), 2e-2, 0.3)


def test_deterministic_runs_are_equal(device: torch.device) -> None:
    seed_everything(1, deterministic=True)
    try:
        first, second = (
            outcome(
                make_parts({"fsdp_config": {}}, meta_model(ops=fastest(device), aligned=True), device=device),
                on_device(batches_of(0, 1), device),
            )
            for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert first.losses == second.losses
    assert all(torch.equal(first.parameters[name], value) for name, value in second.parameters.items())


def _layouts() -> dict[str, Outcome]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank)
    return {
        name: outcome(
            make_parts(layout, meta_model(ops=eager_ops("cuda"), aligned=True), device=device),
            on_device(batches_of(rank, world_size), device),
        )
        for name, layout in LAYOUTS.items()
    }


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_two_gpus_are_one() -> None:
    (one,) = processes.run(1, _layouts, backend="cpu:gloo,cuda:nccl")
    two = processes.run(2, _layouts, backend="cpu:gloo,cuda:nccl")[0]
    for name in LAYOUTS:
        assert_near(two[name], one["fsdp2"], 1e-5, 1e-3)
        assert_near(one[name], one["fsdp2"], 1e-5, 1e-3)
