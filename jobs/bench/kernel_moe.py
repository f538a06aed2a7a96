"""The experts layer at the shapes of Qwen3-Omni-30B-A3B: speed against peers, memory, skew, error."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from jobs.bench.claims import Claim, at_least, at_most
from jobs.bench.kernel_peers import Experts, experts, loop_experts
from jobs.bench.kernel_timing import PEAK_TFLOPS, extra_gib, milliseconds, relative_error
from train.ops.triton_moe import moe_experts

EXPERTS, TOP_K, HIDDEN, WIDTH = 128, 8, 2048, 768
SHARES = {8192: 50.0, 16384: 58.0, 32768: 62.0}  # % of PEAK_TFLOPS, forward and backward
OVER_VEOMNI = {8192: 1.55, 16384: 1.75, 32768: 1.8}
MOST_GIB, MOST_SKEW, MOST_ERROR = 3.6, 1.06, 5e-3
CONDITIONS = "E=128, top-8, H=2048, I=768, bf16, fresh random routing"


@dataclass
class Layer:
    """Inputs of one size. ids int64 [T, k]; dout [T, H]; leaves: x, weights, gate_up, down, all with gradients."""

    ids: Tensor
    leaves: tuple[Tensor, Tensor, Tensor, Tensor]
    dout: Tensor

    def forward(self, run: Experts) -> Tensor:
        """The layer without gradients."""
        x, weights, gate_up, down = self.leaves
        with torch.no_grad():
            return run(x, self.ids, weights, gate_up, down)

    def both(self, run: Experts) -> tuple[Tensor, ...]:
        """Output and gradients of all leaves."""
        x, weights, gate_up, down = self.leaves
        out = run(x, self.ids, weights, gate_up, down)
        return out, *torch.autograd.grad(out, self.leaves, self.dout)


def make(tokens: int, skew: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> Layer:
    """Random routing; skew: spread of a bias for each expert."""
    generator = torch.Generator("cuda").manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    weights, ids = (draw(tokens, EXPERTS) + skew * draw(EXPERTS)).softmax(-1).topk(TOP_K, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    gate_up, down = draw(EXPERTS, 2 * WIDTH, HIDDEN) * HIDDEN**-0.5, draw(EXPERTS, HIDDEN, WIDTH) * WIDTH**-0.5
    x, dout = draw(tokens, HIDDEN).to(dtype), draw(tokens, HIDDEN).to(dtype)
    leaves = (x, weights, gate_up.to(dtype), down.to(dtype))
    for leaf in leaves:
        leaf.requires_grad_()
    return Layer(ids, leaves, dout)


def claims(quick: bool) -> list[Claim]:
    """All claims; quick: the smallest size alone."""
    found = [*error_claims()]
    peers = experts()
    for tokens in [8192] if quick else SHARES:
        found += speed_claims(tokens, peers)
    if not quick:
        found += skew_claims()
    return found


def speed_claims(tokens: int, peers: dict[str, Experts]) -> list[Claim]:
    layer = make(tokens)
    at = f"experts, T={tokens}"
    flops = 6 * HIDDEN * WIDTH * tokens * TOP_K  # of the forward pass; the backward pass has twice as many
    forward = milliseconds(lambda: layer.forward(moe_experts))
    both = milliseconds(lambda: layer.both(moe_experts))
    share = 3 * flops / both / 1e9 / PEAK_TFLOPS * 100
    seen = f"{CONDITIONS}; {both:.2f} ms, forward alone {forward:.2f} ms"
    found = [at_least(f"{at}: forward + backward, of {PEAK_TFLOPS:g} TFLOP/s", share, SHARES[tokens], "%", seen)]
    forward_share = flops / forward / 1e9 / PEAK_TFLOPS * 100
    found.append(Claim(f"{at}: forward, of {PEAK_TFLOPS:g} TFLOP/s", round(forward_share, 1), "%", "", None, seen))
    memory = extra_gib(lambda: layer.both(moe_experts))
    if tokens == max(SHARES):
        found.append(at_most(f"{at}: extra memory with all gradients", memory, MOST_GIB, "GiB", CONDITIONS))
    for name, peer in peers.items():
        theirs = milliseconds(partial(layer.both, peer))
        ratio = theirs / both
        said = f"{theirs:.2f} ms, {extra_gib(partial(layer.both, peer)):.2f} GiB against ours {memory:.2f}"
        bound = OVER_VEOMNI[tokens] if name.startswith("veomni") else 1.0
        found.append(at_least(f"{at}: {name} / ours, forward + backward", ratio, bound, "x", said))
    torch.cuda.empty_cache()
    return found


def skew_claims(tokens: int = 16384, skew: float = 1.0) -> list[Claim]:
    times, loads = [], []
    for spread in (0.0, skew):
        layer = make(tokens, spread)
        loads.append(int(layer.ids.flatten().bincount(minlength=EXPERTS).max()) / (tokens * TOP_K / EXPERTS))
        times.append(milliseconds(partial(layer.both, moe_experts)))
    said = f"busiest expert has {loads[1]:.1f} times the mean load, otherwise {loads[0]:.1f}"
    return [at_most(f"experts, T={tokens}: skewed / even routing, time", times[1] / times[0], MOST_SKEW, "x", said)]


def error_claims(tokens: int = 2048) -> list[Claim]:
    layer = make(tokens, skew=0.5)
    exact = Layer(layer.ids, tuple(t.detach().float().requires_grad_() for t in layer.leaves), layer.dout.float())  # type: ignore[arg-type]
    pairs = zip(layer.both(moe_experts), exact.both(loop_experts), strict=True)
    errors = [relative_error(ours, theirs) for ours, theirs in pairs]
    said = "y, dx, dweights, dgate_up, ddown: " + ", ".join(f"{error:.1e}" for error in errors)
    return [at_most(f"experts, T={tokens}: largest relative error to float32", max(errors), MOST_ERROR, "", said)]
