"""What the ranks of the headline benchmark do with the real trainer: steps that are timed, whole."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from jobs.bench.claims import Claim, at_least, at_most
from jobs.bench.headline_profile import Watched
from jobs.bench.headline_setup import TOP_LAYERS, Phase, Run, run_config
from jobs.bench.headline_watch import PhaseWatch
from train.callbacks.base import Callback
from train.config import OmniConfig
from train.model_build import wrap
from train.models.initialize import initializers
from train.parallel.loading import give_memory, local_part
from train.peak_flops import peak_flops
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


def measure_phases(run: Run, tell: Tell) -> None:
    """All phases of a run with one trainer. tell: on rank 0 the claims of each at once."""
    began = time.perf_counter()
    trainer: HeadlineTrainer | None = None
    for phase in run.phases:
        config = run_config(run, phase)
        steps = phase.warm + phase.steps + phase.watched
        config = config.model_copy(update={"train": config.train.model_copy(update={"max_steps": steps})})
        watch = PhaseWatch(phase, partial(tell_measured, run, phase, tell))
        if trainer is None:
            trainer = HeadlineTrainer(config)
            trainer.build()
            built_s = time.perf_counter() - began
            if trainer.mesh.rank == 0:
                title = f"{run.part}: trainer built, weights drawn"
                tell(Claim(title, round(built_s, 1), "s", "", None, trainer.mesh.describe()))
        trainer.go_on(config, watch)
        if watch.watched is not None:
            for claim in watched_claims(run, phase, watch.watched):
                tell(claim)
        gc.collect()
        if trainer.mesh.device.type == "cuda":
            torch.cuda.empty_cache()


def tell_measured(run: Run, phase: Phase, tell: Tell, trainer: BaseTrainer, watch: PhaseWatch) -> None:
    """On rank 0 what is known of a phase before a step is watched, should that never end."""
    if trainer.mesh.rank == 0:
        for claim in phase_claims(run, phase, watch, trainer):
            tell(claim)


def phase_claims(run: Run, phase: Phase, watch: PhaseWatch, trainer: BaseTrainer) -> list[Claim]:
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
    waited = f"{1e3 * found.wait_s:.1f} ms of a step; the host, which is ahead, {1e3 * found.host_wait_s:.1f} ms; "
    waited += f"{workers} loader processes a GPU"
    wait = at_most(f"{name}: waiting for data", share, WAIT_GOAL, "%", waited)
    claims.append(replace(wait, met=None) if run.quick else wait)
    return claims


def speed_claim(run: Run, phase: Phase, name: str, rate: float, details: str) -> Claim:
    whole = not run.quick and run.layers == TOP_LAYERS
    if whole and run.part == "160k":
        share = f"{100 * rate / ROOF_160K:.1f} % of {ROOF_160K:g}; {details}"
        return at_least(name, rate, ROOF_SHARE * ROOF_160K, "tokens/s a GPU", share)
    if whole and run.part in ("full", "half") and phase.micro > 1 and phase.tokens == 16384:
        return at_least(name, rate, GOAL, "tokens/s a GPU", details)
    return Claim(name, round(rate, 1), "tokens/s a GPU", "", None, details)


def watched_claims(run: Run, phase: Phase, watched: Watched) -> list[Claim]:
    """Communication and gaps of the step under the profiler; the table of its kernels is printed and written."""
    c, name = watched.communication, f"{run.part}: {phase.name}"
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


def conditions(run: Run, phase: Phase, trainer: BaseTrainer) -> str:
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
