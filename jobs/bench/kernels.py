"""The fused kernels on a GPU: speed as ratios against peers of the same run, memory, error.

    python -m jobs.bench.kernels [--quick] [--only moe|lora|ce|elementwise|attention|vision_attention|features|layer]
        [--json FILE]

Shares are of 790 TFLOP/s (an H200's measured bfloat16 rate) and of the copy rate of the same run. Peers: grouped_mm
under torch.compile, and `veomni` 0.1.12 and `liger-kernel` 0.8.5 where they are installed. Without a CUDA device it
exits 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch

from jobs.bench.claims import Claim, report

PARTS = {
    "moe": "kernel_moe",
    "lora": "kernel_lora",
    "ce": "kernel_loss",
    "elementwise": "kernel_elementwise",
    "attention": "kernel_attention",
    "vision_attention": "kernel_vision_attention",
    "features": "kernel_features",
    "layer": "kernel_layer",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest sizes alone")
    parser.add_argument("--only", choices=list(PARTS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("jobs.bench.kernels needs a CUDA device; there is none here", file=sys.stderr)
        return 2
    timing = import_module("jobs.bench.kernel_timing")
    device = torch.cuda.get_device_name()
    versions = f"{device}, torch {torch.__version__}, {timing.matrix_rate():.0f} TFLOP/s of an 8192^3 product"
    found = [Claim("machine", round(timing.matrix_rate(), 1), "TFLOP/s", "", None, versions)]
    for part, module in PARTS.items():
        if arguments.only in (None, part):
            claims: Callable[[bool], list[Claim]] = import_module(f"jobs.bench.{module}").claims
            found += claims(arguments.quick)
            torch.cuda.empty_cache()
    return 0 if report("kernels", found, arguments.json) else 1


if __name__ == "__main__":
    sys.exit(main())
