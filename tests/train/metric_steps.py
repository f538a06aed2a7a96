"""Step results with known numbers, and their sums over two ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.train.fake_device import FakeDevice
from train.loss import SourceLoss
from train.metrics import Meter
from train.step import StepResult

SOURCES = ("clips", "text", "songs")


def step_result(scale: float = 1.0, **changes: Any) -> StepResult:
    """All numbers grow with `scale`."""
    values: dict[str, Any] = {
        "loss_sum": torch.tensor(30.0 * scale),
        "step_tokens": torch.tensor(10),
        "aux_loss": torch.tensor(1.5),
        "grad_norm": torch.tensor(2.0 * scale),
        "lr": {"base": 1e-3 * scale, "vit": 1e-4},
        "label_tokens": round(10 * scale),
        "tokens": round(50 * scale),
        "samples": round(4 * scale),
        "padding": round(6 * scale),
        "modality_tokens": {"text": 20, "video": round(30 * scale)},
        "source_loss": {"clips": SourceLoss(torch.tensor(20.0 * scale), round(6 * scale))},
        "expert_counts": torch.tensor([[4.0, 0.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]]) * scale,
        "flops": 2e9 * scale,
        "wait_s": 0.25 * scale,
        "step_s": 1.0,
    }
    return StepResult(**values | changes)


def of_two_ranks() -> dict[str, Any]:
    """Two steps on each rank, those of rank 1 twice as large; rank 1 alone has the source `text`."""
    rank = dist.get_rank()
    device = FakeDevice()  # its clock
    meter = Meter(SOURCES, torch.device("cpu"), rank=rank, world_size=2, clock=device)
    sources = {"text": SourceLoss(torch.tensor(8.0), 2)} if rank else {}
    for _ in range(2):
        clips = step_result(1.0 + rank).source_loss
        same = {"grad_norm": torch.tensor(3.0), "lr": {"base": 1e-3}}
        device.host(0.25 * (1 + rank))  # waits for data
        meter.times.begin_step()
        meter.add(step_result(1.0 + rank, source_loss=clips | sources, **same))
        meter.times.end_step()
    calls = []
    reduce = dist.all_reduce
    dist.all_reduce = lambda *arguments, **keys: (calls.append(1), reduce(*arguments, **keys))
    interval = meter.end_interval(dead_samples=rank).finish()
    dist.all_reduce = reduce
    assert interval.expert_counts is not None
    return {
        "metrics": interval.metrics,
        "sources": interval.source_loss,
        "experts": interval.expert_counts.tolist(),
        "collectives": len(calls),
    }
