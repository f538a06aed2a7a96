"""A trainer that takes no real steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from tests.train.metric_steps import step_result
from train.agreement import Agreement
from train.callbacks.base import Callback
from train.config import CheckpointConfig, EvaluationConfig
from train.state import TrainerState
from train.trainer import BaseTrainer


class Trainer:
    """As much of a trainer as callbacks see. did: what it was asked to do; said: by `say`."""

    def __init__(self, folder: Path, callbacks: Sequence[Callback], **sections: Any) -> None:
        train = {"checkpoint": CheckpointConfig(output_dir=str(folder)), "evaluation": EvaluationConfig(), **sections}
        self.args = SimpleNamespace(train=SimpleNamespace(**train), model_dump=lambda mode: {"seed": 1})
        self.state, self.callbacks, self.should_stop = TrainerState(), list(callbacks), False
        self.train_dataloader, self.lora = SimpleNamespace(dead=[], total_steps=lambda: 1000), None
        self.mesh, self.ranks = SimpleNamespace(device=torch.device("cpu")), Agreement(0, 1, None)
        self.did: list[str] = []
        self.said: list[str] = []
        self.committed: list[Path] = []
        self.checkpointer = SimpleNamespace(
            output_dir=folder, family="qwen3", wait=lambda: self.did.append("wait"), take_committed=self._take
        )

    def say(self, text: str) -> None:
        self.said.append(text)

    def save(self, *, final: bool = False) -> Path:
        self.call("on_before_save")
        self.did.append(f"save {self.state.step}{' final' if final else ''}")
        return Path()

    def evaluate(self) -> dict[str, float]:
        self.did.append(f"evaluate {self.state.step}")
        self.state.evaluated(2.5)
        self.call("on_evaluate", {"loss": 2.5})
        return {"loss": 2.5}

    def call(self, hook: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(cast(BaseTrainer, self), *arguments)

    def step(self, **changes: Any) -> None:
        self.call("on_step_begin")
        result = step_result(**changes)
        self.state.count(result.tokens, result.samples, epoch_ends=False)
        self.call("on_step_end", result)

    def train(self, steps: int, **changes: Any) -> None:
        self.call("on_train_begin")
        for _ in range(steps):
            self.step(**changes)
        self.call("on_train_end")

    def fail(self, error: BaseException) -> None:
        for callback in reversed(self.callbacks):
            callback.on_exception(cast(BaseTrainer, self), error)

    def _take(self) -> list[Path]:
        found, self.committed = self.committed, []
        return found
