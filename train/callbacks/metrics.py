"""Sums up steps, and writes a line of metrics every `logging.log_steps`.

The line of a step is written while the device works on the next one, which it was given before the host asked for the
line: the host is up to one step ahead, and the device never waits for it. On a CPU there is nothing to wait for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.errors import ResumableError
from train.callbacks.base import Callback
from train.config import LoggingConfig
from train.metric_writers import METRICS_FILE, MetricWriter, open_writers
from train.metrics import Interval, Meter, PendingInterval
from train.plots import PLOTS_FILE, write_plots

if TYPE_CHECKING:
    from train.step import StepResult
    from train.trainer import BaseTrainer

PLOT_EVERY_S = 60.0
PLOT_SHARE = 0.002  # of the time at most, as long trainings have many lines

log = logging.getLogger("omniloom.train")


@dataclass(frozen=True)
class _Untold:
    """A line that is to be written, of the moment when its step was taken."""

    step: int
    epoch: int
    totals: dict[str, int]
    interval: PendingInterval


class MetricsCallback(Callback):
    """Every rank has one, as the sums are over all. Rank 0 writes.

    listeners: told each interval, on every rank; what they return joins the metrics. writers: beside those of the
    configuration.
    """

    def __init__(
        self,
        meter: Meter,
        config: LoggingConfig,
        output_dir: Path,
        *,
        listeners: Sequence[Callable[[int, Interval], Mapping[str, float]]] = (),
        writers: Sequence[MetricWriter] = (),
    ) -> None:
        self.meter, self.config, self.output_dir = meter, config, output_dir
        self.listeners, self.writers = tuple(listeners), list(writers)
        self.last: dict[str, Any] = {}  # metrics of the last line
        self._logged = 0  # the step at which the last interval ended
        self._untold: _Untold | None = None
        self._next_plot = float("-inf")
        self._first = meter.rank == 0

    def on_train_begin(self, trainer: BaseTrainer) -> None:
        self._logged, self._untold = trainer.state.step, None
        self.meter.times.start()
        if self._first:
            config = trainer.args.model_dump(mode="json")
            state = trainer.state
            evaluated = state.evaluated_step == state.step
            self.writers += open_writers(self.output_dir, self.config, state.step, config, evaluated=evaluated)

    def on_step_begin(self, trainer: BaseTrainer) -> None:
        self.meter.times.begin_step()

    def on_step_end(self, trainer: BaseTrainer, result: StepResult) -> None:
        self._tell()  # of an earlier step: the device has this one to go on with
        self.meter.add(result)
        if trainer.state.step % self.config.log_steps == 0:
            interval = self._end_interval(trainer)
            if interval.ready():
                self._tell()
        self.meter.times.end_step()

    def on_evaluate(self, trainer: BaseTrainer, metrics: dict[str, float]) -> None:
        self._tell()  # steps rise from line to line
        named = {name if name.startswith("eval/") else f"eval/{name}": value for name, value in metrics.items()}
        self._write(trainer.state.step, trainer.state.epoch, named)

    def on_before_save(self, trainer: BaseTrainer) -> None:
        self._tell()  # a checkpoint of a step whose line is lost would be gone on from

    def on_save(self, trainer: BaseTrainer, path: Path) -> None:
        self._plot(force=False)

    def on_train_end(self, trainer: BaseTrainer) -> None:
        self._tell_rest(trainer)  # on all ranks, as all end at the same step

    def on_exception(self, trainer: BaseTrainer, error: BaseException) -> None:
        """After a failure the steps since the last interval are lost, as other ranks may never come to a reduction; and
        what is on its way is not waited for, as it may never come."""
        try:
            if trainer.should_stop and isinstance(error, ResumableError):
                self._tell_rest(trainer)  # all ranks stop at the same step
            elif self._untold is not None and self._untold.interval.ready():
                self._tell()
        finally:
            self.finish()

    def _end_interval(self, trainer: BaseTrainer) -> PendingInterval:
        state = trainer.state
        interval = self.meter.end_interval(dead_samples=len(trainer.train_dataloader.dead))
        totals = {"tokens_total": state.tokens, "samples_total": state.samples}
        self._untold, self._logged = _Untold(state.step, state.epoch, totals, interval), state.step
        return interval

    def _tell_rest(self, trainer: BaseTrainer) -> None:
        self._tell()
        if trainer.state.step > self._logged:
            self._end_interval(trainer)
            self._tell()

    def _tell(self) -> None:
        """Writes the line that is to be written, if there is one. Waits for the device to be done with its step."""
        untold, self._untold = self._untold, None
        if untold is None:
            return
        interval = untold.interval.finish()
        found = dict(interval.metrics)
        for listener in self.listeners:
            found |= listener(untold.step, interval)
        found |= untold.totals
        self.last = found
        self._write(untold.step, untold.epoch, found)
        self._plot(force=False)

    def _write(self, step: int, epoch: int, metrics: Mapping[str, Any]) -> None:
        if not self._first:
            return
        now = datetime.now(UTC).isoformat(timespec="seconds")
        line = {"epoch": epoch, "time": now, **metrics}
        for writer in self.writers:
            writer.write(step, line)

    def _plot(self, *, force: bool) -> None:
        if not (self._first and self.config.plots) or (not force and time.monotonic() < self._next_plot):
            return
        began = time.monotonic()
        title = f"Training: {'/'.join(self.output_dir.absolute().parts[-2:])}"
        try:
            write_plots(self.output_dir / METRICS_FILE, self.output_dir / PLOTS_FILE, title)
        except OSError as error:
            log.warning("%s: the curves could not be drawn: %s", self.output_dir, error)
        now = time.monotonic()
        self._next_plot = now + max(PLOT_EVERY_S, (now - began) / PLOT_SHARE)

    def finish(self) -> None:
        """No more is coming: draws the curves, closes the writers."""
        self._plot(force=True)
        writers, self.writers = self.writers, []
        for writer in writers:
            try:
                writer.close()
            except Exception as error:  # noqa: BLE001 (the others must be closed; the metrics are on disk)
                log.warning("%s could not be closed: %s", type(writer).__name__, error)


class MetricsEnd(Callback):
    """Comes behind all that has metrics to tell when training ends, such as a last evaluation."""

    def __init__(self, metrics: MetricsCallback) -> None:
        self.metrics = metrics

    def on_train_end(self, trainer: BaseTrainer) -> None:
        self.metrics.finish()
