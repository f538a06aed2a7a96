"""What the steps since the last log line come to, over all ranks.

Adding a step waits for nothing: losses stay device tensors. At a log interval every sum goes into one vector, which one
all-reduce adds up; what is wanted per rank (memory, waiting) has a place of its own for each rank in it. The vector is
then on its way to the host, which may give the device another step before it looks. Names and units:
train.metric_names.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from train.data.collate import MODALITIES
from train.host_copy import HostCopy, HostValues
from train.objective import objective_metrics
from train.peak_flops import peak_flops
from train.step import StepResult
from train.step_times import Clock, Idle, Span, StepTimes, clock_of

PER_RANK = ("wait_s", "allocated", "reserved")  # of which the largest is reported
OBJECTIVE = "objective/"  # before the names of its sums
GIGABYTE = 1e9


@dataclass(frozen=True)
class Interval:
    """The sums of an interval over all ranks. source_loss: name -> (sum of losses, labelled tokens), of sources that
    had any; expert_counts: float64 [layers, E], None without experts; metrics: by name."""

    steps: int
    source_loss: dict[str, tuple[float, int]]
    expert_counts: Tensor | None
    metrics: dict[str, Any]


@dataclass(frozen=True)
class PendingInterval:
    """An interval whose sums are on their way. values: of all ranks; make: what they say."""

    values: HostValues
    make: Callable[[list[float]], Interval]

    def ready(self) -> bool:
        """Whether `finish` waits for nothing; may differ between ranks."""
        return self.values.ready()

    def finish(self) -> Interval:
        """Waits for the device to end the interval, and for nothing that it was given later. No collective call."""
        return self.make(self.values.get())


@dataclass
class _Sums:
    steps: int = 0
    counts: dict[str, float] = field(default_factory=dict)
    loss: Tensor | None = None
    aux: Tensor | None = None
    norm_max: Tensor | None = None
    norm: Tensor | None = None
    sources: dict[str, Tensor] = field(default_factory=dict)
    experts: Tensor | None = None
    lr: dict[str, float] = field(default_factory=dict)
    objective: dict[str, Tensor] = field(default_factory=dict)


class Meter:
    """Of one rank; all ranks add the same steps and call `end_interval` together.

    sources: names of all of the data, in one order on every rank; group: of the all-reduce, of tensors on `device`
    (None = the default group); clock: None = that of the device; copy: to the host.
    """

    def __init__(
        self,
        sources: Sequence[str],
        device: torch.device,
        *,
        rank: int = 0,
        world_size: int = 1,
        group: dist.ProcessGroup | None = None,
        clock: Clock | None = None,
        copy: Callable[[Tensor], HostValues] = HostCopy,
    ) -> None:
        self.sources, self.device = tuple(sources), device
        self.rank, self.world_size, self.group = rank, world_size, group
        self.peak = peak_flops(device)
        self.times, self._copy = StepTimes(clock or clock_of(device)), copy
        self._sums = _Sums()

    def add(self, result: StepResult) -> None:
        """Adds a step, without waiting for the device."""
        sums = self._sums
        sums.steps += 1
        sums.loss = _plus(sums.loss, result.loss_sum)
        if result.aux_loss is not None:
            sums.aux = _plus(sums.aux, result.aux_loss)
        norm = result.grad_norm.detach().double()
        sums.norm, sums.norm_max = norm, norm if sums.norm_max is None else torch.maximum(sums.norm_max, norm)
        sums.lr = result.lr
        self.times.waited(result.wait_s)
        counts = {name: getattr(result, name) for name in ("label_tokens", "tokens", "samples", "padding", "flops")}
        counts |= {f"tokens/{kind}": result.modality_tokens.get(kind, 0) for kind in MODALITIES}
        for name, of_source in result.source_loss.items():
            if name not in self.sources:
                raise ValueError(f"a step has losses of {name!r}, which is none of {', '.join(self.sources)}")
            sums.sources[name] = _plus(sums.sources.get(name), of_source.total)
            counts[f"source/{name}"] = of_source.tokens
        for name, value in counts.items():
            sums.counts[name] = sums.counts.get(name, 0) + value
        for name, value in result.objective_sums.items():
            sums.objective[name] = _plus(sums.objective.get(name), value)
        if result.expert_counts is not None:
            sums.experts = _plus(sums.experts, result.expert_counts)

    def end_interval(self, dead_samples: int = 0) -> PendingInterval:
        """Ends the interval: its sums over all ranks, which come later. The one collective call. Waits at most for the
        device to begin the last step."""
        sums, self._sums = self._sums, _Sums()
        if not sums.steps:
            raise ValueError("no step since the last interval")
        idle = self.times.idle()
        names, vector = self._vector(sums, idle, dead_samples)
        if self.world_size > 1:
            dist.all_reduce(vector, group=self.group)
        norms = torch.stack([_or_zero(sums.norm, self.device), _or_zero(sums.norm_max, self.device)])
        span = self.times.cut()  # reached when the copy is there
        return PendingInterval(self._copy(torch.cat([vector, norms])), partial(self._interval, names, sums, idle, span))

    def _interval(self, names: list[str], sums: _Sums, idle: Idle, span: Span, values: list[float]) -> Interval:
        total = dict(zip(names, values, strict=False))
        metrics = {**self._means(total, sums), "grad_norm": values[-2], "grad_norm_max": values[-1]}
        metrics |= self._rates(total, sums.steps, max(span.seconds() - idle.pause_s, 1e-9), idle.pause_s)
        sources = {
            name: (total[f"source_loss/{name}"], round(total[f"source/{name}"]))
            for name in self.sources
            if total[f"source/{name}"]
        }
        experts = None
        if sums.experts is not None:
            flat = values[len(names) : len(names) + sums.experts.numel()]
            experts = torch.tensor(flat, dtype=torch.float64).reshape(sums.experts.shape)
            metrics |= expert_load(experts)
        return Interval(sums.steps, sources, experts, metrics)

    def _vector(self, sums: _Sums, idle: Idle, dead_samples: int) -> tuple[list[str], Tensor]:
        """float64 on the device: the named sums, then the experts' counts."""
        counts = ["label_tokens", "tokens", "samples", "padding", "flops", *(f"tokens/{kind}" for kind in MODALITIES)]
        counts += [f"source/{name}" for name in self.sources]
        local = {name: float(sums.counts.get(name, 0)) for name in counts}
        allocated, reserved, retries = device_memory(self.device)
        local |= {"dead_samples": float(dead_samples), "retries": float(retries)}
        mine = {"wait_s": idle.wait_s, "allocated": allocated, "reserved": reserved}
        for rank in range(self.world_size):
            local |= {f"{name}.{rank}": mine[name] if rank == self.rank else 0.0 for name in PER_RANK}
        on_device = {"loss": sums.loss, "aux_loss": sums.aux}
        on_device |= {f"source_loss/{name}": sums.sources.get(name) for name in self.sources}
        on_device |= {f"{OBJECTIVE}{name}": value for name, value in sums.objective.items()}
        pinned = self.device.type == "cuda"  # else the copy would wait
        known = torch.tensor(list(local.values()), dtype=torch.float64, pin_memory=pinned)
        losses = torch.stack([_or_zero(value, self.device) for value in on_device.values()])
        parts = [known.to(self.device, non_blocking=True), losses]
        if sums.experts is not None:
            parts.append(sums.experts.flatten().to(self.device))
        return [*local, *on_device], torch.cat(parts)

    def _means(self, total: dict[str, float], sums: _Sums) -> dict[str, Any]:
        labels = total["label_tokens"]
        metrics: dict[str, Any] = {"loss": total["loss"] / labels if labels else 0.0}
        metrics |= {
            f"loss/{name}": total[f"source_loss/{name}"] / total[f"source/{name}"]
            for name in self.sources
            if total[f"source/{name}"]
        }
        if sums.aux is not None:
            metrics["aux_loss"] = total["aux_loss"] / (sums.steps * self.world_size)
        if sums.objective:
            metrics |= objective_metrics({name: total[f"{OBJECTIVE}{name}"] for name in sums.objective}, labels)
        metrics |= {f"lr/{group}": rate for group, rate in sums.lr.items()}
        counted = ["tokens", "label_tokens", *(f"tokens/{kind}" for kind in MODALITIES), "samples", "dead_samples"]
        metrics |= {name: round(total[name]) for name in counted}
        everything = total["tokens"] + total["padding"]
        return metrics | {"padding": total["padding"] / everything if everything else 0.0}

    def _rates(self, total: dict[str, float], steps: int, interval_s: float, pause_s: float) -> dict[str, Any]:
        per_gpu = 1 / (interval_s * self.world_size)
        wait_s = self._largest(total, "wait_s") / steps
        metrics: dict[str, Any] = {
            "tokens_per_second_per_gpu": total["tokens"] * per_gpu,
            "samples_per_second": total["samples"] / interval_s,
            "tflops_per_gpu": total["flops"] * per_gpu / 1e12,
            "interval_s": interval_s,
            "step_s": interval_s / steps,
            "data_wait_s": wait_s,
            "data_wait": wait_s / (interval_s / steps),
            "pause_s": pause_s,
            "memory_gb": self._largest(total, "allocated") / GIGABYTE,
        }
        if self.device.type == "cuda":
            metrics["memory_reserved_gb"] = self._largest(total, "reserved") / GIGABYTE
            metrics["memory_retries"] = round(total["retries"])
        if self.peak is not None:
            metrics["mfu"] = total["flops"] * per_gpu / self.peak
        return metrics

    def _largest(self, total: dict[str, float], name: str) -> float:
        return max(total[f"{name}.{rank}"] for rank in range(self.world_size))


def expert_load(counts: Tensor) -> dict[str, float]:
    """Metrics of tokens per expert, float64 [layers, E]; a layer without any token is left out."""
    mean = counts.mean(1)
    used = counts[mean > 0]
    if not len(used):
        return {"expert_load_max": 0.0, "expert_load_mean": 0.0, "experts_idle": 1.0}
    worst = used.amax(1) / used.mean(1)
    idle = (used == 0).double().mean()
    return {"expert_load_max": worst.max().item(), "expert_load_mean": worst.mean().item(), "experts_idle": idle.item()}


def device_memory(device: torch.device) -> tuple[float, float, int]:
    """(bytes allocated at most, bytes reserved at most, retries) since the last call; on a CPU the peak RSS since the
    process began."""
    if device.type != "cuda":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(peak if sys.platform == "darwin" else peak * 1024), 0.0, 0
    found = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    retries = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
    torch.cuda.reset_peak_memory_stats(device)
    return float(found[0]), float(found[1]), retries


def _plus(total: Tensor | None, value: Tensor) -> Tensor:
    value = value.detach().double()
    return value.clone() if total is None else total.add_(value)


def _or_zero(value: Tensor | None, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=device) if value is None else value.to(device).reshape(())
