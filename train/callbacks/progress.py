"""What the user watches: a bar in a terminal, a plain line per log interval elsewhere. Rank 0 only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from train.callbacks.base import Callback

if TYPE_CHECKING:
    from train.step import StepResult
    from train.trainer import BaseTrainer

LINE_EVERY_S = 10.0
# said before the first step, which may take a minute or two
FIRST_STEP = "the first step also starts the loader"
FIRST_STEP_ON_GPU = f"{FIRST_STEP} and compiles kernels that this machine has not used yet"


class ProgressCallback(Callback):
    """Also a writer of metrics, whose last line it shows. It never reads from the device.

    total: steps of the whole training; status: what else is under way, such as a save.
    """

    def __init__(
        self, total: int, *, status: Callable[[], str | None] = lambda: None, console: Console | None = None
    ) -> None:
        self.total, self.status = total, status
        self.console = console or Console(file=sys.stderr, highlight=False)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._said = ""
        self._began, self._start = time.monotonic(), 0
        self._next_line = 0.0

    def on_train_begin(self, trainer: BaseTrainer) -> None:
        self._began, self._start = time.monotonic(), trainer.state.step
        self._said = FIRST_STEP_ON_GPU if trainer.mesh.device.type == "cuda" else FIRST_STEP
        if self._start < self.total and not self.console.is_terminal:
            self.console.print(f"step {self._start + 1:,} of {self.total:,} begins; {self._said}", soft_wrap=True)
        if self.console.is_terminal:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[said]}"), console=self.console)
            self._task = self._bar.add_task("training", total=self.total, completed=self._start, said=self._said)
            self._bar.start()

    def on_step_end(self, trainer: BaseTrainer, result: StepResult) -> None:
        if self._bar is not None:
            waiting = self.status()
            said = f"{self._said}, {waiting}" if waiting else self._said
            self._bar.update(self._task, completed=trainer.state.step, said=said)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A line of metrics."""
        said = summary(metrics)
        if "loss" in metrics:
            self._said = said
        if self._bar is not None:
            if "loss" not in metrics:  # an evaluation: above the bar, to stay
                self._bar.console.print(f"step {step:,}: {said}")
            return
        now = time.monotonic()
        if "loss" in metrics and now < self._next_line and step < self.total:
            return
        self._next_line = now + LINE_EVERY_S
        words = [f"step {step:,} of {self.total:,}", said, *self._left(step, now)]
        words += [status] if (status := self.status()) else []
        self.console.print(", ".join(words), soft_wrap=True)

    def close(self) -> None:
        """See `MetricWriter`; the bar ends with the training."""

    def on_train_end(self, trainer: BaseTrainer) -> None:
        self._stop()

    def on_exception(self, trainer: BaseTrainer, error: BaseException) -> None:
        self._stop()

    def _left(self, step: int, now: float) -> list[str]:
        done = step - self._start
        if done <= 0 or step >= self.total:
            return []
        return [f"{clock((now - self._began) / done * (self.total - step))} left"]

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def summary(metrics: Mapping[str, Any]) -> str:
    """`loss 2.345, grad norm 1.23, 11,820 tokens/s/GPU, MFU 41.0%, data wait 1%`, under grpo with the reward."""
    if "loss" not in metrics:
        numbers = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        return ", ".join(f"{name} {value:.4f}" for name, value in numbers.items())
    words = [f"loss {metrics['loss']:.4f}", f"grad norm {metrics['grad_norm']:.3g}"]
    if "grpo/reward" in metrics:
        words.insert(0, f"reward {metrics['grpo/reward']:.4f}")
    words.append(f"{metrics['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU")
    if "mfu" in metrics:
        words.append(f"MFU {metrics['mfu']:.1%}")
    return ", ".join([*words, f"data wait {metrics['data_wait']:.0%}"])


def clock(seconds: float) -> str:
    """`1:02:03`."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
