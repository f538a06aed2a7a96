"""Parallel training on two GPUs: step times against one, communication, memory over the length of the sequence.

    python -m jobs.bench.parallel [--quick] [--only SECTION ...] [--json FILE]

The text model of Qwen3-Omni-30B-A3B with few layers and random weights, in bfloat16 with float32 masters. Sections:
steps (one GPU, then shards, experts, sequences over two), communication (share of a step that NCCL's kernels take and
nothing overlaps; bytes of the all-to-alls against what is computed), context (twice the context on two ranks), slope
(activation memory over length with 1, 2 and 4 ranks of a sequence), recompute (what is kept for the backward pass).
With --quick it runs tiny sizes on CPUs over gloo, to try the script; else it needs two CUDA devices and exits 2
without.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

SECTIONS = ("steps", "communication", "context", "slope", "recompute")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes on CPUs over gloo")
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=SECTIONS)
    parser.add_argument("--layers", type=int, help="of the model; default 6 for steps, 4 for memory")
    parser.add_argument("--tokens", type=int, default=16384, help="of each rank in `steps`, default %(default)s")
    parser.add_argument("--attention", default="auto", help="attn_implementation, default %(default)s")
    parser.add_argument("--json", type=Path, help="also write the claims here, as they come")
    arguments = parser.parse_args()
    if arguments.quick:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler's own messages
    # the ranks import this module again, and torch reads the environment once
    from jobs.bench.parallel_sections import run_sections  # noqa: PLC0415

    return run_sections(arguments)


if __name__ == "__main__":
    sys.exit(main())
