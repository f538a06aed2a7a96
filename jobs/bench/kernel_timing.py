"""How the kernels' benchmarks measure: medians over CUDA events with the L2 cache flushed, peak memory, ceilings."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

PEAK_TFLOPS = 790.0  # bfloat16 matrix rate measured on an H200; every share is of this number
FLUSH_BYTES = 2**28
RUNS_IN_GRAPH = 5  # one after another, so that what a launch costs is not taken for a short kernel's time
Run = Callable[[], object]


def milliseconds(run: Run, repeats: int = 15, graph: bool = False) -> float:
    """Median time of a run. graph: replays a captured CUDA graph of several, without the host's launches; for short
    kernels, whose data must be larger than the L2 cache."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    replay = captured(run) if graph else run
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events = []
    for _ in range(repeats):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    median = statistics.median(start.elapsed_time(end) for start, end in events)
    return median / RUNS_IN_GRAPH if graph else median


def captured(run: Run) -> Run:
    """The replay of `RUNS_IN_GRAPH` runs as a CUDA graph; autograd's nodes must be made inside run."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(RUNS_IN_GRAPH):
                run()
    torch.cuda.current_stream().wait_stream(stream)
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def extra_gib(run: Run) -> float:
    """Peak memory of run above what is allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


@cache
def copy_rate() -> float:
    """TB/s of copying 2 GiB on the device, bytes read and written."""
    source = torch.empty(2**31, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source)) / 1e9


@cache
def matrix_rate() -> float:
    """TFLOP/s of an 8192^3 bfloat16 product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / milliseconds(lambda: a @ b) / 1e9


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected; infinite when anything is not finite."""
    found, expected = found.detach().double(), expected.detach().double()
    if not bool(found.isfinite().all()):
        return float("inf")
    return float((found - expected).norm() / expected.norm())
