"""What the headline benchmark sees of a trainer: whole steps that are timed, their parts, and one step under the
profiler."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from jobs.bench.headline_profile import Watched, read_profile, start_profile, stop_profile
from jobs.bench.headline_setup import Phase
from train.callbacks.base import Callback
from train.metrics import device_memory
from train.step import StepResult
from train.step_times import StepTimes, clock_of
from train.trainer import BaseTrainer


@dataclass(frozen=True)
class Measured:
    """Of the steps of a phase, over all ranks. step_s: mean, by the host's clock; times_s: of each, on the device;
    tokens, flops: of a step and GPU; wait_s: of a step in which the device had nothing to do for want of data, as the
    trainer's metrics count it, and host_wait_s in which the host waited, most of which the device did not notice, both
    of the rank that waits most; peak, reserved: GB of the GPU that takes most; parts: name -> ms of a step on this
    rank; loss: of the last step."""

    step_s: float
    times_s: list[float]
    tokens: float
    flops: float
    wait_s: float
    host_wait_s: float
    peak: float
    reserved: float
    loss: float
    parts: dict[str, float]


class PhaseWatch(Callback):
    """Times whole steps with all callbacks, being the last one, without making the host wait between them; then one
    step under the profiler. done: is called when they are measured, before the profiler begins."""

    def __init__(self, phase: Phase, done: Callable[[BaseTrainer, PhaseWatch], None]) -> None:
        self.phase, self.done = phase, done
        self.measured: Measured | None = None
        self.watched: Watched | None = None
        self.first_step_s = 0.0
        self._times: StepTimes | None = None  # of the steps that are measured
        self._script: Iterator[None] = iter(())
        self._result: StepResult | None = None

    def on_train_begin(self, trainer: BaseTrainer) -> None:
        self._script = self._play(trainer)
        next(self._script)

    def on_step_begin(self, trainer: BaseTrainer) -> None:
        if self._times is not None:
            self._times.begin_step()

    def on_step_end(self, trainer: BaseTrainer, result: StepResult) -> None:
        self._result = result
        if self._times is not None:
            self._times.waited(result.wait_s)
        next(self._script, None)
        if self._times is not None:
            self._times.end_step()

    def _play(self, trainer: BaseTrainer) -> Iterator[None]:
        """Each yield is one step."""
        device, world = trainer.mesh.device, trainer.mesh.world_size
        began = time.perf_counter()
        for number in range(self.phase.warm):
            yield
            if not number:
                self.first_step_s = self._now(device) - began
        flops, host_wait_s, tokens, steps = 0.0, 0.0, trainer.state.tokens, self.phase.steps
        device_memory(device)  # begins anew
        with Parts(trainer, device) as parts:
            began = self._now(device)
            self._times = StepTimes(clock_of(device))
            ends = [self._mark(device)]
            for _ in range(steps):
                yield
                assert self._result is not None
                ends.append(self._mark(device))
                flops += self._result.flops
                host_wait_s += self._result.wait_s
            took = self._now(device) - began
            wait_s, self._times = self._times.idle().wait_s, None
        peak, reserved, _ = device_memory(device)
        tokens = trainer.state.tokens - tokens
        assert self._result is not None
        loss = float(self._result.loss_sum) / max(int(self._result.step_tokens), 1)
        self.measured = Measured(
            step_s=took / steps,
            times_s=[self._between(*pair) for pair in pairwise(ends)],
            tokens=tokens / steps / world,
            flops=over_ranks(flops, device, world, dist.ReduceOp.SUM) / steps / world,
            wait_s=over_ranks(wait_s, device, world, dist.ReduceOp.MAX) / steps,
            host_wait_s=over_ranks(host_wait_s, device, world, dist.ReduceOp.MAX) / steps,
            peak=over_ranks(peak / 1e9, device, world, dist.ReduceOp.MAX),
            reserved=over_ranks(reserved / 1e9, device, world, dist.ReduceOp.MAX),
            loss=over_ranks(loss, device, world, dist.ReduceOp.SUM),
            parts=parts.milliseconds(steps),
        )
        self.done(trainer, self)
        if self.phase.watched:
            profiler = start_profile(device)
            yield
            stop_profile(profiler, device)
            self.watched = read_profile(profiler, device) if trainer.mesh.rank == 0 else None

    @staticmethod
    def _mark(device: torch.device) -> Any:
        """Of what the device has been given so far."""
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def _between(first: Any, second: Any) -> float:
        return second - first if isinstance(first, float) else first.elapsed_time(second) / 1e3

    @staticmethod
    def _now(device: torch.device) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


class Parts:
    """Milliseconds of the forward passes of towers and text model, and of the optimizer, by events on the GPU; and how
    long the host took to launch them, which must be less."""

    def __init__(self, trainer: BaseTrainer, device: torch.device) -> None:
        self.marks: dict[str, list[tuple[Any, Any]]] = {}
        self.host_s: dict[str, list[float]] = {}
        self._cuda, self._began, self._handles = device.type == "cuda", dict[str, Any](), list[Any]()
        named = {"vision": "visual", "sound": "audio_tower", "text": "model"}
        model: Any = trainer.model
        self.modules = {name: getattr(model, path) for name, path in named.items() if hasattr(model, path)}
        self.optimizer = trainer.optimizer

    def __enter__(self) -> Parts:
        if self._cuda:
            for name, module in self.modules.items():
                self._handles.append(module.register_forward_pre_hook(lambda *_, n=name: self._begin(n)))
                self._handles.append(module.register_forward_hook(lambda *_, n=name: self._end(n)))
            self._handles.append(self.optimizer.register_step_pre_hook(lambda *_: self._begin("optimizer")))
            self._handles.append(self.optimizer.register_step_post_hook(lambda *_: self._end("optimizer")))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, name: str) -> None:
        self._began[name] = (self._mark(), time.perf_counter())

    def _end(self, name: str) -> None:
        mark, began = self._began.pop(name)
        self.marks.setdefault(name, []).append((mark, self._mark()))
        self.host_s.setdefault(name, []).append(time.perf_counter() - began)

    @staticmethod
    def _mark() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, steps: int) -> dict[str, float]:
        """Of a step, on the device and on the host, where the first micro-batch, for which nothing waits yet on the
        device, is told beside the mean of all."""
        found = {name: sum(a.elapsed_time(b) for a, b in pairs) / steps for name, pairs in self.marks.items()}
        for name, took in self.host_s.items():
            found[f"{name} (host)"] = 1e3 * sum(took) / steps
            if len(took) > steps:
                found[f"{name} (host, first micro-batch)"] = 1e3 * statistics.fmean(took[:: len(took) // steps])
        return found


def over_ranks(value: float, device: torch.device, world: int, operation: Any) -> float:
    if world == 1:
        return value
    found = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(found, operation)
    return float(found)
