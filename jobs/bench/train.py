"""The trainer on a packed dataset: losses against a plain loop of transformers, resume and export, cost of a step.

    python -m jobs.bench.train DATASET [--quick] [--device cuda|cpu] [--only PART] [--json FILE]

A small Qwen3-Omni of random weights. Parts: overhead (against a bare loop of the same model, and waits for the device),
loss (three seeds of ours and of transformers, from the same weights, on the same batches), resume (SIGTERM, a new
process, the export), wide (overhead of a model whose steps keep a GPU busy). --quick takes a tiny model and a few
steps, to try the script.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from jobs.bench.claims import Claim, report
from jobs.bench.train_loss import measure_loss
from jobs.bench.train_overhead import measure_overhead, measure_wide
from jobs.bench.train_resume import measure_resume
from jobs.bench.train_setup import Bench

Part = Callable[[Bench, list[Claim]], None]
QUICK_STEPS, STEPS = 3, 200
PARTS: dict[str, Part] = {
    "overhead": measure_overhead,
    "loss": measure_loss,
    "resume": measure_resume,
    "wide": measure_wide,
}
QUICK_PARTS = ("overhead", "loss", "resume")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path, metavar="DATASET", help="a packed dataset")
    parser.add_argument("--quick", action="store_true", help="a tiny model, a few steps")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--only", choices=tuple(PARTS), action="append", help="this part; may be given several times")
    parser.add_argument("--steps", type=int, help=f"of each run of loss, default {STEPS}")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate, default %(default)s")
    parser.add_argument("--workers", type=int, help="of the loader; default: 0 with --quick, else 8")
    parser.add_argument("--json", type=Path, help="also write the claims here")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # is read once, before the part that needs it
    transformers.logging.disable_progress_bar()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("jobs.bench.train --device cuda: there is no CUDA device here", file=sys.stderr)
        return 2
    claims: list[Claim] = []
    with tempfile.TemporaryDirectory(prefix="omniloom-bench-") as folder:
        bench = Bench(
            data=arguments.dataset.resolve(),
            out=Path(folder),
            device=torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"),
            quick=arguments.quick,
            steps=arguments.steps or (QUICK_STEPS if arguments.quick else STEPS),
            lr=arguments.lr,
            workers=arguments.workers if arguments.workers is not None else 0 if arguments.quick else 8,
        )
        for name, part in PARTS.items():
            if name in (arguments.only or (QUICK_PARTS if arguments.quick else PARTS)):
                run_part(name, part, bench, claims)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0 if report("trainer", claims, arguments.json) else 1


def run_part(name: str, part: Part, bench: Bench, claims: list[Claim]) -> None:
    """Whatever happens in it, the other parts are measured."""
    began = time.monotonic()
    print(f"{name}: begins", flush=True)
    try:
        part(bench, claims)
    except Exception as error:  # noqa: BLE001  # told as a claim that does not hold
        traceback.print_exc()
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        claims.append(Claim(f"{name}: runs to its end", 0, "", "does", False, said))
    took = time.monotonic() - began
    print(f"{name}: took {took:.1f} s", flush=True)
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
