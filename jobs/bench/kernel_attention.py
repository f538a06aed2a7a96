"""Attention backends on packed documents: which is fastest here, and at which rate."""

from __future__ import annotations

import torch
from torch import Tensor

from jobs.bench.claims import Claim, at_least
from jobs.bench.kernel_timing import Run, milliseconds
from train.ops.registry import OPS, Device
from train.ops.segments import Segments

HEADS, KV_HEADS, DIM = 32, 4, 128
PACKED = [4096] * 8
TFLOPS_BOUND = 320.0
TOO_SLOW = ("eager",)  # a whole matrix of 32,768 rows


def claims(quick: bool) -> list[Claim]:
    """Packed documents of 4,096 tokens; without quick also one document of 32,768."""
    names = [
        name for name in OPS["attention"].available(Device("cuda", torch.cuda.get_device_capability()), "bfloat16")
    ]
    found: list[Claim] = []
    for title, lengths in [("packed 8 x 4096", PACKED)] + ([] if quick else [("one document of 32768", [32768])]):
        rates: dict[str, float] = {}
        for name in names:
            if name not in TOO_SLOW:
                rates[name], said = rate(name, lengths)
                found.append(Claim(f"attention {title}: {name}", round(rates[name], 1), "TFLOP/s", "", None, said))
        best = max(rates, key=lambda name: rates[name])
        if lengths is PACKED:
            said = f"fastest: {best}; auto takes {names[0]}"
            found.append(
                at_least(f"attention {title}: what auto takes", rates[names[0]], TFLOPS_BOUND, "TFLOP/s", said)
            )
    return found


def rate(name: str, lengths: list[int]) -> tuple[float, str]:
    """TFLOP/s of forward and backward (3.5 times the forward's products, causal), and the times in words."""
    attend = OPS["attention"].backends[name].load()
    segments = Segments.from_lengths(lengths, "cuda")
    q, k, v = (
        torch.randn(sum(lengths), heads, DIM, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    dout = torch.randn_like(q)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(q, k, v, segments, causal=True), (q, k, v), dout)

    flops = 3.5 * 2 * HEADS * DIM * sum(length * length for length in lengths)
    run: Run = both
    time = milliseconds(run, repeats=7)
    return flops / time / 1e9, f"{HEADS}/{KV_HEADS} heads of {DIM}, bf16, causal; {time:.2f} ms"
