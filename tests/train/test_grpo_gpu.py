"""The GRPO objective on a GPU: nothing waits for it, and the step is that of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.train.grpo import batch_of
from tests.train.parallel.steps import FP32, fill, make_parts, meta_model
from tests.train.test_grpo import GROUPS
from tests.train.test_step_gpu import fastest, on_device
from train.mesh import Process, start_process_group
from train.objective import GrpoObjective
from train.ops.registry import Ops, eager_ops
from train.step import StepParts, StepResult, train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
OBJECTIVE = GrpoObjective(0.2, 0.28, 0.05)


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    """With a process group of this process alone, which mixed precision needs."""
    found = torch.device("cuda", 0)
    start_process_group(Process(), found, 60)
    yield found
    dist.destroy_process_group()


def parts_on(device: torch.device | str, ops: Ops, *, fp32: bool) -> StepParts:
    layout = {"fsdp_config": FP32 if fp32 else {}}
    parts = make_parts(layout, meta_model(ops=ops, aligned=True), device=device, checkpointing=True)
    return replace(parts, objective=OBJECTIVE)


def step(parts: StepParts, device: torch.device) -> StepResult:
    fill(parts.model)  # type: ignore[arg-type]
    return train_step(parts, on_device([batch_of(GROUPS[:2]), batch_of(GROUPS[2:])], device))


def test_nothing_waits_for_the_device(device: torch.device) -> None:
    parts = parts_on(device, fastest(device), fp32=False)
    for _ in range(2):  # kernels are compiled
        step(parts, device)
    batches = on_device([batch_of(GROUPS[:2]), batch_of(GROUPS[2:])], device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = train_step(parts, batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(value) for value in result.objective_sums.values())


@pytest.mark.parametrize("plain", [True, False])
def test_the_step_is_that_of_the_cpu(device: torch.device, plain: bool) -> None:
    """The references in float32; the fastest kernels in bfloat16, in which some rows take other experts."""
    found = step(parts_on(device, eager_ops("cuda") if plain else fastest(device), fp32=plain), device)
    wanted = step(parts_on("cpu", eager_ops(), fp32=True), torch.device("cpu"))
    for name in ("responses", "reward", "reward_square", "no_advantage"):
        assert float(found.objective_sums[name]) == pytest.approx(float(wanted.objective_sums[name]), rel=1e-5)
    limits = {"nll": 1e-5, "ratio": 1e-4, "kl_old": 1e-3, "kl_ref": 1e-3} if plain else {"nll": 2e-2, "ratio": 0.3}
    for name, limit in limits.items():
        assert float(found.objective_sums[name]) == pytest.approx(float(wanted.objective_sums[name]), rel=limit), name
    assert float(found.grad_norm) == pytest.approx(float(wanted.grad_norm), rel=1e-2 if plain else 0.5)
    if plain:
        assert float(found.loss_sum) == pytest.approx(float(wanted.loss_sum), rel=1e-3)
