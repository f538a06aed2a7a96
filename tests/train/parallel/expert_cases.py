"""A layer of experts in parts, its rows and weights, and an op that does in its backward pass what it is asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from train.ops import moe, moe_grouped_mm
from train.ops.expert_backward import ExpertBackward
from train.ops.lora_types import ExpertLora

EXPERTS, HIDDEN, INNER, CHOICES, RANK = 8, 16, 12, 3, 2
BACKENDS = {"eager": moe.eager, "grouped_mm": moe_grouped_mm.grouped_mm}


class _Asked(torch.autograd.Function):
    """The plain experts, which do in the backward pass what they are asked for."""

    @staticmethod
    def forward(ctx: Any, asked: ExpertBackward, ids: Tensor, *tensors: Tensor) -> Tensor:
        ctx.asked, ctx.ids = asked, ids
        ctx.save_for_backward(*tensors)
        return terms(ids, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        tensors = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            found = list(torch.autograd.grad(terms(ctx.ids, tensors), tensors, gradients, allow_unused=True))
        ctx.asked.dx_made(found[0])
        for number, so_far in enumerate(ctx.asked.so_far(), 2):
            if so_far is not None:
                so_far += found[number]
                found[number] = None
        return None, None, *found


def terms(ids: Tensor, tensors: Any) -> Tensor:
    x, weights, gate_up, down, *factors = tensors
    return moe.eager(x, ids, weights, gate_up, down, ExpertLora(*factors, scale=0.7) if factors else None)


def obedient(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, lora: Any = None, *, asked: ExpertBackward
) -> Tensor:
    names = ("gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")
    factors = () if lora is None else tuple(getattr(lora, name) for name in names)
    out: Tensor = _Asked.apply(asked, ids, x, weights, gate_up, down, *factors)
    return out


MOST_ROWS = 21  # of a rank, where rows are gathered
# rows of each of four ranks; two ranks take two each; only: experts that are chosen among
CASES: dict[str, tuple[tuple[int, ...], range]] = {
    "even": ((9, 9, 9, 9), range(EXPERTS)),
    "more experts than rows": ((1, 1, 1, 0), range(EXPERTS)),
    "rows for the first rank alone": ((5, 0, 7, 3), range(3)),
    "rows for the last rank alone": ((5, 2, 0, 3), range(5, EXPERTS)),
    "no rows": ((0, 0, 0, 0), range(EXPERTS)),
}


def layer() -> dict[str, Tensor]:
    """Weights and adapters: of each expert for the down product, shared a and own b for the others."""
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "gate_up": (EXPERTS, 2 * INNER, HIDDEN),
        "down": (EXPERTS, HIDDEN, INNER),
        "gate_a": (1, RANK, HIDDEN),
        "gate_b": (EXPERTS, INNER, RANK),
        "up_a": (1, RANK, HIDDEN),
        "up_b": (1, INNER, RANK),
        "down_a": (EXPERTS, RANK, INNER),
        "down_b": (EXPERTS, HIDDEN, RANK),
    }
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def rows_of(case: str, rank: int, ranks: int) -> dict[str, Tensor]:
    """x, ids, weights and a gradient of the output, of one rank of 1, 2 or 4."""
    counts, chosen = CASES[case]
    generator = torch.Generator().manual_seed(6)
    total = sum(counts)
    x, gradient = (torch.randn(total, HIDDEN, generator=generator) for _ in range(2))
    ids = torch.rand(total, len(chosen), generator=generator).argsort(1)[:, :CHOICES]
    weights = torch.rand(total, CHOICES, generator=generator)
    share = 4 // ranks
    first, last = sum(counts[: rank * share]), sum(counts[: (rank + 1) * share])
    whole = {"x": x, "ids": ids + chosen.start, "weights": weights, "gradient": gradient}
    return {name: value[first:last] for name, value in whole.items()}


def run(compute: Any, rows: dict[str, Tensor], weights: dict[str, Tensor], adapted: bool) -> dict[str, Tensor]:
    """The output and every gradient; `weights` are leaves, some of them DTensors."""
    x, shares = rows["x"].clone().requires_grad_(), rows["weights"].clone().requires_grad_()
    lora = ExpertLora(**{n: w for n, w in weights.items() if n not in ("gate_up", "down")}, scale=0.7)
    out = compute(x, rows["ids"], shares, weights["gate_up"], weights["down"], lora if adapted else None)
    out.backward(rows["gradient"])
    found = {"out": out.detach(), "x": x.grad, "weights": shares.grad}
    found |= {name: weight.grad for name, weight in weights.items() if adapted or name in ("gate_up", "down")}
    return {name: torch.zeros(()) if value is None else value for name, value in found.items()}


def leaves(group: Any = None) -> dict[str, Tensor]:
    """group: whose ranks hold parts of the experts; adapters stay whole but for one."""
    found = {}
    for name, value in layer().items():
        if group is not None and name in ("gate_up", "down", "down_a"):
            own = value.chunk(group.size())[group.get_local_rank()].clone()
            found[name] = DTensor.from_local(own, group, [Shard(0)], run_check=False).requires_grad_()
        else:
            found[name] = value.clone().requires_grad_()
    return found


def one_share(x: Tensor, ids: Tensor, shares: Tensor, *_: Any) -> Tensor:
    return x * shares[:, :1]
