"""Which tiles the Triton kernels of attention should have, and which of them run at all.

`tune` prints the times of candidates, the fastest first, at the size of a long video; many processes compile them
beforehand. `isolate` tells whether each kernel with bulk copies runs, in the main thread and in autograd's, each in a
process of its own, because an error of the device ends a process.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch
from torch import Tensor

from jobs.bench.kernel_timing import milliseconds, relative_error
from jobs.bench.kernel_vision_attention import CASES, REPEATS, Inputs, reference
from train.ops.triton_attention import forward, key_gradients, query_gradient
from train.ops.triton_attention_tiles import AttentionTile

WORKERS = 14
bulk = partial(AttentionTile, bulk=True)
FORWARD_TILES = (
    AttentionTile(64, 64, 32, 4, 2), AttentionTile(64, 32, 32, 4, 3), AttentionTile(64, 32, 0, 4, 3),
    AttentionTile(64, 64, 0, 4, 2), bulk(64, 64, 32, 4, 3), bulk(64, 64, 0, 4, 3), bulk(64, 64, 0, 4, 2),
    bulk(64, 32, 0, 4, 2), bulk(64, 32, 0, 4, 3), bulk(64, 32, 0, 4, 4), bulk(128, 64, 0, 8, 3, registers=128),
)  # fmt: skip
QUERY_TILES = (
    AttentionTile(64, 32, 32, 4, 3), AttentionTile(64, 32, 0, 4, 3), AttentionTile(64, 64, 32, 4, 2),
    bulk(64, 32, 32, 4, 3), bulk(64, 32, 0, 4, 3), bulk(64, 64, 0, 4, 2), bulk(128, 64, 0, 4, 3),
)  # fmt: skip
KEY_TILES = (
    AttentionTile(64, 64, 32, 4, 3), AttentionTile(64, 64, 32, 4, 2), AttentionTile(64, 32, 0, 4, 3, registers=168),
    AttentionTile(64, 32, 32, 4, 3, registers=168), bulk(64, 64, 32, 4, 3), bulk(64, 64, 0, 4, 3),
    bulk(64, 32, 0, 4, 3, registers=168), bulk(64, 32, 0, 4, 4, registers=168),
)  # fmt: skip
BULK = {
    "f": bulk(64, 32, 0, 4, 3),
    "q": bulk(64, 32, 32, 4, 3),
    "k": bulk(64, 32, 0, 4, 3, registers=168),
}
CANDIDATES = {"forward": FORWARD_TILES, "query": QUERY_TILES, "key": KEY_TILES}


def runs(inputs: Inputs) -> dict[str, Callable[[AttentionTile], tuple[Tensor, ...]]]:
    """What --tune measures, for a tile, and what it writes."""
    q, k, v, dout, segments = inputs.q, inputs.k, inputs.v, inputs.dout, inputs.segments
    scale = q.shape[2] ** -0.5
    out, lse = forward(q, k, v, segments)
    stats = query_gradient(dout, q, k, v, out, lse, torch.empty_like(q), segments, scale, QUERY_TILES[0])

    def query(tile: AttentionTile) -> tuple[Tensor, ...]:
        dq = torch.empty_like(q)
        query_gradient(dout, q, k, v, out, lse, dq, segments, scale, tile)
        return (dq,)

    def key(tile: AttentionTile) -> tuple[Tensor, ...]:
        dk, dv = torch.empty_like(q), torch.empty_like(q)
        key_gradients(dout, q, k, v, stats, dk, dv, segments, scale, tile)
        return dk, dv

    return {"forward": lambda tile: forward(q, k, v, segments, scale, tile)[:1], "query": query, "key": key}


def compiled(which: str, tile: AttentionTile) -> str:
    """In a process of its own: leaves the kernels in Triton's cache; what went wrong, or nothing."""
    try:
        runs(Inputs((540,) * 4, 16, 72))[which](tile)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  # a candidate that does not fit the chip is left out
        return f"{type(error).__name__}: {str(error)[:100]}"
    return ""


def tune() -> None:
    """Prints the times of all candidates and their largest errors."""
    tasks = [(which, tile) for which, tiles in CANDIDATES.items() for tile in tiles]
    workers = min(WORKERS, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        failures = dict(zip(tasks, pool.map(compiled, *zip(*tasks, strict=True)), strict=True))
    case = CASES[0]
    inputs = Inputs(case.lengths, case.heads, case.size)
    measured = runs(inputs)
    out, dq, dk, dv = reference(inputs, case.lengths)
    exact = {"forward": (out,), "query": (dq,), "key": (dk, dv)}
    for which, tiles in CANDIDATES.items():
        lines = []
        for tile in tiles:
            if failures[which, tile]:
                print(which, tile, failures[which, tile])
                continue
            poisoned = [torch.full_like(inputs.q, float("nan")) for _ in range(4)]
            del poisoned  # what a kernel leaves unwritten is not a number
            found = measured[which](tile)
            error = max(relative_error(a, b) for a, b in zip(found, exact[which], strict=True))
            lines.append((milliseconds(partial(measured[which], tile), REPEATS), error, str(tile)))
        for time, error, said in sorted(lines):
            print(f"{which:8} {time:.3f} ms  error {error:.1e}  {said.removeprefix('AttentionTile')}", flush=True)


def isolated(name: str) -> str:
    """In a process of its own: which kernels take bulk copies (f, q, k), where the gradients are made (main, hook:
    autograd's thread), and whether the host waits after each kernel (wait)."""
    bulky, where, *waits = name.split()
    inputs = Inputs(CASES[0].lengths, CASES[0].heads, CASES[0].size)
    q, k, v, segments, scale = inputs.q, inputs.k, inputs.v, inputs.segments, inputs.q.shape[2] ** -0.5
    tiles = [
        BULK[letter] if letter in bulky else tiles[0] for letter, tiles in zip("fqk", CANDIDATES.values(), strict=True)
    ]
    dq, dk, dv = (torch.empty_like(q) for _ in range(3))

    def gradients(dout: Tensor) -> None:
        stats = query_gradient(dout, q, k, v, out, lse, dq, segments, scale, tiles[1])
        if waits:
            torch.cuda.synchronize()
        key_gradients(dout, q, k, v, stats, dk, dv, segments, scale, tiles[2])

    try:
        for _ in range(20):
            out, lse = forward(q, k, v, segments, scale, tiles[0])
            if waits:
                torch.cuda.synchronize()
            if where == "main":
                gradients(inputs.dout)
            else:
                leaf = inputs.leaves[0] * 1
                leaf.register_hook(gradients)
                leaf.backward(inputs.dout)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  # is the answer
        return f"{type(error).__name__}: {str(error)[:100]}"
    exact = reference(inputs, CASES[0].lengths)
    return f"runs, errors {[f'{relative_error(a, b):.1e}' for a, b in zip((out, dq, dk, dv), exact, strict=True)]}"


def isolate() -> None:
    """Prints what each combination does."""
    names = [f"{bulky} {where}" for bulky in ("-", "f", "q", "k", "fqk") for where in ("main", "hook")]
    names += ["fqk main wait", "fqk hook wait"]
    with ProcessPoolExecutor(
        min(6, os.cpu_count() or 1), multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        for name, said in zip(names, pool.map(isolated, names), strict=True):
            print(f"bulk copies in {name}: {said}", flush=True)
