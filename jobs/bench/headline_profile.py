"""One step under torch's profiler: which kernels take the time, in groups, and how long none runs."""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from jobs.bench.parallel_trace import KERNELS, Communication, communication_of, length, union

TOP = 70
WIDTH = 96  # characters of a kernel's name
# the first that fits; kernels of Triton have the names of their functions
GROUPS: tuple[tuple[str, str], ...] = (
    ("communication", r"^nccl|^gloo|^c10d"),
    ("products of experts", r"gate_up_kernel|down_backward_kernel|weight_gradient_kernel|^rows_kernel"),
    ("rows of experts", r"_spread_kernel|_gather_sum_kernel|_weight_sums_kernel|_tiles_kernel|_rows_kernel|sort|topk"),
    (
        "attention",
        r"flash|fmha|attn|attention|cudnn_generated|sdpa|^forward_kernel|y_gradients?_kernel|dot_do_o|dq_to_16",
    ),
    (
        "optimizer",
        r"adamw|_average_kernel|_change_kernel|_symmetric_kernel|_update_kernel|_divide_kernel|_scale_kernel|multi_tensor"
        r"|lpnorm|NormTwo",
    ),
    ("dense products", r"gemm|nvjet|cutlass|cublas|xmma|splitK|aten::(mm|addmm|bmm|baddbmm|_grouped_mm)"),
    ("copies and casts", r"memcpy|memset|copy|CatArray|chunk_cat|split_with_sizes|aten::(cat|_to_copy|fill_|zero_)"),
    (
        "norms, rope, loss",
        r"_forward_kernel|_backward_kernel|_losses_kernel|_multiply_kernel|layer_norm|LayerNorm|GammaBeta|_turn_kernel",
    ),
    ("element-wise", r"elementwise|vectorized|reduce|index|gather|scatter|softmax|triton_|aten::"),
)


@dataclass(frozen=True)
class Watched:
    """Of one step on one rank. idle: ms between the first and the last kernel in which none runs; table: text."""

    communication: Communication
    idle: float
    table: str


def start_profile(device: torch.device) -> profile:
    """Kernels alone on a GPU, so that launching them stays as fast as it is; operations on a CPU."""
    kinds = [ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU]
    profiler = profile(activities=kinds)
    profiler.start()
    return profiler


def stop_profile(profiler: profile, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    profiler.stop()


def read_profile(profiler: profile, device: torch.device) -> Watched:
    """What was recorded."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_bytes())["traceEvents"]
    return watched_of(events, device)


def watched_of(events: list[dict[str, Any]], device: torch.device) -> Watched:
    """From the events of a trace."""
    kernels = [event for event in events if is_kernel(event, device)]
    communication = communication_of(events, 1, device)
    times = [(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in kernels]
    idle = max(0.0, communication.span - length(union(times)) / 1e3)
    return Watched(communication, idle, table_of(kernels, communication.span, idle) + gaps_of(kernels))


def gaps_of(kernels: list[dict[str, Any]]) -> str:
    """Where no kernel runs: by which kernel comes after, and how the gaps lie over the step, in its twentieths."""
    ordered = sorted(kernels, key=lambda event: float(event["ts"]))
    if not ordered:
        return ""
    first, until = float(ordered[0]["ts"]), float(ordered[0]["ts"])
    last = max(float(event["ts"]) + float(event["dur"]) for event in ordered)
    after: defaultdict[str, list[float]] = defaultdict(list)
    parts = [0.0] * 20
    for event in ordered:
        begins = float(event["ts"])
        if begins > until:
            after[str(event["name"])].append((begins - until) / 1e3)
            parts[min(19, int(20 * (begins - first) / max(last - first, 1e-9)))] += (begins - until) / 1e3
        until = max(until, begins + float(event["dur"]))
    lines = ["ms without a kernel, by twentieths of the step: " + " ".join(f"{part:.1f}" for part in parts)]
    for name, gaps in sorted(after.items(), key=lambda item: -sum(item[1]))[:15]:
        short = re.sub(r"\s+", " ", name.replace("void ", ""))[:WIDTH]
        lines.append(f"{sum(gaps):10.2f} ms in {len(gaps)} gaps before {short}")
    return "\n".join(lines) + "\n"


def is_kernel(event: dict[str, Any], device: torch.device) -> bool:
    if event.get("ph") != "X":
        return False
    if device.type == "cuda":
        return event.get("cat") in KERNELS
    return event.get("cat") == "cpu_op" and str(event.get("name", "")).startswith("aten::")


def group_of(name: str) -> str:
    """The first group whose pattern is in the name of a kernel."""
    return next((group for group, pattern in GROUPS if re.search(pattern, name, re.IGNORECASE)), "others")


def table_of(kernels: Iterable[dict[str, Any]], span: float, idle: float) -> str:
    """Groups with their shares of the span, then the kernels that take most. Kernels on several streams overlap, so
    that the shares may add up to more than 100 %."""
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for event in kernels:
        by_name[str(event["name"])].append(float(event["dur"]) / 1e3)
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for name, times in by_name.items():
        groups[group_of(name)] += times
    lines = [f"one step: {span:.1f} ms from the first kernel to the last, {idle:.1f} ms of it without any"]
    lines.append(f"{'ms':>10} {'%':>6} {'calls':>7}  group")
    for group, times in sorted(groups.items(), key=lambda item: -sum(item[1])):
        lines.append(f"{sum(times):10.1f} {100 * sum(times) / max(span, 1e-9):6.1f} {len(times):7d}  {group}")
    lines.append(f"{'ms':>10} {'us each':>8} {'calls':>7}  kernel")
    ranked = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    for name, times in ranked[:TOP]:
        short = re.sub(r"\s+", " ", name.replace("void ", ""))[:WIDTH]
        lines.append(
            f"{sum(times):10.2f} {1e3 * sum(times) / len(times):8.1f} {len(times):7d}  [{group_of(name)}] {short}"
        )
    rest = [time for _, times in ranked[TOP:] for time in times]
    lines.append(f"{sum(rest):10.2f} {'':8} {len(rest):7d}  {max(0, len(ranked) - TOP)} other kernels")
    return "\n".join(lines) + "\n"
