"""The experts layer with adapters (LoRA): its time and memory beside the same layer without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from jobs.bench.claims import Claim, at_most
from jobs.bench.kernel_moe import CONDITIONS, EXPERTS, HIDDEN, MOST_ERROR, TOP_K, WIDTH, Layer, make
from jobs.bench.kernel_timing import extra_gib, milliseconds, relative_error
from train.ops.lora_types import ExpertLora
from train.ops.moe import eager
from train.ops.triton_moe import moe_experts

TOKENS, RANK, SCALE = 16384, 16, 2.0
SHARING = {"an adapter for each expert": EXPERTS, "one adapter for all experts": 1}
Op = Callable[..., Tensor]


@dataclass(frozen=True)
class Adapted:
    """A layer, its adapters (None: without) and whether the experts' own weights are trained too."""

    layer: Layer
    lora: ExpertLora | None
    whole: bool

    def both(self, run: Op) -> tuple[Tensor, ...]:
        """Output and gradients of the rows, the routing weights, the adapters and, when trained, the experts."""
        x, weights, gate_up, down = self.layer.leaves
        base = (gate_up, down) if self.whole else (gate_up.detach(), down.detach())
        out = run(x, self.layer.ids, weights, *base, self.lora)
        wanted = (x, weights, *factors_of(self.lora), *(base if self.whole else ()))
        return out, *torch.autograd.grad(out, wanted, self.layer.dout)


def factors_of(lora: ExpertLora | None) -> tuple[Tensor, ...]:
    """gate_a, gate_b, up_a, up_b, down_a, down_b; nothing without adapters."""
    return () if lora is None else (lora.gate_a, lora.gate_b, lora.up_a, lora.up_b, lora.down_a, lora.down_b)


def draw_adapters(entries: int) -> ExpertLora:
    """None of the factors zero, as after some steps."""
    generator = torch.Generator("cuda").manual_seed(entries)

    def factor(rows: int, columns: int) -> Tensor:
        made = torch.randn(entries, rows, columns, generator=generator, device="cuda") * 0.5 * columns**-0.5
        return made.bfloat16().requires_grad_()

    def pair(inner: int, outer: int) -> tuple[Tensor, Tensor]:
        return factor(RANK, inner), factor(outer, RANK)

    return ExpertLora(*pair(HIDDEN, WIDTH), *pair(HIDDEN, WIDTH), *pair(WIDTH, HIDDEN), SCALE)


def widened(lora: ExpertLora) -> ExpertLora:
    """The same in float32."""
    a, b, c, d, e, f = (t.detach().float().requires_grad_() for t in factors_of(lora))
    return ExpertLora(a, b, c, d, e, f, lora.scale)


def claims(quick: bool) -> list[Claim]:
    """All claims; quick changes nothing, it is a few seconds' work."""
    found = [error_claim(name, entries) for name, entries in SHARING.items()]
    layer = make(TOKENS)
    for whole in (False, True):
        what = "all trained" if whole else "experts frozen"
        plain = milliseconds(partial(Adapted(layer, None, whole).both, moe_experts))
        memory = extra_gib(partial(Adapted(layer, None, whole).both, moe_experts))
        said = f"{CONDITIONS}, forward + backward; {memory:.2f} GiB"
        found.append(Claim(f"experts, T={TOKENS}, {what}: no adapter", round(plain, 2), "ms", "", None, said))
        for name, entries in SHARING.items():
            run = partial(Adapted(layer, draw_adapters(entries), whole).both, moe_experts)
            time = milliseconds(run)
            said = f"rank {RANK}; {time:.2f} against {plain:.2f} ms, {extra_gib(run):.2f} against {memory:.2f} GiB"
            title = f"experts, T={TOKENS}, {what}: {name} / none"
            found.append(Claim(title, round(time / plain, 3), "x", "", None, said))
    return found


def error_claim(name: str, entries: int, tokens: int = 1024) -> Claim:
    """Of the output and all gradients, to float32."""
    layer, lora = make(tokens, skew=0.5), draw_adapters(entries)
    leaves = tuple(t.detach().float().requires_grad_() for t in layer.leaves)
    exact = Adapted(Layer(layer.ids, leaves, layer.dout.float()), widened(lora), True)  # type: ignore[arg-type]
    pairs = zip(Adapted(layer, lora, True).both(moe_experts), exact.both(eager), strict=True)
    errors = [relative_error(ours, theirs) for ours, theirs in pairs]
    said = "y, dx, dweights, six factors, dgate_up, ddown: " + ", ".join(f"{error:.1e}" for error in errors)
    title = f"experts, T={tokens}, top-{TOP_K}: {name}: largest relative error to float32"
    return at_most(title, max(errors), MOST_ERROR, "", said)
