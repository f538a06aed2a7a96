"""Sums up steps, and writes a line of metrics every `logging.log_steps`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.errors import ResumableError
from train.callbacks.base import Callback
from train.config import LoggingConfig
from train.metric_writers import METRICS_FILE, MetricWriter, open_writers
from train.metrics import Interval, Meter
from train.plots import PLOTS_FILE, write_plots

if TYPE_CHECKING:
    from train.step import StepResult
    from train.trainer import BaseTrainer

PLOT_EVERY_S = 60.0
PLOT_SHARE = 0.002  # of the time at most, as long trainings have many lines

log = logging.getLogger("omniloom.train")


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
        self._logged = 0
        self._next_plot = float("-inf")
        self._first = meter.rank == 0

    def on_train_begin(self, trainer: BaseTrainer) -> None:
        self._logged = trainer.state.step
        if self._first:
            config = trainer.args.model_dump(mode="json")
            self.writers += open_writers(self.output_dir, self.config, trainer.state.step, config)

    def on_step_begin(self, trainer: BaseTrainer) -> None:
        self.meter.begin_step()

    def on_step_end(self, trainer: BaseTrainer, result: StepResult) -> None:
        self.meter.add(result)
        if trainer.state.step % self.config.log_steps == 0:
            self._log(trainer)
        self.meter.end_step()

    def on_evaluate(self, trainer: BaseTrainer, metrics: dict[str, float]) -> None:
        named = {name if name.startswith("eval/") else f"eval/{name}": value for name, value in metrics.items()}
        self._write(trainer, named)

    def on_save(self, trainer: BaseTrainer, path: Path) -> None:
        self._plot(force=False)

    def on_train_end(self, trainer: BaseTrainer) -> None:
        if trainer.state.step > self._logged:
            self._log(trainer)  # on all ranks, as all end at the same step

    def on_exception(self, trainer: BaseTrainer, error: BaseException) -> None:
        """After a failure the steps since the last line are lost: other ranks may never come to a reduction."""
        if trainer.should_stop and isinstance(error, ResumableError) and trainer.state.step > self._logged:
            self._log(trainer)  # all ranks stop at the same step
        self.finish()

    def _log(self, trainer: BaseTrainer) -> None:
        interval = self.meter.reduce(dead_samples=len(trainer.train_dataloader.dead))
        self._logged = trainer.state.step
        found = dict(interval.metrics)
        for listener in self.listeners:
            found |= listener(trainer.state.step, interval)
        found |= {"tokens_total": trainer.state.tokens, "samples_total": trainer.state.samples}
        self.last = found
        self._write(trainer, found)
        self._plot(force=False)

    def _write(self, trainer: BaseTrainer, metrics: Mapping[str, Any]) -> None:
        if not self._first:
            return
        now = datetime.now(UTC).isoformat(timespec="seconds")
        line = {"epoch": trainer.state.epoch, "time": now, **metrics}
        for writer in self.writers:
            writer.write(trainer.state.step, line)

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
