"""Runs the parts of the trainer's benchmark one after the other, whatever happens in one of them."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from jobs.bench.claims import Claim, report
from jobs.bench.train_loss import References, measure_loss
from jobs.bench.train_overhead import measure_overhead, measure_wide
from jobs.bench.train_resume import measure_resume
from jobs.bench.train_setup import Bench
from schemas.errors import ResumableError


def run_parts(arguments: argparse.Namespace) -> int:
    """The exit code: 0 when all claims hold. arguments: of `jobs.bench.train`."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("jobs.bench.train --device cuda: there is no CUDA device here", file=sys.stderr)
        return 2
    transformers.logging.disable_progress_bar()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    claims: list[Claim] = []
    with tempfile.TemporaryDirectory(prefix="omniloom-bench-") as folder:
        bench = Bench(
            data=arguments.dataset.resolve(),
            out=Path(folder),
            device=torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"),
            quick=arguments.quick,
            steps=arguments.steps,
            lr=arguments.lr,
            workers=arguments.workers,
            seeds=arguments.seeds,
        )
        references = References(bench)
        parts: dict[str, Callable[[], None]] = {
            "overhead": partial(measure_overhead, bench, claims),
            "wide": partial(measure_wide, bench, claims),
            "references": references.start,  # nothing that comes behind it is timed
            "resume": partial(measure_resume, bench, claims),
            "loss": partial(measure_loss, references, claims),
        }
        wanted = {*arguments.only, *(["references"] if "loss" in arguments.only else [])}
        try:
            for name, part in parts.items():
                if name in wanted and not _run(name, part, claims):
                    break
                _write(claims, arguments.json)
        finally:
            references.stop()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0 if report("trainer", claims, arguments.json) else 1


def _run(name: str, part: Callable[[], None], claims: list[Claim]) -> bool:
    """False when a signal from outside said to stop."""
    began, told = time.monotonic(), len(claims)
    stopped = False
    print(f"{name}: begins", flush=True)
    try:
        part()
    except Exception as error:  # noqa: BLE001  # told as a claim that does not hold
        traceback.print_exc()
        stopped = isinstance(error, ResumableError)
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        claims.append(Claim(f"{name}: runs to its end", 0, "", "does", False, said))
    for claim in claims[told:]:
        print(f"{claim.claim}: {claim.value:g} {claim.unit} ({claim.goal}: {claim.met}), {claim.conditions}")
    print(f"{name}: took {time.monotonic() - began:.1f} s", flush=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return not stopped


def _write(claims: list[Claim], file: Path | None) -> None:
    """What is known so far, should the end never come."""
    if file is not None:
        file.write_text(json.dumps([asdict(claim) for claim in claims], indent=1) + "\n")
