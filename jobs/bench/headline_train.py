"""What the ranks of the headline benchmark do with the real trainer: steps that are timed, whole."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from jobs.bench.claims import Claim, at_least, at_most
from jobs.bench.headline_profile import Watched, read_profile, start_profile, stop_profile
from jobs.bench.headline_setup import TOP_LAYERS, Phase, Run, run_config
from train.callbacks.base import Callback
from train.config import OmniConfig
from train.metrics import device_memory
from train.model_build import wrap
from train.models.initialize import initializers
from train.parallel.loading import give_memory, local_part
from train.peak_flops import peak_flops
from train.step import StepResult
from train.trainer import BaseTrainer, VLMTrainer

GOAL, WAIT_GOAL = 12_000.0, 1.0  # tokens/s a GPU at 16k; percent of a step
ROOF_160K, ROOF_SHARE = 2510.0, 0.55  # of the text model with full recompute at 790 TFLOP/s, tokens/s a GPU
PEAK_BYTES = "GB at most, by the allocator"

Tell = Callable[[Claim], None]


class HeadlineTrainer(VLMTrainer):
    """Fills its parameters on the device, writes no checkpoint, and can go on with other data."""

    def build_parallel(self) -> None:
        train, mesh = self.args.train, self.mesh
        wrap(self.model, mesh, train, self.args.model.lora_config, self.args.rows_per_rank)
        give_memory(self.model, torch.device("cpu") if train.accelerator.fsdp_config.offload else mesh.device)
        fill_on_device(self.model, train.seed + mesh.rank)

    def go_on(self, config: OmniConfig, callback: Callback) -> None:
        """With the data and the batches of another configuration, the same model and optimizer."""
        self.args = config
        self.build_dataset()
        self.build_loader()
        self.build_schedule()
        self._own_callbacks = [callback]
        self.build_callbacks()
        self.train()

    def save(self, *, final: bool = False) -> Path:
        return Path(self.args.train.checkpoint.output_dir)


@torch.no_grad()
def fill_on_device(model: nn.Module, seed: int) -> None:
    """As `initialize` distributes them, drawn where they lie: other values than those of a run, at once."""
    parameters = dict(model.named_parameters())
    torch.manual_seed(seed)
    for name, rule in initializers(model).items():
        part = local_part(parameters[name])
        if rule.kind == "normal":
            part.normal_(0.0, rule.std)
        elif rule.kind == "uniform":
            part.uniform_(-rule.bound, rule.bound)
        else:
            part.fill_(float(rule.kind == "ones"))


@dataclass(frozen=True)
class Measured:
    """Of the steps of a phase, over all ranks. step_s: mean, by the host's clock; times_s: of each, on the device;
    tokens, flops: of a step and GPU; wait_s: for data, of a step, the rank that waits most; peak, reserved: GB of the
    GPU that takes most; parts: name -> ms of a step on this rank; loss: of the last step."""

    step_s: float
    times_s: list[float]
    tokens: float
    flops: float
    wait_s: float
    peak: float
    reserved: float
    loss: float
    parts: dict[str, float]
    watched: Watched | None = None


class PhaseWatch(Callback):
    """Times whole steps with all callbacks, being the last one, without making the host wait between them; then one
    step under the profiler."""

    def __init__(self, run: Run, phase: Phase) -> None:
        self.run, self.phase = run, phase
        self.measured: Measured | None = None
        self.first_step_s = 0.0
        self._script: Iterator[None] = iter(())
        self._result: StepResult | None = None

    def on_train_begin(self, trainer: BaseTrainer) -> None:
        self._script = self._play(trainer)
        next(self._script)

    def on_step_end(self, trainer: BaseTrainer, result: StepResult) -> None:
        self._result = result
        next(self._script, None)

    def _play(self, trainer: BaseTrainer) -> Iterator[None]:
        """Each yield is one step."""
        device, world = trainer.mesh.device, trainer.mesh.world_size
        began = time.perf_counter()
        for number in range(self.phase.warm):
            yield
            if not number:
                self.first_step_s = self._now(device) - began
        flops, wait_s, tokens, steps = 0.0, 0.0, trainer.state.tokens, self.phase.steps
        device_memory(device)  # begins anew
        with Parts(trainer, device) as parts:
            began = self._now(device)
            ends = [self._mark(device)]
            for _ in range(steps):
                yield
                assert self._result is not None
                ends.append(self._mark(device))
                flops += self._result.flops
                wait_s += self._result.wait_s
            took = self._now(device) - began
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
            peak=over_ranks(peak / 1e9, device, world, dist.ReduceOp.MAX),
            reserved=over_ranks(reserved / 1e9, device, world, dist.ReduceOp.MAX),
            loss=over_ranks(loss, device, world, dist.ReduceOp.SUM),
            parts=parts.milliseconds(steps),
        )
        if self.phase.watched:
            profiler = start_profile(device)
            yield
            stop_profile(profiler, device)
            watched = read_profile(profiler, device) if trainer.mesh.rank == 0 else None
            self.measured = replace(self.measured, watched=watched)

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


def measure_phases(run: Run, tell: Tell) -> None:
    """All phases of a run with one trainer. tell: on rank 0 the claims of each at once."""
    began = time.perf_counter()
    trainer: HeadlineTrainer | None = None
    for phase in run.phases:
        config = run_config(run, phase)
        steps = phase.warm + phase.steps + phase.watched
        config = config.model_copy(update={"train": config.train.model_copy(update={"max_steps": steps})})
        watch = PhaseWatch(run, phase)
        if trainer is None:
            trainer = HeadlineTrainer(config)
            trainer.build()
            built_s = time.perf_counter() - began
            if trainer.mesh.rank == 0:
                title = f"{run.part}: trainer built, weights drawn"
                tell(Claim(title, round(built_s, 1), "s", "", None, trainer.mesh.describe()))
        trainer.go_on(config, watch)
        assert watch.measured is not None
        if trainer.mesh.rank == 0:
            for claim in phase_claims(run, phase, watch, trainer):
                tell(claim)
        gc.collect()
        if trainer.mesh.device.type == "cuda":
            torch.cuda.empty_cache()


def phase_claims(run: Run, phase: Phase, watch: PhaseWatch, trainer: HeadlineTrainer) -> list[Claim]:
    """Of one phase."""
    found = watch.measured
    assert found is not None
    rate = found.tokens / found.step_s
    name, said = f"{run.part}: {phase.name}", conditions(run, phase, trainer)
    times = ", ".join(f"{t:.3f}" for t in found.times_s)
    details = f"step {found.step_s:.3f} s ({times}); first step {watch.first_step_s:.1f} s; loss {found.loss:.4f}; "
    details += "".join(f"{part} {ms:.0f} ms, " for part, ms in found.parts.items()) + said
    claims = [speed_claim(run, phase, name, rate, details)]
    device = trainer.mesh.device
    peak = peak_flops(device)
    tflops = found.flops / found.step_s / 1e12
    title = f"{name}: model FLOPs with towers, without recompute"
    claims.append(Claim(title, round(tflops, 2), "TFLOP/s a GPU", "", None, f"{found.flops / 1e12:.1f} TFLOP a step"))
    if peak is not None:
        mfu = 100 * tflops * 1e12 / peak
        also = f"{tflops / 7.9:.1f} % of the 790 TFLOP/s that a large product reaches"
        claims.append(Claim(f"{name}: MFU with towers", round(mfu, 2), "%", "", None, f"of {peak / 1e12:g}; {also}"))
    claims.append(
        Claim(f"{name}: memory", round(found.peak, 2), PEAK_BYTES, "", None, f"{found.reserved:.2f} reserved")
    )
    share = 100 * found.wait_s / found.step_s
    workers = trainer.args.data.dataloader.num_workers
    waited = f"{1e3 * found.wait_s:.1f} ms of a step; {workers} loader processes a GPU"
    wait = at_most(f"{name}: waiting for data", share, WAIT_GOAL, "%", waited)
    claims.append(replace(wait, met=None) if run.quick else wait)
    if found.watched is not None:
        claims += watched_claims(run, name, found.watched)
    return claims


def speed_claim(run: Run, phase: Phase, name: str, rate: float, details: str) -> Claim:
    whole = not run.quick and run.layers == TOP_LAYERS
    if whole and run.part == "160k":
        share = f"{100 * rate / ROOF_160K:.1f} % of {ROOF_160K:g}; {details}"
        return at_least(name, rate, ROOF_SHARE * ROOF_160K, "tokens/s a GPU", share)
    if whole and run.part == "full" and phase.micro > 1 and phase.tokens == 16384:
        return at_least(name, rate, GOAL, "tokens/s a GPU", details)
    return Claim(name, round(rate, 1), "tokens/s a GPU", "", None, details)


def watched_claims(run: Run, name: str, watched: Watched) -> list[Claim]:
    """Communication and gaps of the step under the profiler; the table of its kernels is printed and written."""
    c = watched.communication
    kinds = ", ".join(f"{kind} {ms:.1f}" for kind, ms in sorted(c.by_kind.items()))
    said = f"{c.exposed:.1f} of {c.span:.1f} ms; all {c.total:.1f} ms: {kinds or 'none'} ms; rank 0, profiled"
    file = Path(run.out) / f"profile_{run.part}_{name.partition(': ')[2].replace(' ', '_')}.txt"
    file.write_text(watched.table)
    print(watched.table, flush=True)
    span = max(c.span, 1e-9)
    return [
        Claim(f"{name}: communication that nothing overlaps", round(100 * c.exposed / span, 2), "%", "", None, said),
        Claim(f"{name}: no kernel runs", round(100 * watched.idle / span, 2), "%", "", None, f"{watched.idle:.1f} ms"),
    ]


def conditions(run: Run, phase: Phase, trainer: HeadlineTrainer) -> str:
    """What was trained, on what."""
    train, data = trainer.args.train, run.documents[phase.documents]
    towers = "towers trained" if not (train.freeze_vit or train.freeze_audio_tower) else "towers frozen"
    optimizer, model = train.optimizer, trainer.args.model
    what = "full fine-tune" if model.lora_config is None else f"LoRA r={model.lora_config.rank}"
    media = f"{data.frames} pictures of {data.width}x{data.height} and {data.seconds:g} s of sound each"
    settings = "; ".join(f"{key} {value}" for key, value in run.settings.items() if key != "model.lora_config")
    device = trainer.mesh.device
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return (
        f"{what}, {run.layers} layers, {towers}; {optimizer.type}, masters {optimizer.master_dtype}, states "
        f"{optimizer.state_dtype}; {phase.micro} x {phase.tokens} tokens a step and rank, documents of {data.tokens} "
        f"({media}); {kernels(trainer)}; {trainer.mesh.describe()}; {settings or 'no other setting'}; {place}, "
        f"torch {torch.__version__}"
    )


def kernels(trainer: BaseTrainer) -> str:
    """Backends of the operations, in one line."""
    lines = (" ".join(line.split()) for line in trainer.ops.describe().splitlines())
    return ", ".join(line for line in lines if line)


def end_group() -> None:
    """Leaves the process group, if there is one."""
    with suppress(ValueError, RuntimeError):
        if dist.is_initialized():
            dist.destroy_process_group()
