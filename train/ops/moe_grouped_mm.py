"""The experts as grouped matrix products of rows sorted by expert. Nothing waits for the device: group sizes stay on
it, and rows of no expert are sorted behind the last group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from schemas.errors import UnsupportedError
from train.ops.compiled import compiled
from train.ops.lora_types import ExpertLora
from train.ops.moe import eager

MULTIPLE = 8  # the products on a GPU, and those of 16 bits anywhere, take rows of whole 16 bytes


class Routing(NamedTuple):
    """Rows sorted by expert, N = T * k. rows: int64 [N], the input row of each; place: int64 [T, k], where each choice
    went; live: bool [N, 1], chosen by an expert that is there; chosen: bool [T, k], the same unsorted; ends: int32 [E],
    one past each expert's last sorted row."""

    rows: Tensor
    place: Tensor
    live: Tensor
    chosen: Tensor
    ends: Tensor


def grouped_mm(
    x: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, lora: ExpertLora | None = None
) -> Tensor:
    """As `train.ops.moe.eager`; float32, bfloat16 or float16; bfloat16 is compiled on a GPU."""
    if not x.shape[0]:
        return eager(x, expert_ids, weights, gate_up, down, lora)  # the products take no empty matrix
    narrow = x.is_cuda or x.element_size() < 4
    if narrow and (x.shape[1] % MULTIPLE or down.shape[2] % MULTIPLE):
        raise UnsupportedError(
            f"moe_implementation grouped_mm takes multiples of {MULTIPLE}, not hidden size {x.shape[1]} and expert "
            f"width {down.shape[2]}; set model.ops_implementation.moe_implementation to eager"
        )
    pairs = () if lora is None else (lora.gate_a, lora.gate_b, lora.up_a, lora.up_b, lora.down_a, lora.down_b)
    run: Callable[..., Tensor] = _experts
    if x.is_cuda and x.dtype == torch.bfloat16:  # the only dtype of these products that torch's compiler knows
        run = compiled(_experts, (gate_up.shape, expert_ids.shape[1], *(part.shape for part in pairs)))
    out = run(x, expert_ids, weights, gate_up, down, pairs, 0.0 if lora is None else lora.scale)
    return out


def _experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    pairs: tuple[Tensor, ...],
    scale: float,
) -> Tensor:
    routing = route(expert_ids, gate_up.shape[0])
    inputs: Tensor = Dispatch.apply(x, *routing)
    gate, up = _project(inputs, gate_up, routing).chunk(2, dim=-1)
    if pairs:
        gate = gate + _update(inputs, pairs[0], pairs[1], routing) * scale
        up = up + _update(inputs, pairs[2], pairs[3], routing) * scale
    hidden = F.silu(gate) * up
    outputs = _project(hidden, down, routing)
    if pairs:
        outputs = outputs + _update(hidden, pairs[4], pairs[5], routing) * scale
    combined: Tensor = Combine.apply(outputs, weights, *routing)
    return combined


def route(expert_ids: Tensor, experts: int) -> Routing:
    """The sorted order of int64 [T, k] ids; those outside [0, experts) come last."""
    chosen = (expert_ids >= 0) & (expert_ids < experts)
    ids, order = torch.where(chosen, expert_ids, experts).reshape(-1).sort(stable=True)
    numbers = torch.arange(len(order), device=order.device)
    place = torch.empty_like(order).scatter(0, order, numbers).view_as(expert_ids)
    ends = torch.searchsorted(ids, torch.arange(experts, device=ids.device), right=True, out_int32=True)
    return Routing(order // expert_ids.shape[1], place, (ids < experts)[:, None], chosen, ends)


class Dispatch(Function):
    """x [T, H] -> [N, H] sorted by expert; its gradient is a gather and a sum in float32, the same in every run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, place: Tensor, live: Tensor, chosen: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(place, chosen)
        return x[rows]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        place, chosen = ctx.saved_tensors
        parts = grad[place].to(torch.float32)
        return torch.where(chosen[..., None], parts, 0.0).sum(dim=1).to(grad.dtype), None, None, None, None, None


class Combine(Function):
    """sorted [N, H] and weights [T, k] -> [T, H], the weighted sum of each row's k outputs in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        outputs: Tensor,
        weights: Tensor,
        rows: Tensor,
        place: Tensor,
        live: Tensor,
        chosen: Tensor,
        ends: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(outputs, weights, rows, place, live, chosen)
        parts = torch.where(chosen[..., None], outputs[place].to(torch.float32) * weights[..., None], 0.0)
        return parts.sum(dim=1).to(outputs.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        outputs, weights, rows, place, live, chosen = ctx.saved_tensors
        wide = grad.to(torch.float32)
        by_row = torch.zeros_like(live[:, 0], dtype=torch.float32).scatter(
            0, place.reshape(-1), weights.reshape(-1).float()
        )
        to_outputs = torch.where(live, wide[rows] * by_row[:, None], 0.0).to(outputs.dtype)
        products = (outputs[place].to(torch.float32) * wide[:, None]).sum(dim=-1)
        to_weights = torch.where(chosen, products, 0.0).to(weights.dtype)
        return to_outputs, to_weights, None, None, None, None, None


def _project(x: Tensor, weight: Tensor, routing: Routing) -> Tensor:
    """x [N, in] by weight [E, out, in] of each row's expert -> [N, out], zero in rows of no expert: there the product
    leaves what was in memory before, in its output, and in its gradient, which the mask of x holds back."""
    out = F.grouped_mm(torch.where(routing.live, x, 0.0), weight.transpose(-2, -1), offs=routing.ends)
    return torch.where(routing.live, out, 0.0)


def _update(x: Tensor, a: Tensor, b: Tensor, routing: Routing) -> Tensor:
    """b @ a @ x of each row's expert; the rank is filled up with zeros to what the products take."""
    a, b = a.to(x.dtype), b.to(x.dtype)
    missing = -a.shape[1] % MULTIPLE
    if missing:
        a, b = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))
    for matrix in (a, b):
        shared = matrix.shape[0] == 1 and routing.ends.shape[0] != 1
        x = F.linear(x, matrix[0]) if shared else _project(x, matrix, routing)
    return x
