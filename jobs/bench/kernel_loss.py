"""The head with its loss at a vocabulary of 151,936: speed against peers, memory, error."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from jobs.bench.claims import Claim, at_least, at_most
from jobs.bench.kernel_peers import Loss, losses
from jobs.bench.kernel_timing import PEAK_TFLOPS, extra_gib, milliseconds, relative_error
from train.ops.linear_cross_entropy import eager
from train.ops.triton_linear_cross_entropy import linear_cross_entropy

VOCABULARY, HIDDEN = 151_936, 2048
SHARE, MOST_GIB, MOST_ERROR = 76.0, 2.6, 5e-3
OVER = {"veomni chunk_loss": {8192: 1.6, 32768: 1.6}, "liger": {8192: 2.2, 32768: 1.08}}


def make(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [T, H] and weight [V, H], with gradients; labels [T]."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, device="cuda") * HIDDEN**-0.5
    labels = torch.randint(0, VOCABULARY, (tokens,), generator=generator, device="cuda")
    return hidden, weight.bfloat16().requires_grad_(), labels


def ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Mean over the tokens, with float32 accumulation of the weight's gradient."""
    scale = torch.full((), 1 / labels.numel(), device=labels.device)
    return linear_cross_entropy(hidden, weight, labels, scale=scale).loss


def by_row(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The same with a scale for each row, of either sign, as policy gradients have it."""
    scale = torch.linspace(-1, 1, labels.numel(), device=labels.device) / labels.numel()
    return linear_cross_entropy(hidden, weight, labels, scale=scale).loss


def step(run: Loss, given: tuple[Tensor, Tensor, Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """Loss and both gradients."""

    def both() -> tuple[Tensor, ...]:
        loss = run(*given)
        return loss, *torch.autograd.grad(loss, given[:2])

    return both


def claims(quick: bool) -> list[Claim]:
    """All claims; quick: the smaller size alone."""
    found = error_claims()
    peers = losses()
    for tokens in (8192,) if quick else (8192, 32768):
        found += speed_claims(tokens, peers)
    return found


def speed_claims(tokens: int, peers: dict[str, Loss]) -> list[Claim]:
    given = make(tokens)
    at = f"head and loss, T={tokens}"
    time = milliseconds(step(ours, given), repeats=9)
    share = 6 * tokens * HIDDEN * VOCABULARY / time / 1e9 / PEAK_TFLOPS * 100
    memory = extra_gib(step(ours, given))
    said = f"V=151,936, H=2048, bf16; {time:.2f} ms"
    found = [
        at_least(f"{at}: forward + backward, of {PEAK_TFLOPS:g} TFLOP/s", share, SHARE, "%", said),
        at_most(f"{at}: extra memory with both gradients", memory, MOST_GIB, "GiB", "weight's gradient in float32"),
    ]
    each = milliseconds(step(by_row, given), repeats=9)
    found.append(at_most(f"{at}: time with a scale for each row / with one", each / time, 1.02, "x", f"{each:.2f} ms"))
    for name, peer in peers.items():
        theirs = milliseconds(step(peer, given), repeats=5)
        said = f"{theirs:.2f} ms, {extra_gib(step(peer, given)):.2f} GiB"
        found.append(at_least(f"{at}: {name} / ours", theirs / time, OVER[name][tokens], "x", said))
    torch.cuda.empty_cache()
    return found


def error_claims(tokens: int = 5000) -> list[Claim]:
    """Two chunks against float32."""
    hidden, weight, labels = make(tokens)
    exact = (hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_(), labels)

    def reference(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return eager(hidden, weight, labels, scale=torch.full((), 1 / tokens, device=labels.device)).loss

    pairs = zip(step(ours, (hidden, weight, labels))(), step(reference, exact)(), strict=True)
    errors = [relative_error(a, b) for a, b in pairs]
    said = "loss, dhidden, dweight: " + ", ".join(f"{error:.1e}" for error in errors)
    found = [
        at_most(f"head and loss, T={tokens}: largest relative error to float32", max(errors), MOST_ERROR, "", said)
    ]

    def reference_by_row(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return eager(hidden, weight, labels, scale=torch.linspace(-1, 1, tokens, device=labels.device) / tokens).loss

    pairs = zip(step(by_row, (hidden, weight, labels))()[1:], step(reference_by_row, exact)()[1:], strict=True)
    errors = [relative_error(a, b) for a, b in pairs]  # the loss itself is a difference of large terms
    said = "dhidden, dweight: " + ", ".join(f"{error:.1e}" for error in errors)
    what = f"head and loss, T={tokens}: the same with a scale for each row"
    return [*found, at_most(what, max(errors), MOST_ERROR, "", said)]
