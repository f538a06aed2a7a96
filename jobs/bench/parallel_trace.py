"""What a profile tells of communication: kernels of NCCL that nothing overlaps, memory, and bytes of all-to-alls."""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

Interval = tuple[float, float]
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
KINDS = {"AllGather": "all-gather", "ReduceScatter": "reduce-scatter", "SendRecv": "all-to-all"}


@dataclass(frozen=True)
class Communication:
    """Milliseconds of one step on one rank. span: from the first kernel to the last; total: kernels of NCCL; exposed:
    of these, what no other kernel overlaps; by_kind: totals of each collective. Kernels that wait for the other rank
    count as well."""

    span: float
    total: float
    exposed: float
    by_kind: dict[str, float]


def trace_of(step: Callable[[], object], device: torch.device, *, memory: bool = False) -> list[dict[str, Any]]:
    """Events of a profile of step(), as Chrome's trace format has them."""
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=kinds, profile_memory=memory) as profiler:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_bytes())["traceEvents"]
    return events


def communication_of(events: Iterable[dict[str, Any]], steps: int, device: torch.device) -> Communication:
    """On a CPU, to try the script, operations of gloo against all others."""
    nccl: list[Interval] = []
    others: list[Interval] = []
    kinds: defaultdict[str, float] = defaultdict(float)
    for event in events:
        kind = _kind(event, device)
        if kind is None:
            continue
        times = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        (others if kind == "" else nccl).append(times)
        if kind:
            kinds[kind] += times[1] - times[0]
    both = [*nccl, *others]
    if not both:
        raise ValueError("the profile has no kernels")
    scale = 1e3 * steps
    return Communication(
        span=(max(end for _, end in both) - min(start for start, _ in both)) / scale,
        total=length(union(nccl)) / scale,
        exposed=(length(union(both)) - length(union(others))) / scale,
        by_kind={kind: time / scale for kind, time in kinds.items()},
    )


def _kind(event: dict[str, Any], device: torch.device) -> str | None:
    """Name of a collective, '' for another kernel, None for what is no kernel."""
    name, category = str(event.get("name", "")), event.get("cat")
    if event.get("ph") != "X":
        return None
    if device.type != "cuda":
        if category not in ("cpu_op", "user_annotation") or not name.startswith(("aten::", "gloo:", "c10d::")):
            return None
        return "" if name.startswith("aten::") else name.partition(":")[2].strip(":")
    if category not in KERNELS:
        return None
    if not name.lower().startswith("nccl"):
        return ""
    return next((kind for part, kind in KINDS.items() if part in name), "others")


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Intervals that do not touch, in order, which cover the same."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def length(intervals: Sequence[Interval]) -> float:
    """Of disjoint intervals together."""
    return sum(end - start for start, end in intervals)


def peak_of(events: Iterable[dict[str, Any]]) -> int:
    """The greatest number of bytes that were allocated at a time on the CPU beyond those at the beginning, from a
    profile with memory."""
    found = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0]
    held = greatest = 0
    for event in sorted(found, key=lambda event: float(event["ts"])):
        held += int(event["args"]["Bytes"])
        greatest = max(greatest, held)
    return greatest


class AllToAlls(TorchDispatchMode):
    """Counts what this rank sends to others in all-to-alls while it is entered, backward passes included. sent: bytes
    by dtype; calls: of whatever size. rank: of this process in the group, which must be the same in all of them."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.sent: Counter[str] = Counter()
        self.calls = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.c10d.alltoall_base_.default:
            data: Tensor = args[1]
            splits: Sequence[int] = args[4] or [len(data) // self.ranks] * self.ranks
            row = data[0].numel() if len(data) else 0
            others = sum(splits) - splits[self.rank]
            self.calls += 1
            self.sent[str(data.dtype).removeprefix("torch.")] += others * row * data.element_size()
        return function(*args, **(kwargs or {}))
