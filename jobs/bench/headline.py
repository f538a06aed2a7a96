"""The real Qwen3-Omni-30B-A3B thinker on two GPUs: speed of whole steps, context of 160K tokens, LoRA on one GPU, a
peer beside it, and the time from launch to the first step.

    python3 -u -m jobs.bench.headline --json FILE [--only PART ...] [--layers N] [--nproc 2] [--set KEY=VALUE ...]

Weights are random, made on the GPUs; data are drawn and packed here, then streamed by the real loader; steps are the
real trainer's: data, forward, backward, clipping, optimizer, logging. All parameters, momenta and gradients are in
bfloat16 with stochastic rounding, matrices trained by Muon. Parts, each in processes of its own and with a time limit:

  profile  one step of few layers (8) under the profiler: kernels in groups, gaps, communication
  full     full fine-tune, micro-batches of 16k tokens (documents of 4k), 1 and 8 a step
  half     the same, 8 a step, of documents with half as much film and sound, and more words
  32k, 64k the same with longer micro-batches; --whole: of one document
  160k     one sample of 163,840 tokens, a sequence over two GPUs; inputs of blocks wait in CPU memory
  lora     adapters of experts and attention, rank 16, of the whole model on one GPU
  veomni   the text model, 8 layers, with AdamW under FSDP2: ours and VeOmni's, with the same attention and our best
  cold     from launch to the first step with weights on the local disk, against what the disk reads

--set train.accelerator.ep_size=2 (any key of the configuration) tries a setting; --title TEXT marks its claims; --add
keeps the claims that FILE has. On 4 or 8 GPUs: --nproc 4 or 8 (160k then has 2 or 4 sequences a step).
--quick runs the parts on CPUs over gloo with a tiny model; without a GPU and without --quick it exits with 2.

Expected on each of 2 GPUs of 150.7 GB, in GB (B = 10^9): 31.7 B parameters x 3 tensors x 2 bytes / 2 = 95.2; root
(embedding, head) gathered 1.3 and its gradient 1.3; two blocks gathered 2.5; gradients of a block on their way, in
bfloat16, 1.3 whole + 1.3 to send + 0.6 received, of two blocks at a time 6 (in float32: 11); head and loss 1.3 logits
+ 1.3 sum + 0.6; CUDA and NCCL 2. That is 110 before activations; then for 16k tokens 3.2 inputs of text blocks, 3.5 of
vision blocks (56k patches), 4.5 inside a block: about 121. 32k: 131. 64k with inputs on the CPU: 128 (without: 155,
too much). 160k with sp=2: 82k tokens and 313k patches each, inputs on the CPU (36 a rank there), 13 inside a vision
block: about 127. LoRA on one GPU: 63.4 base + 0.85 B adapters x 8 bytes 6.8 + 8 of activations: about 85. Muon works in
portions of 0.27 and takes 3 when activations are gone. In full, half, 32k and 64k the optimizer's averages are in CPU
memory, 32 less on each GPU, which results that blocks keep fill again: 134, 126 and 137 were measured of the first
three, and of 64k 120 are expected.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

PARTS = ("profile", "full", "half", "32k", "64k", "160k", "lora", "veomni", "cold")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model on CPUs over gloo")
    parser.add_argument("--only", choices=PARTS, nargs="+", help="these parts, in this order; default: all")
    parser.add_argument("--layers", type=int, help="of the text model; default 48, 8 in profile, veomni and cold")
    parser.add_argument("--nproc", type=int, default=2, help="GPUs, default %(default)s")
    parser.add_argument("--whole", action="store_true", help="32k and 64k: one document instead of many of 4k")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="a key of the configuration")
    parser.add_argument("--title", default="", help="what the claims of this call are marked with")
    parser.add_argument("--limit", type=float, help="seconds of each part; default: a part's own")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/omniloom-headline"), help="for data and all output")
    parser.add_argument("--add", action="store_true", help="keep the claims that the JSON file has")
    parser.add_argument("--json", type=Path, help="also write the claims here, as they come")
    arguments = parser.parse_args()
    if arguments.quick:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        arguments.folder = arguments.folder / "quick"
    # every process of a pool imports this module again, which must not cost it seconds
    from jobs.bench.headline_parts import run_parts  # noqa: PLC0415

    return run_parts(arguments)


if __name__ == "__main__":
    sys.exit(main())
