"""torch's profiler over a few steps of rank 0; the trace opens in Perfetto or chrome://tracing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

from train.callbacks.base import Callback
from train.config import ProfileConfig

if TYPE_CHECKING:
    from train.step import StepResult
    from train.trainer import BaseTrainer

log = logging.getLogger("omniloom.train")


class ProfilerCallback(Callback):
    """Records steps start_step to end_step - 1, counted from 0. Whatever happens, the profiler is stopped, and what it
    has recorded is written."""

    def __init__(self, config: ProfileConfig, output_dir: Path, *, rank: int = 0) -> None:
        self.config, self.rank = config, rank
        self.folder = Path(config.trace_dir) if config.trace_dir else output_dir / "profile"
        self._profiler: profile | None = None
        self._done = not config.enable or rank != 0

    def on_step_begin(self, trainer: BaseTrainer) -> None:
        inside = self.config.start_step <= trainer.state.step < self.config.end_step
        if self._done or self._profiler is not None or not inside:
            return
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        self._profiler = profile(
            activities=activities,
            record_shapes=self.config.record_shapes,
            profile_memory=self.config.profile_memory,
            with_stack=self.config.with_stack,
        )
        self._profiler.start()

    def on_step_end(self, trainer: BaseTrainer, result: StepResult) -> None:
        if self._profiler is not None and trainer.state.step >= self.config.end_step:
            self._stop(trainer.state.step)

    def on_train_end(self, trainer: BaseTrainer) -> None:
        self._stop(trainer.state.step)

    def on_exception(self, trainer: BaseTrainer, error: BaseException) -> None:
        self._stop(trainer.state.step)

    def _stop(self, step: int) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self._done = True
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profiler.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / f"trace_step_{step}.json.gz"
        profiler.export_chrome_trace(str(trace))
        log.info("%s: trace of the steps up to %d", trace, step)
