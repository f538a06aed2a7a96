"""The experts of a mixture-of-experts layer as fused Triton kernels; the backend `fused_triton`.

Forward: routing on the device, gate and up products with the token gather in the prologue and SwiGLU in the epilogue,
the down product, a weighted gather-sum in float32. Backward after SonicMoE (arXiv:2512.14080): the gradient of h is
never stored; one kernel turns it into the gradients of the pre-activations and of the routing weights. Saved are x and
the pre-activations only, before the down product: gradient checkpointing, which stops once all is saved again, does
not compute that a second time, nor the pre-activations where the block keeps them (`train.ops.recorded`). No atomics,
so every run gives the same bits; no host sync, so a CUDA graph can hold it.

One H200, E = 128, k = 8, H = 2048, I = 768, bfloat16, forward and backward at T = 8192, 16384, 32768: 3.8 to 4.0, 7.3
to 7.6, 13.7 to 14.3 ms, which is 59 to 61, 62 to 64, 66 to 68 % of 790 TFLOP/s, in 1.7, 2.2, 3.2 GiB with all
gradients. VeOmni 0.1.12's Triton experts took 1.88 to 1.99 times as long and up to 8.9 GiB; compiled grouped_mm 1.17 to
1.24 times. A busiest expert of 13.8 times the mean load costs 1 %. Errors to float32: 2.6e-3 to 3.5e-3.

Shapes: T rows, H hidden size, k chosen experts per row, E experts, I width of an expert, M = T * k, R LoRA rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from schemas.errors import UnsupportedError
from train.ops.expert_backward import ExpertBackward
from train.ops.lora_types import ExpertLora
from train.ops.recorded import Recording, recording_of
from train.ops.triton_moe_first import FirstHalf, GateUp, first_half
from train.ops.triton_moe_gemm import add_weight_gradient, down_backward, row_products, weight_gradient
from train.ops.triton_moe_lora import kernel_factors
from train.ops.triton_moe_rows import gather_sum, spread, weight_sums


def moe_experts(
    x: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, lora: ExpertLora | None = None,
    asked: ExpertBackward | None = None,
) -> Tensor:  # fmt: skip
    """[T, H] = sum over j of weights[t, j] * down[e] @ (silu(gate) * up), summed in float32.

    x: [T, H]; expert_ids: int64 [T, k], those outside [0, E) contribute nothing; weights: float32 [T, k];
    gate_up: [E, 2I, H], the gate's rows first; down: [E, H, I]. H and I must be multiples of 8 (4 for float32), which
    the descriptors' strides of 16 bytes ask for. The backward pass overwrites what it saved: it runs once. asked: of
    the backward pass.
    """
    aligned = 16 // x.element_size()
    if x.shape[1] % aligned or down.shape[2] % aligned:
        raise UnsupportedError(
            f"moe_implementation fused_triton takes multiples of {aligned} in {x.dtype}, not hidden size {x.shape[1]} "
            f"and expert width {down.shape[2]}; set model.ops_implementation.moe_implementation to eager"
        )
    if not x.dtype == gate_up.dtype == down.dtype:
        raise UnsupportedError(
            f"moe_implementation fused_triton takes rows and experts of one dtype, not {x.dtype}, {gate_up.dtype} and "
            f"{down.dtype}; cast the experts to the dtype that the model computes in"
        )
    factors = kernel_factors(lora, x.dtype) if lora is not None else (None,) * 5
    tensors = (x.contiguous(), weights.float().contiguous(), _dense(gate_up), _dense(down), *factors)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    between = _Between(recording_of("mlp"))
    out: Tensor = _Down.apply(between, _Experts.apply(between, asked or ExpertBackward(), expert_ids, keep, *tensors))
    return out


class _Between:
    """What `_Experts` leaves to `_Down`, past autograd and once. recording: of the block that runs, if it keeps what
    `_Experts` saves."""

    def __init__(self, recording: Recording | None) -> None:
        self.recording = recording
        self.products: Callable[[], Tensor] | None = None

    def take(self) -> Callable[[], Tensor]:
        products, self.products = self.products, None
        assert products is not None, "the first half comes before the second"
        return products


class _Experts(torch.autograd.Function):
    """Computes and saves what the backward pass of the whole needs, which is here. Its output stands for that of
    `_Down` and has its shape, but neither values nor memory."""

    @staticmethod
    def forward(
        ctx: Any, between: _Between, asked: ExpertBackward, expert_ids: Tensor, keep: bool, x: Tensor,
        weights: Tensor, gate_up: Tensor, down: Tensor, *factors: Tensor | None,
    ) -> Tensor:  # fmt: skip
        low_a, gate_b, up_b, down_a, down_b = factors
        given = GateUp(x, expert_ids, gate_up, low_a, gate_b, up_b)
        half = first_half(given, between.recording, asked.share, keep=keep)
        ctx.routing, ctx.asked = half.routing, asked
        ctx.save_for_backward(x, half.z, half.low, weights, gate_up, down, *factors)
        between.products = partial(_down_products, given, half, down, weights, down_a, down_b)
        return x.new_empty(()).expand(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, z, low, weights, gate_up, down, low_a, gate_b, up_b, down_a, down_b = ctx.saved_tensors
        routing, needs = ctx.routing, ctx.needs_input_grad[4:]  # of x, weights, gate_up, down
        tokens = x.shape[0]
        gate_up_so_far, down_so_far = ctx.asked.so_far()
        dy = spread(dout.contiguous(), routing)
        low_dy = None if down_b is None else row_products(dy, down_b, routing, transposed=False)
        scaled, partial = down_backward(dy, down, z, weights, routing, low_dy, down_a)
        dz = z  # a second backward pass would take these gradients for activations, so autograd must refuse it
        torch.autograd.graph.increment_version(z)
        dweights = weight_sums(partial, routing, weights.shape) if needs[1] else None
        ddown = add_weight_gradient(down_so_far, dy, scaled, routing) if needs[3] else None
        ddown_a = ddown_b = dlow = dlow_a = dgate_b = dup_b = None
        if low_dy is not None:
            low_scaled = row_products(scaled, down_a, routing, transposed=True)
            ddown_b = weight_gradient(dy, low_scaled, routing, shared=down_b.shape[0] == 1)
            ddown_a = weight_gradient(low_dy, scaled, routing, shared=down_a.shape[0] == 1)
            dlow, dgate_b, dup_b = _low_backward(dz, low, gate_b, up_b, routing)
        del dy, scaled, low_dy, partial
        dx = None
        if needs[0]:
            dx = gather_sum(row_products(dz, gate_up, routing, False, dlow, low_a), routing, None, tokens)
            if ctx.asked.dx_made is not None:
                ctx.asked.dx_made(dx)
        dgate_up = None
        if needs[2] or dlow is not None:
            rows = spread(x, routing)
            dgate_up = add_weight_gradient(gate_up_so_far, dz, rows, routing) if needs[2] else None
            if dlow is not None:
                dlow_a = weight_gradient(dlow, rows, routing, shared=low_a.shape[0] == 1)
        return None, None, None, None, dx, dweights, dgate_up, ddown, dlow_a, dgate_b, dup_b, ddown_a, ddown_b


class _Down(torch.autograd.Function):
    """Saves nothing: the gradient of its output is that of the output which stood for it."""

    @staticmethod
    def forward(ctx: Any, between: _Between, stands_for_it: Tensor) -> Tensor:
        return between.take()()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[None, Tensor]:
        return None, dout


def _down_products(
    given: GateUp, half: FirstHalf, down: Tensor, weights: Tensor, down_a: Tensor | None, down_b: Tensor | None
) -> Tensor:
    """[T, H] of h [M, I], which is made once more where it was not for want of anybody who asks for it."""
    routing = half.routing
    h = given.products(routing, 0)[2] if half.h is None else half.h
    low = None if down_a is None else row_products(h, down_a, routing, transposed=True)
    y = row_products(h, down, routing, transposed=True, low=low, low_b=down_b)
    return gather_sum(y, routing, weights, weights.shape[0])


def _low_backward(dz: Tensor, low: Tensor, gate_b: Tensor, up_b: Tensor, routing: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(dlow [M, 2R], dgate_b, dup_b [E or 1, I, R]) of z = ... + [low_gate @ gate_b.T | low_up @ up_b.T]."""
    width, rank = gate_b.shape[1:]
    halves = ((dz[:, :width], low[:, :rank], gate_b), (dz[:, width:], low[:, rank:], up_b))
    dlow = torch.cat([row_products(part, b, routing, transposed=False) for part, _, b in halves], dim=1)
    dgate_b, dup_b = (weight_gradient(part, half, routing, shared=b.shape[0] == 1) for part, half, b in halves)
    return dlow, dgate_b, dup_b


def _dense(weights: Tensor) -> Tensor:
    """Contiguous and beginning at a multiple of 16 bytes, as descriptors want: a copy of what lies otherwise."""
    weights = weights.contiguous()
    return weights.clone() if weights.storage_offset() * weights.element_size() % 16 else weights
