"""What only a GPU shows: staging from its memory, its random generator, its memory history."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from train.callbacks.memory import MemoryCallback
from train.checkpoint import Checkpointer
from train.config import CheckpointConfig
from train.metrics import device_memory
from train.peak_flops import peak_flops
from train.trainer import BaseTrainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


class Course:
    """A layer with dropout; fused AdamW, whose step counters are on the GPU."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5)).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            loss = self.model(torch.randn(8, 64, device=self.device)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def keeper(self, folder: Path) -> Checkpointer:
        config = CheckpointConfig(output_dir=str(folder))
        return Checkpointer(config, rank=0, world_size=1, family="qwen3", device=self.device)


def test_training_on_a_gpu_goes_on_exactly(tmp_path: Path) -> None:
    course = Course(0)
    course.steps(3)
    keeper = course.keeper(tmp_path)
    for step in (3, 4):  # the second reuses the staging buffers
        keeper.save(step, course.model, course.optimizer, {})
        losses = course.steps(3)
        keeper.wait()
        again = Course(1)
        again.keeper(tmp_path).load(tmp_path / f"step_{step}", again.model, again.optimizer)
        assert again.steps(3) == losses
        for state in again.optimizer.state.values():
            assert all(value.device.type == "cuda" for value in state.values())


def test_what_held_the_memory_is_written(tmp_path: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    callback, trainer = MemoryCallback(tmp_path, device), cast(BaseTrainer, None)
    callback.on_train_begin(trainer)
    held = torch.ones(1 << 20, device=device)
    with pytest.raises(torch.OutOfMemoryError) as found:
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    callback.on_exception(trainer, found.value)
    assert held.numel() and (tmp_path / "memory" / "rank_0.pickle").stat().st_size > 1000
    assert "pytorch.org/memory_viz" in cast(Any, found.value).__notes__[0]


class Ends(torch.autograd.Function):
    """Saves last of all in its block, so that the second run is ended from inside of it, where tensors are freed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.sin(), x.cos())
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        sine, cosine = ctx.saved_tensors
        return gradient * (sine + cosine)


def test_the_record_of_memory_and_a_second_run_of_a_block(tmp_path: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    callback, trainer = MemoryCallback(tmp_path, device), cast(BaseTrainer, None)
    callback.on_train_begin(trainer)
    try:
        x = torch.randn(1000, device=device, requires_grad=True)
        checkpoint(Ends.apply, x, use_reentrant=False).sum().backward()
    finally:
        callback.on_train_end(trainer)
    assert x.grad is not None and torch.allclose(x.grad, x.detach().sin() + x.detach().cos())


def test_memory_and_peak() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    device_memory(device)
    held = torch.ones(1 << 20, device=device)
    allocated, reserved, _ = device_memory(device)
    assert reserved >= allocated >= held.nbytes
    known = peak_flops(device)
    assert known is None or known > 1e13
