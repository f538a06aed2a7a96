"""The trainer on a packed dataset: losses against a plain loop of transformers, resume and export, cost of a step.

    python -m jobs.bench.train DATASET [--quick] [--device cuda|cpu] [--only PART] [--json FILE]

A small Qwen3-Omni of random weights. Parts: overhead (against a bare loop of the same model, and waits for the device),
wide (the same of a model whose steps keep a GPU busy), resume (SIGTERM, a new process, the export), loss (three seeds
of transformers in processes of their own, beside `resume`; ours from the same weights on the same batches). --quick
takes a tiny model and a few steps, to try the script.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

QUICK_STEPS, STEPS = 3, 200
PARTS = ("overhead", "wide", "resume", "loss")
QUICK_PARTS = ("overhead", "resume", "loss")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path, metavar="DATASET", help="a packed dataset")
    parser.add_argument("--quick", action="store_true", help="a tiny model, a few steps, without `wide`")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be given several times")
    parser.add_argument("--steps", type=int, help=f"of each run of loss, default {STEPS}")
    parser.add_argument("--seeds", type=int, default=1, help="how many of our own runs of loss, default %(default)s")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate, default %(default)s")
    parser.add_argument("--workers", type=int, help="of each loader; default: 0 with --quick, else 4")
    parser.add_argument("--json", type=Path, help="also write the claims here")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # is read once, before the part that needs it
    arguments.steps = arguments.steps or (QUICK_STEPS if arguments.quick else STEPS)
    arguments.only = arguments.only or (QUICK_PARTS if arguments.quick else PARTS)
    if arguments.workers is None:
        arguments.workers = 0 if arguments.quick else 4
    # every worker of a loader imports this module again, which must not cost it seconds
    from jobs.bench.train_parts import run_parts  # noqa: PLC0415

    return run_parts(arguments)


if __name__ == "__main__":
    sys.exit(main())
