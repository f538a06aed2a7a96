"""Part `overhead`: the trainer's step against a bare loop, and whether anything in a step waits for the device."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from jobs.bench.claims import Claim, at_most
from jobs.bench.train_setup import MAX_NORM, WIDE, Bench, Size, train_config, write_model
from jobs.bench.train_waits import host_waits
from train.callbacks.base import Callback
from train.config import OmniConfig
from train.data.loader import StepBatches, TrainLoader
from train.data.model_inputs import model_inputs
from train.loss import step_scale
from train.models.inputs import ModelInputs
from train.parallel.loading import local_part
from train.step import StepResult
from train.trainer import BaseTrainer, VLMTrainer

OVERHEAD = 3.0  # percent
PREPARED = 4  # steps whose batches are kept on the device
NEVER = 1_000_000  # of log_steps
WINDOW = "omniloom steps"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
SHOWN = (
    "aten::item",
    "aten::_local_scalar_dense",
    "cudaMemcpyAsync",
    "cudaHostAlloc",
    "cudaMalloc",
    "cudaLaunchKernel",
)


@dataclass(frozen=True)
class Plan:
    """Steps: before measuring, of a round (multiples of PREPARED, so that all rounds are alike), under the profiler."""

    warm: int
    rounds: int
    steps: int
    watched: int

    @property
    def total(self) -> int:
        return self.warm + self.rounds * self.steps + self.watched


class PreparedLoader(TrainLoader):
    """Gives the batches of the first steps again and again, as if no step ever waited for data."""

    prepared: list[StepBatches] | None = None

    def steps(self) -> list[StepBatches]:
        """Batches and features on the device."""
        if self.prepared is None:
            with closing(super().__iter__()) as found:  # type: ignore[type-var]
                self.prepared = list(islice(found, PREPARED))
        return self.prepared

    def __iter__(self) -> Iterator[StepBatches]:
        steps = self.steps()
        for n in range(self.total_steps()):
            step = steps[n % len(steps)]
            yield replace(step, micro_batches=list(step.micro_batches), wait_s=0.0)


class MeasuredTrainer(VLMTrainer):
    """Writes no checkpoint at its end. prepared: takes the batches of a few steps again and again."""

    def __init__(self, config: OmniConfig, watch: Callback, *, prepared: bool) -> None:
        super().__init__(config, callbacks=[watch])
        self.prepared = prepared

    def build_loader(self) -> None:
        super().build_loader()
        if self.prepared:
            data, train, made = self.args.data, self.args.train, self.train_dataloader
            self.train_dataloader = PreparedLoader(
                self.sources, self.plans, data, train, self.assets, made.rank, made.to, self.model_inputs
            )

    def save(self, *, final: bool = False) -> Path:
        return Path(self.args.train.checkpoint.output_dir)


class BareLoop:
    """Forward, backward, clipping, optimizer, of the trainer's own model, on inputs that are ready."""

    def __init__(self, trainer: BaseTrainer) -> None:
        loader = trainer.train_dataloader
        assert isinstance(loader, PreparedLoader)
        self.model: nn.Module = trainer.model
        self.optimizer: Optimizer = trainer.optimizer
        self.inputs = [_inputs(trainer, step) for step in loader.steps()]
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]

    def run(self, steps: int) -> None:
        for n in range(steps):
            for inputs in self.inputs[n % len(self.inputs)]:
                self.model(inputs).loss.backward()
            clip([local_part(p.grad) for p in self.parameters if p.grad is not None])
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def clip(gradients: list[Tensor]) -> None:
    """To a norm of 1."""
    norm = torch.stack(torch._foreach_norm(gradients)).norm()
    torch._foreach_mul_(gradients, (MAX_NORM / (norm + 1e-6)).clamp(max=1.0))


def _inputs(trainer: BaseTrainer, step: StepBatches) -> list[ModelInputs]:
    scale = step_scale(step.micro_batches, trainer.mesh)
    loss, aux = scale.loss_scale, scale.aux_scale
    return [model_inputs(b, trainer.assets, loss_scale=loss, aux_scale=aux) for b in step.micro_batches]


class Stopwatch(Callback):
    """Rounds of the trainer's steps and of the bare loop's by turns, then the profiler. Comes last, so that whole steps
    with all callbacks lie between two of its turns."""

    def __init__(self, bench: Bench, plan: Plan) -> None:
        self.bench, self.plan = bench, plan
        self.trainer_s: list[float] = []
        self.bare_s: list[float] = []
        self.counts: Counter[str] = Counter()
        self._script: Iterator[None] = iter(())

    def on_train_begin(self, trainer: BaseTrainer) -> None:
        self._script = self._play(trainer)
        next(self._script)

    def on_step_end(self, trainer: BaseTrainer, result: StepResult) -> None:
        next(self._script, None)

    def _play(self, trainer: BaseTrainer) -> Iterator[None]:
        """Each yield is one step of the trainer."""
        bare = BareLoop(trainer)
        for _ in range(self.plan.warm):
            yield
        bare.run(self.plan.warm)
        for _ in range(self.plan.rounds):
            began = self._now()
            for _ in range(self.plan.steps):
                yield
            between = self._now()
            bare.run(self.plan.steps)
            self.bare_s.append((self._now() - between) / self.plan.steps)
            self.trainer_s.append((between - began) / self.plan.steps)
        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.bench.device.type == "cuda" else [])
        with profile(activities=kinds) as profiler:
            self.bench.wait()
            with record_function(WINDOW):
                for _ in range(self.plan.watched):
                    yield
        self.counts = counted(profiler)

    def _now(self) -> float:
        self.bench.wait()
        return time.perf_counter()


def counted(profiler: profile) -> Counter[str]:
    """How often each operation and call of the runtime began inside the window, on any thread."""
    events: list[Any] = list(profiler.events() or ())
    windows = [e.time_range for e in events if e.name == WINDOW and e.device_type == torch.autograd.DeviceType.CPU]
    return Counter(e.name for e in events if any(w.start <= e.time_range.start <= w.end for w in windows))


class Watch(Callback):
    """Some steps with the real loader: their time, then which lines wait for the device."""

    def __init__(self, bench: Bench, plan: Plan) -> None:
        self.bench, self.plan = bench, plan
        self.step_s = self.wait_s = 0.0
        self.found: Counter[tuple[str, str]] = Counter()
        self._script: Iterator[None] = iter(())

    def on_train_begin(self, trainer: BaseTrainer) -> None:
        self._script = self._play(trainer)
        next(self._script)

    def on_step_end(self, trainer: BaseTrainer, result: StepResult) -> None:
        next(self._script, None)

    def _play(self, trainer: BaseTrainer) -> Iterator[None]:
        for _ in range(self.plan.warm):
            yield
        self.bench.wait()
        began, waited, steps = time.perf_counter(), trainer.train_dataloader.wait_s, self.plan.rounds * self.plan.steps
        for _ in range(steps):
            yield
        self.bench.wait()
        self.step_s = (time.perf_counter() - began) / steps
        self.wait_s = (trainer.train_dataloader.wait_s - waited) / steps
        with host_waits(self.bench.device) as found:
            for _ in range(self.plan.watched):
                yield
        self.found = found


def measure_overhead(bench: Bench, claims: list[Claim]) -> None:
    """Of the small model; with its real loader, too."""
    plan = Plan(1, 2, 1, 1) if bench.quick else Plan(12, 5, 16, 4)
    _against_bare(bench, bench.size, "overhead", plan, claims)
    _real_loader(bench, replace(plan, rounds=1), claims)


def measure_wide(bench: Bench, claims: list[Claim]) -> None:
    """The same of a model whose steps keep a GPU busy."""
    plan = Plan(1, 1, 1, 1) if bench.quick else Plan(8, 3, 12, 3)
    _against_bare(bench, replace(bench.size, hidden=96) if bench.quick else WIDE, "wide", plan, claims)


def _against_bare(bench: Bench, size: Size, name: str, plan: Plan, claims: list[Claim]) -> None:
    percent = _compared(bench, size, name, plan, claims, snapshots=True)
    if percent > OVERHEAD and bench.device.type == "cuda":  # how much of it is the record for memory snapshots
        _compared(bench, size, name, plan, claims, snapshots=False)


def _compared(bench: Bench, size: Size, name: str, plan: Plan, claims: list[Claim], *, snapshots: bool) -> float:
    """Percent by which the trainer's step is longer."""
    watch = Stopwatch(bench, plan)
    _train(bench, size, f"{name}_{snapshots}", watch, plan.total, prepared=True, snapshots=snapshots)
    ratios = [100 * (ours / bare - 1) for ours, bare in zip(watch.trainer_s, watch.bare_s, strict=True)]
    percent = statistics.median(ratios)
    bare_ms, ours_ms = (1e3 * statistics.median(found) for found in (watch.bare_s, watch.trainer_s))
    spread = f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds of {plan.steps} steps"
    said = f"{ours_ms:.2f} ms over {bare_ms:.2f} ms, {spread}; {size}; {bench.place}"
    title = f"{name}: the trainer's step over a bare loop" + ("" if snapshots else ", memory.snapshot_on_error off")
    print(f"{title}: {percent:.2f} %, {said}", flush=True)
    claims.append(_on_gpu(bench, at_most(title, percent, OVERHEAD, "%", said)))
    if snapshots:
        claims.append(_waits(bench, name, watch.counts, plan.watched))
    return percent


def _on_gpu(bench: Bench, claim: Claim) -> Claim:
    """Without a bound on a CPU."""
    return claim if bench.device.type == "cuda" else replace(claim, met=None)


def _train(
    bench: Bench, size: Size, name: str, watch: Callback, steps: int, *, prepared: bool, snapshots: bool = True
) -> None:
    model = write_model(bench.out / f"overhead/config_{name}", size)
    config = train_config(
        bench,
        size,
        f"overhead/run_{name}",
        {"config_path": str(model)},
        steps,
        logging={"log_steps": NEVER, "plots": False},
        memory={"snapshot_on_error": snapshots},
    )
    MeasuredTrainer(config, watch, prepared=prepared).train()


def _waits(bench: Bench, name: str, counts: Counter[str], steps: int) -> Claim:
    title = f"{name}: waits for the device in a step, by torch.profiler"
    kinds = [kind for kind in (*WAITS, *SHOWN) if counts[kind]]
    said = ", ".join(f"{kind} {counts[kind] / steps:g}" for kind in kinds) or "none"
    said = f"{said} per step of {steps}; aten::item alone reads from the CPU; log_steps above the window"
    return _on_gpu(bench, at_most(title, sum(counts[kind] for kind in WAITS) / steps, 0, "", said))


def _real_loader(bench: Bench, plan: Plan, claims: list[Claim]) -> None:
    """Lines of the trainer's own threads and of the loader's, told apart."""
    watch = Watch(bench, plan)
    _train(bench, bench.size, "loader", watch, plan.total, prepared=False)
    said = f"{1e3 * watch.wait_s:.2f} ms of it waiting for data, {bench.workers} workers; {bench.size}; {bench.place}"
    title = "overhead: a step of the trainer with its real loader"
    claims.append(Claim(title, round(1e3 * watch.step_s, 2), "ms", "", None, said))
    for loader, who in ((False, "the trainer's threads"), (True, "the loader's threads")):
        found = Counter({line: n for (kind, line), n in watch.found.items() if (kind == "loader") == loader})
        title = f"overhead: waits for the device in a step, {who}, by torch's sync debug mode"
        said = ", ".join(f"{line} x{n}" for line, n in found.most_common(6)) or f"none in {plan.watched} steps"
        claim = _on_gpu(bench, at_most(title, found.total() / plan.watched, 0, "", said))
        claims.append(replace(claim, met=None, goal="") if loader else claim)
