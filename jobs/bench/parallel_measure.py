"""What the ranks of the parallel benchmark measure; every function runs on all ranks of a group at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jobs.bench.parallel_model import Shape, Trained, device_of, rows_of
from jobs.bench.parallel_trace import AllToAlls, Communication, communication_of, peak_of, trace_of
from train.models.checkpointing import CheckpointPolicy, keep_attention
from train.models.moe import Router
from train.parallel.offload import ActivationOffload

Layout = Mapping[str, Any]
# what blocks keep for the backward pass
POLICIES: dict[str, Callable[[], CheckpointPolicy | None]] = {
    "everything": lambda: None,
    "inputs": CheckpointPolicy,
    "inputs and attention": lambda: CheckpointPolicy(keep_attention),
    "every second block everything": lambda: CheckpointPolicy(share=0.5),
    "inputs, on the CPU": lambda: CheckpointPolicy(carry=ActivationOffload()),
    "inputs on the CPU, and attention": lambda: CheckpointPolicy(keep_attention, carry=ActivationOffload()),
}
WATCHED = 2  # steps under the profiler


@dataclass(frozen=True)
class Timing:
    """Of one layout on one rank. step_s: median; spread: greatest / smallest; peak: bytes; sent: bytes to other ranks
    in all-to-alls of one forward and backward pass; leaving: rows that this rank's routers sent to each rank, over all
    runs; runs: of each router, 2 when blocks are computed again."""

    step_s: float
    spread: float
    peak: int
    loss: float
    kernels: str
    communication: Communication | None = None
    sent: int = 0
    calls: int = 0
    leaving: tuple[int, ...] = ()
    runs: int = 0


def measure_layout(shape: Shape, layout: Layout, keeps: str, warm: int, steps: int, watched: bool) -> Timing:
    """watched: also the profile and the bytes."""
    device = device_of(dist.get_rank())
    trained = Trained(shape, layout, device, POLICIES[keeps]())
    for _ in range(warm):
        loss = trained.step()
    times, peak = timed(trained, steps)
    timing = Timing(statistics.median(times), max(times) / min(times), peak, float(loss), trained.kernels)
    if not watched:
        return timing

    def some_steps() -> None:
        for _ in range(WATCHED):
            trained.step()

    found = communication_of(trace_of(some_steps, device), WATCHED, device)
    return replace(timing, communication=found, **counted(trained))


def timed(trained: Trained, steps: int) -> tuple[list[float], int]:
    """(seconds of each step, peak bytes), all ranks beginning together."""
    cuda = trained.device.type == "cuda"
    if not cuda:
        found = []
        for _ in range(steps):
            dist.barrier()
            began = time.perf_counter()
            trained.step()
            found.append(time.perf_counter() - began)
        return found, 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        trained.step()
        mark.record()
    torch.cuda.synchronize()
    times = [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(marks)]
    return times, torch.cuda.max_memory_allocated()


def counted(trained: Trained) -> dict[str, Any]:
    """sent, calls, leaving, runs of `Timing`, of one forward and backward pass."""
    mesh = trained.mesh
    ep = mesh.degrees.ep
    ranks, rank = (ep, mesh.experts.get_local_rank("ep")) if mesh.experts else (mesh.degrees.ulysses, mesh.sp_rank)
    leaving: list[Tensor] = []
    own = trained.shape.experts // max(ranks, 1)

    def note(_: nn.Module, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        there = (output[1] // own)[None] == torch.arange(ranks, device=output[1].device)[:, None, None]
        leaving.append(there.any(-1).sum(1))

    routers = [module for module in trained.model.modules() if isinstance(module, Router)]
    with ExitStack() as stack:
        for router in routers:
            stack.callback(router.register_forward_hook(note).remove)
        counts = stack.enter_context(AllToAlls(rank, ranks))
        trained.backward()
    trained.clear()
    total = torch.stack(leaving).sum(0).tolist() if leaving else []
    return {
        "sent": sum(counts.sent.values()),
        "calls": counts.calls,
        "leaving": tuple(total),
        "runs": len(leaving) // max(1, len(routers)),
    }


def ulysses_bytes(shape: Shape, ranks: int, runs: int, itemsize: int = 2) -> int:
    """What a rank sends to others in the all-to-alls of all layers (docs/parallelism.md): runs forward passes and one
    backward pass."""
    kv_heads = max(shape.kv_heads, ranks)
    width = (2 * shape.heads + 2 * kv_heads) * shape.head_dim  # q and output, k and v
    return shape.layers * (runs + 1) * shape.tokens * width * (ranks - 1) // ranks * itemsize


def expert_bytes(shape: Shape, leaving: Sequence[Sequence[int]], runs: int, rank: int, itemsize: int = 2) -> int:
    """The same of experts, from the rows that each rank's routers sent to each rank over all runs. Forward: counts,
    ids, weights, rows, and results of the rows that came; backward: gradients of results, rows and weights."""
    ranks = len(leaving)
    out = sum(n for other, n in enumerate(leaving[rank]) if other != rank)
    back = sum(leaving[other][rank] for other in range(ranks) if other != rank)
    row, k = shape.hidden * itemsize, shape.top_k
    forward = runs * shape.layers * (ranks - 1) * 16 + out * (k * 8 + k * 4 + row) + back * row
    return forward + (out * row + back * (row + k * 4)) // runs


def peaks(shape: Shape, layout: Layout, totals: Sequence[int], keeps: str) -> list[tuple[int, int]]:
    """(bytes held before, peak of a forward and backward pass) at each length of the whole sequence, gradients being
    there before; on the CPU the first is 0."""
    device = device_of(dist.get_rank())
    trained = Trained(shape, layout, device, POLICIES[keeps]())
    found = []
    for total in totals:
        length = replace(shape, tokens=total // trained.mesh.degrees.ulysses, document=None)
        inputs = rows_of(length, trained.mesh)
        trained.backward(inputs)  # gradients, kernels
        if device.type != "cuda":
            found.append((0, peak_of(trace_of(partial(trained.backward, inputs), device, memory=True))))
            continue
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trained.backward(inputs)
        torch.cuda.synchronize()
        found.append((before, torch.cuda.max_memory_allocated()))
    return found


def fake_peaks(shape: Shape, ulysses: int, totals: Sequence[int], keeps: str) -> list[tuple[int, int]]:
    """`peaks` of the first of so many ranks of which the others are not there: torch's fake process group moves no
    data, so that values mean nothing while memory is what it is."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415  # registers the backend

    dist.init_process_group("fake", rank=0, world_size=ulysses, store=FakeStore())
    try:
        return peaks(shape, {"ulysses_size": ulysses}, totals, keeps)
    finally:
        dist.destroy_process_group()


def slope(totals: Sequence[int], found: Sequence[tuple[int, int]]) -> float:
    """Bytes per token of the whole sequence, by least squares."""
    used = [peak - before for before, peak in found]
    mean_x, mean_y = statistics.fmean(totals), statistics.fmean(used)
    above = sum((x - mean_x) * (y - mean_y) for x, y in zip(totals, used, strict=True))
    return above / sum((x - mean_x) ** 2 for x in totals)
