"""Full attention on short documents, as in the vision and sound towers: the Triton kernels beside torch's.

    python -m jobs.bench.kernel_vision_attention [--quick] [--tune] [--isolate] [--json FILE]

--tune and --isolate: see `kernel_vision_tuning`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from jobs.bench.claims import Claim, at_least, at_most, report
from jobs.bench.kernel_timing import milliseconds, relative_error
from train.ops.attention import eager
from train.ops.attention_varlen import torch_varlen
from train.ops.segments import Segments
from train.ops.triton_attention import backward, forward, full_attention

ERROR_BOUND = 5e-3
ADOPTED = 1.25  # times torch's speed, below which the kernels would not be worth their lines
REPEATS = 9
MIXED = (256, 1500, 540, 1024, 300, 777, 1296, 400, 640, 900) * 6


@dataclass(frozen=True)
class Case:
    """goal: of the speed of both passes together, as a multiple of torch's; None: no goal."""

    title: str
    lengths: tuple[int, ...]
    heads: int
    size: int
    goal: float | None


CASES = (
    Case("104 grids of 540, 16 heads of 72", (540,) * 104, 16, 72, ADOPTED),
    Case("60 grids of 256 to 1500, 16 heads of 72", MIXED, 16, 72, ADOPTED),
    Case("13 windows of 104, 20 heads of 64", (104,) * 13, 20, 64, None),
)


class Inputs:
    """Rows as the vision tower hands them over: v a view of a joint projection, q and k dense."""

    def __init__(self, lengths: tuple[int, ...], heads: int, size: int) -> None:
        joint = torch.randn(sum(lengths), 3, heads, size, device="cuda", dtype=torch.bfloat16)
        self.segments = Segments.from_lengths(lengths, "cuda")
        self.q, self.k, self.v = joint[:, 0].contiguous(), joint[:, 1].contiguous(), joint[:, 2]
        self.dout = torch.randn_like(self.q)
        self.leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]

    def one(self, attend: Callable[..., Tensor]) -> Tensor:
        """The forward pass."""
        with torch.no_grad():
            return attend(self.q, self.k, self.v)

    def both(self, attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        """(out, dq, dk, dv)."""
        out = attend(*self.leaves)
        return out.detach(), *torch.autograd.grad(out, self.leaves, self.dout)


def claims(quick: bool) -> list[Claim]:
    """quick: the first case alone."""
    return [claim for case in CASES[: 1 if quick else None] for claim in compared(case)]


def compared(case: Case) -> list[Claim]:
    """Times beside torch's, and errors beside float32."""
    inputs = Inputs(case.lengths, case.heads, case.size)
    ours = partial(full_attention, segments=inputs.segments)
    theirs = partial(torch_varlen, segments=inputs.segments, causal=False)
    graph = sum(case.lengths) < 4096
    times = {}
    for name, attend in (("ours", ours), ("torch", theirs)):
        one = milliseconds(partial(inputs.one, attend), REPEATS, graph)
        both = milliseconds(partial(inputs.both, attend), REPEATS, graph)
        times[name] = (one, both - one, both)
    products = 4 * case.heads * case.size * sum(length * length for length in case.lengths) / 1e9  # of the forward pass
    found = []
    for i, (what, factor) in enumerate((("forward", 1.0), ("backward", 2.5), ("both passes", 3.5))):
        said = ", ".join(f"{name} {t[i]:.3f} ms, {factor * products / t[i]:.0f} TFLOP/s" for name, t in times.items())
        title, ratio = f"full attention, {case.title}: {what} beside torch's", times["torch"][i] / times["ours"][i]
        if case.goal is not None and what == "both passes":
            found.append(at_least(title, ratio, case.goal, "x", said))
        else:
            found.append(Claim(title, round(ratio, 3), "x", "", None, said))
    ours_error, torch_error = (max(errors(inputs, attend, case.lengths)) for attend in (ours, theirs))
    title = f"full attention, {case.title}: largest error of result and gradients"
    return [*found, at_most(title, ours_error, ERROR_BOUND, "", f"beside float32; torch's kernel {torch_error:.2e}")]


def errors(inputs: Inputs, attend: Callable[..., Tensor], lengths: tuple[int, ...]) -> list[float]:
    """Of out, dq, dk, dv, beside the eager op in float32."""
    return [relative_error(a, b) for a, b in zip(inputs.both(attend), reference(inputs, lengths), strict=True)]


def reference(inputs: Inputs, lengths: tuple[int, ...]) -> list[Tensor]:
    """out, dq, dk, dv by the eager op in float32, document by document."""
    exact: list[list[Tensor]] = [[], [], [], []]
    pieces = zip(*(x.split(list(lengths)) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)), strict=True)
    for length, (q, k, v, dout) in zip(lengths, pieces, strict=True):
        leaves = [x.float().requires_grad_() for x in (q, k, v)]
        out = eager(leaves[0], leaves[1], leaves[2], Segments.from_lengths([length], "cuda"), causal=False)
        parts = (out.detach(), *torch.autograd.grad(out, leaves, dout.float()))
        for whole, part in zip(exact, parts, strict=True):
            whole.append(part)
    return [torch.cat(parts) for parts in exact]


def same_bits() -> bool:
    """Whether two runs give the same gradients."""
    inputs = Inputs(MIXED, 16, 72)
    out, lse = forward(inputs.q, inputs.k, inputs.v, inputs.segments)
    first, second = (backward(inputs.dout, inputs.q, inputs.k, inputs.v, out, lse, inputs.segments) for _ in range(2))
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="times of candidate tiles first")
    parser.add_argument("--isolate", action="store_true", help="which kernels with bulk copies run, and nothing else")
    parser.add_argument("--quick", action="store_true", help="the first case alone")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("jobs.bench.kernel_vision_attention needs a CUDA device; there is none here", file=sys.stderr)
        return 2
    if arguments.isolate:
        import_module("jobs.bench.kernel_vision_tuning").isolate()
        return 0
    if arguments.tune:
        import_module("jobs.bench.kernel_vision_tuning").tune()
    found = [*claims(arguments.quick), at_least("full attention: same bits twice", float(same_bits()), 1.0, "", "")]
    return 0 if report("full attention", found, arguments.json) else 1


if __name__ == "__main__":
    sys.exit(main())
