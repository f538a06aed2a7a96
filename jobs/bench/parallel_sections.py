"""The sections of the parallel benchmark, one after the other; each writes its claims as soon as it has them."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from jobs.bench.claims import Claim, at_most, report
from jobs.bench.parallel_measure import (
    POLICIES,
    Timing,
    expert_bytes,
    fake_peaks,
    measure_layout,
    peaks,
    slope,
    ulysses_bytes,
)
from jobs.bench.parallel_model import TINY, Shape
from jobs.bench.parallel_ranks import Ranks

# name -> keys of train.accelerator; on two ranks
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp=2": {},
    "ep=2": {"ep_size": 2},
    "sp=2": {"ulysses_size": 2},
    "fsdp=2 without reshard": {"fsdp_config": {"reshard_after_forward": False}},
    "sp=2 ep=2": {"ulysses_size": 2, "ep_size": 2},
}
BOUNDS = {2: 0.55, 4: 0.3}  # of the slope of memory, by ranks of a sequence
SAME = 1.05  # memory that counts as the same
# lengths of the whole sequence; torch's attention on CPUs takes other buffers below 768
TOTALS, QUICK_TOTALS = [32768, 49152, 65536], [1024, 1536, 2048]
METHOD = 0.05  # how far the fake group may be from a real one


class Bench:
    """Sizes, the machine, and the claims so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.quick: bool = arguments.quick
        self.json: Path | None = arguments.json
        self.device_type = "cpu" if self.quick else "cuda"
        full = replace(Shape(), tokens=arguments.tokens, attention=arguments.attention)
        self.steps = TINY if self.quick else replace(full, layers=arguments.layers or 6)
        self.memory = replace(TINY, attention="sdpa") if self.quick else replace(full, layers=arguments.layers or 4)
        self.warm, self.repeats = (1, 2) if self.quick else (3, 8)
        self.claims: list[Claim] = []

    @property
    def place(self) -> str:
        """Where it is measured."""
        return f"{'CPU' if self.quick else torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16"

    def add(self, claim: Claim) -> None:
        """Tells and writes it at once."""
        self.claims.append(claim)
        print(
            f"  {claim.claim}: {claim.value:g} {claim.unit} ({claim.goal}: {claim.met}) {claim.conditions}", flush=True
        )
        if self.json is not None:
            self.json.write_text(json.dumps([asdict(c) for c in self.claims], indent=1) + "\n")

    @contextmanager
    def ranks(self, world: int, *, group: bool = True) -> Iterator[Ranks]:
        began = time.monotonic()
        with Ranks(world, self.device_type, group=group) as found:
            yield found
        print(f"  {world} processes: {time.monotonic() - began:.1f} s", flush=True)


def run_sections(arguments: argparse.Namespace) -> int:
    """The exit code: 0 when all claims hold. arguments: of `jobs.bench.parallel`."""
    if not arguments.quick and torch.cuda.device_count() < 2:
        print("jobs.bench.parallel needs two CUDA devices; --quick tries it on CPUs", file=sys.stderr)
        return 2
    bench = Bench(arguments)
    wanted = set(arguments.only)
    sections: list[tuple[set[str], Callable[[], None]]] = [
        ({"steps", "communication"}, lambda: layouts(bench, watched="communication" in wanted)),
        ({"context"}, lambda: context(bench)),
        ({"slope"}, lambda: slopes(bench)),
        ({"recompute"}, lambda: recompute(bench)),
    ]
    for names, section in sections:
        if not names & wanted:
            continue
        title, began = " and ".join(sorted(names & wanted)), time.monotonic()
        print(f"{title}: begins", flush=True)
        try:
            section()
        except Exception as error:  # noqa: BLE001  # told as a claim that does not hold
            traceback.print_exc()
            said = " ".join(f"{type(error).__name__}: {error}".split())[-300:]
            bench.add(Claim(f"{title}: runs to its end", 0, "", "does", False, said))
        print(f"{title}: took {time.monotonic() - began:.1f} s", flush=True)
    return 0 if report("parallel", bench.claims, arguments.json) else 1


def layouts(bench: Bench, *, watched: bool) -> None:
    """`steps` and, when watched, `communication`."""
    shape = bench.steps
    given = ("inputs", bench.warm, bench.repeats, watched)
    said = f"{shape.layers} layers, {shape.rows()}, recompute, {bench.place}"
    with bench.ranks(1) as one:
        alone: Timing = one.run(measure_layout, shape, {}, *given[:-1], False)[0]
    rate = shape.tokens / alone.step_s
    bench.add(_step("one GPU", shape, alone, rate, said))
    with bench.ranks(2) as two:
        for name, layout in LAYOUTS.items():
            found: list[Timing] = two.run(measure_layout, shape, layout, *given)
            slowest = max(found, key=lambda timing: timing.step_s)
            bench.add(_step(name, shape, slowest, rate, said))
            if watched:
                _communication(bench, name, layout, shape, found)


def _step(name: str, shape: Shape, timing: Timing, alone: float, said: str) -> Claim:
    rate = shape.tokens / timing.step_s
    more = f"{rate:,.0f} tokens/s a GPU, {rate / alone:.3f} of one GPU; greatest / smallest {timing.spread:.3f}; "
    more += f"peak {timing.peak / 1e9:.1f} GB; loss {timing.loss:.4f}; {timing.kernels}; {said}"
    return Claim(f"steps: {name}", round(timing.step_s * 1e3, 2), "ms", "", None, more)


def _communication(bench: Bench, name: str, layout: dict[str, Any], shape: Shape, found: list[Timing]) -> None:
    for rank, timing in enumerate(found):
        c = timing.communication
        assert c is not None
        kinds = ", ".join(f"{kind} {time:.2f}" for kind, time in sorted(c.by_kind.items()))
        said = f"{c.exposed:.2f} of {c.span:.2f} ms alone; all {c.total:.2f} ms: {kinds} ms"
        title = f"communication: {name}, rank {rank}, share of the step in NCCL kernels that nothing overlaps"
        bench.add(Claim(title, round(100 * c.exposed / c.span, 2), "%", "", None, said))
    sp, ep = layout.get("ulysses_size", 1), layout.get("ep_size", 1)
    if sp > 1 and ep > 1:
        return  # groups of both kinds, which the counter does not tell apart
    for rank, timing in enumerate(found):
        expected = 0
        if sp > 1:
            expected = ulysses_bytes(shape, sp, timing.runs)
        elif ep > 1:
            expected = expert_bytes(shape, [other.leaving for other in found], timing.runs, rank)
        title = f"communication: {name}, rank {rank}, bytes of all-to-alls beyond what is computed"
        said = f"{timing.sent:,} sent in {timing.calls} calls, {expected:,} computed"
        bench.add(at_most(title, abs(timing.sent - expected), 0, "bytes", said))


def context(bench: Bench) -> None:
    """Twice the context on two ranks of a sequence, the same tokens and shards on each rank."""
    shape = bench.memory
    tokens = 512 if bench.quick else 2 * shape.tokens
    found: dict[int, tuple[int, int]] = {}
    with bench.ranks(2) as two:
        for sp in (1, 2):
            results = two.run(peaks, shape, {"ulysses_size": sp}, [sp * tokens], "inputs")
            found[sp] = max((result[0] for result in results), key=lambda pair: pair[1])
            before, peak = found[sp]
            said = f"{before / 1e9:.3f} GB before it; one document of {sp * tokens} tokens; {shape.layers} layers"
            title = f"context: peak memory at {sp * tokens} tokens, sp={sp}"
            bench.add(Claim(title, round(peak / 1e9, 4), "GB", "", None, f"{said}, recompute, {bench.place}"))
    ratio = found[2][1] / found[1][1]
    said = f"activations alone {(found[2][1] - found[2][0]) / (found[1][1] - found[1][0]):.3f}"
    bench.add(at_most("context: peak memory of sp=2 at twice the context / sp=1", ratio, SAME, "x", said))


def slopes(bench: Bench) -> None:
    """Activation memory over the length of the sequence."""
    shape = bench.memory
    totals = QUICK_TOTALS if bench.quick else TOTALS
    found: dict[tuple[str, int], list[tuple[int, int]]] = {}
    with bench.ranks(1, group=False) as one:
        for keeps, sp in product(("inputs", "everything"), (1, 2, 4)):
            found[keeps, sp] = one.run(fake_peaks, shape, sp, totals, keeps)[0]
            bench.add(_slope(f"slope: {keeps} kept, sp={sp}", totals, found[keeps, sp]))
            if sp > 1:
                ratio = slope(totals, found[keeps, sp]) / slope(totals, found[keeps, 1])
                title = f"slope: {keeps} kept, sp={sp} / sp=1"
                bench.add(at_most(title, ratio, BOUNDS[sp], "x", f"{shape.layers} layers, {bench.place}"))
    with bench.ranks(2) as two:
        results = two.run(peaks, shape, {"ulysses_size": 2}, totals, "inputs")
    real = slope(totals, results[0])
    bench.add(_slope("slope: inputs kept, sp=2 on two ranks", totals, results[0]))
    apart = abs(slope(totals, found["inputs", 2]) / real - 1)
    bench.add(at_most("slope: fake group against two ranks, relative", apart, METHOD, "", "sp=2"))


def _slope(title: str, totals: list[int], found: list[tuple[int, int]]) -> Claim:
    used = ", ".join(f"{n}: {(peak - before) / 1e6:,.1f}" for n, (before, peak) in zip(totals, found, strict=True))
    return Claim(title, round(slope(totals, found) / 1e3, 3), "kB per token", "", None, f"MB by length {used}")


def recompute(bench: Bench) -> None:
    """What is kept for the backward pass, on one GPU."""
    shape = replace(bench.memory, tokens=bench.memory.tokens * (1 if bench.quick else 2), document=None)
    with bench.ranks(1) as one:
        timings: dict[str, Timing] = {}
        for keeps in POLICIES:
            timings[keeps] = one.run(measure_layout, shape, {}, keeps, bench.warm, bench.repeats, False)[0]
            timing, first = timings[keeps], timings["everything"]
            said = f"{timing.step_s / first.step_s:.3f} of everything kept; peak {timing.peak / 1e9:.2f} GB, "
            said += f"then {first.peak / 1e9:.2f} GB; {shape.layers} layers, {shape.rows()}, {bench.place}"
            bench.add(Claim(f"recompute: {keeps} kept", round(timing.step_s * 1e3, 2), "ms", "", None, said))
