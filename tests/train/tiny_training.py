"""A tiny training with everything that a checkpoint must bring back: two groups of AdamW, a schedule, a frozen and an
unused parameter, a buffer, noise from every generator."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from train.checkpoint import Checkpointer
from train.config import CheckpointConfig

FAMILY = "qwen3"


class TinyNet(nn.Module):
    """Rows that no number of ranks divides, a frozen layer, one parameter that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7, bias=False).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(7, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.head(torch.tanh(self.frozen(torch.tanh(self.inner(x)))))
        return out


@dataclass
class Training:
    """Model, optimizer and schedule of one rank."""

    model: nn.Module
    optimizer: torch.optim.AdamW
    schedule: LambdaLR

    @classmethod
    def start(cls, world_size: int, seed: int = 0) -> Training:
        """Sharded by FSDP2 when there are several ranks; the weights do not depend on their number."""
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        model: nn.Module = TinyNet()
        if world_size > 1:
            mesh = init_device_mesh("cpu", (world_size,))
            fully_shard(model.inner, mesh=mesh)
            fully_shard(model, mesh=mesh)
        decayed = [p for n, p in model.named_parameters() if n.endswith("weight") and p.requires_grad]
        others = [p for n, p in model.named_parameters() if not n.endswith("weight") and p.requires_grad]
        groups = [
            {"params": decayed, "weight_decay": 0.1, "name": "decay"},
            {"params": others, "weight_decay": 0.0, "lr": 0.02, "name": "no_decay"},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.05, betas=(0.9, 0.95))
        return cls(model, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step)))

    def step(self) -> float:
        """One step on a batch that is the same on every rank; its loss."""
        noise = torch.randn(4, 5) * random.random() + float(np.random.standard_normal())
        loss = self.model(noise).square().mean()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def steps(self, count: int) -> list[float]:
        return [self.step() for _ in range(count)]

    def whole(self) -> dict[str, Tensor]:
        """Every tensor of the state, unsharded; a collective call."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for parameter, state in self.optimizer.state.items():
            found |= {f"{names[parameter]}.{key}": value for key, value in state.items()}
        return {
            name: (it.full_tensor() if isinstance(it, DTensor) else it).detach().clone() for name, it in found.items()
        }

    def rates(self) -> list[Any]:
        return [
            (group["lr"], group["initial_lr"], group["betas"], group["weight_decay"])
            for group in self.optimizer.param_groups
        ]

    def save(self, checkpointer: Checkpointer, step: int, *, final: bool = False) -> Path:
        schedule = {"scheduler": {"last_epoch": self.schedule.last_epoch, "base_lrs": self.schedule.base_lrs}}
        return checkpointer.save(step, self.model, self.optimizer, schedule, final=final)

    def load(self, checkpointer: Checkpointer, path: Path) -> dict[str, Any]:
        state = checkpointer.load(path, self.model, self.optimizer)
        self.schedule.load_state_dict(self.schedule.state_dict() | state["scheduler"])
        return state


def checkpointer(folder: Path, rank: int = 0, world_size: int = 1, family: str = FAMILY, **keys: Any) -> Checkpointer:
    config = CheckpointConfig(output_dir=str(folder), **keys)
    return Checkpointer(config, rank=rank, world_size=world_size, family=family, files={"config.json": b"{}"})


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
