"""Muon on a GPU: the step of a layer's experts and of its attention at the shapes of Qwen3-Omni-30B-A3B.

    python -m jobs.bench.muon [--quick] [--tiles] [--json FILE]
    torchrun --nproc-per-node 2 -m jobs.bench.muon      the same matrices sharded over the GPUs, each rank owns some

The bound of a step is the time of its multiplications without symmetry at the rate of `torch.bmm`, measured at the
same shapes in the same run. Peers: `run_newton_schulz` of the package `veomni` where it is installed, and
`torch.optim.Muon` for single matrices. --tiles: also the rates of other tiles of the symmetric kernel. Without a CUDA
device it exits 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch

from jobs.bench.claims import Claim, report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the experts, no peers but veomni")
    parser.add_argument("--tiles", action="store_true", help="other tiles of the symmetric kernel, too")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("jobs.bench.muon needs a CUDA device; there is none here", file=sys.stderr)
        return 2
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sharded: Callable[[bool], list[Claim] | None] = import_module("jobs.bench.muon_sharded").claims
        found = sharded(arguments.quick)
        return 0 if found is None or report("Muon, sharded", found, arguments.json) else 1
    steps = import_module("jobs.bench.muon_step")
    return 0 if report("Muon", steps.claims(arguments.quick, arguments.tiles), arguments.json) else 1


if __name__ == "__main__":
    sys.exit(main())
