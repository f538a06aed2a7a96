"""AdamW (Loshchilov and Hutter 2019) of parameters and averages in float32 or bfloat16, and zeros for gradients that a
step did not make."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from train.optim.kernels import kernel
from train.optim.rounding import Draws, round_to

CHUNK = 1 << 22  # elements at a time on a CPU, which bounds the memory for what is in between


@dataclass(frozen=True)
class AdamWNumbers:
    """Of one group at one step, counted from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int

    @property
    def kept(self) -> float:
        """What decay leaves of a parameter."""
        return 1 - self.lr * self.weight_decay

    @property
    def size(self) -> float:
        """The learning rate over the first average's bias correction."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def root(self) -> float:
        """Square root of the second average's bias correction."""
        return math.sqrt(1 - self.beta2**self.step)


@dataclass(frozen=True)
class AdamWTensors:
    """Of one parameter, this rank's part, contiguous: the parameter, its gradient, the averages of the gradient and of
    its square."""

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @property
    def fused(self) -> bool:
        """Whether torch's fused kernel takes them."""
        tensors = (self.parameter, self.gradient, self.exp_avg, self.exp_avg_sq)
        return self.parameter.is_cuda and all(tensor.dtype == torch.float32 for tensor in tensors)

    def flat(self) -> AdamWTensors:
        return AdamWTensors(*(t.view(-1) for t in (self.parameter, self.gradient, self.exp_avg, self.exp_avg_sq)))

    def part(self, start: int, stop: int) -> AdamWTensors:
        tensors = (self.parameter, self.gradient, self.exp_avg, self.exp_avg_sq)
        return AdamWTensors(*(t[start:stop] for t in tensors))


def adamw_update(tensors: AdamWTensors, numbers: AdamWNumbers, draws: tuple[Draws, Draws] | None) -> None:
    """In place; computed in float32, each tensor rounded once. draws: for what is in bfloat16; the first one's lower 16
    bits are the parameter's, its upper ones the first average's; the second one is the second average's. None: rounded
    to the nearest value.

    The second average needs them most: with beta2 0.999 a step takes 0.1% of it away, less than half a unit in the last
    place of bfloat16 (0.2 to 0.4%), so that rounded to the nearest it would never fall again.
    """
    if not tensors.parameter.numel():
        return
    flat = tensors.flat()
    if tensors.parameter.is_cuda:
        kernel("triton_adamw:adamw")(flat, numbers, draws)
        return
    for start in range(0, flat.parameter.numel(), CHUNK):
        stop = min(start + CHUNK, flat.parameter.numel())
        _update(flat.part(start, stop), numbers, draws, start)


def adamw_updates(updates: Sequence[tuple[AdamWTensors, AdamWNumbers, tuple[Draws, Draws] | None]]) -> None:
    """`adamw_update` of each, with the same bits; on a GPU small ones in few launches."""
    if updates and all(tensors.parameter.is_cuda for tensors, _, _ in updates):
        kernel("triton_adamw:adamw_many")([(tensors.flat(), numbers, draws) for tensors, numbers, draws in updates])
        return
    for tensors, numbers, draws in updates:
        adamw_update(tensors, numbers, draws)


def fused_update(alike: Sequence[tuple[AdamWTensors, AdamWNumbers]]) -> None:
    """Float32 parameters and averages on a GPU, of one group, by torch's kernel for many tensors."""
    by_step: dict[int, list[AdamWTensors]] = {}
    for tensors, numbers in alike:
        if tensors.parameter.numel():
            by_step.setdefault(numbers.step, []).append(tensors)
    for step, found in by_step.items():
        numbers = next(numbers for _, numbers in alike if numbers.step == step)
        steps = torch.full((), float(step), device=found[0].parameter.device)
        torch._fused_adamw_(
            [tensors.parameter for tensors in found],
            [tensors.gradient for tensors in found],
            [tensors.exp_avg for tensors in found],
            [tensors.exp_avg_sq for tensors in found],
            [],
            [steps] * len(found),
            lr=numbers.lr,
            beta1=numbers.beta1,
            beta2=numbers.beta2,
            weight_decay=numbers.weight_decay,
            eps=numbers.eps,
            amsgrad=False,
            maximize=False,
        )


def _update(tensors: AdamWTensors, numbers: AdamWNumbers, draws: tuple[Draws, Draws] | None, start: int) -> None:
    parameter = tensors.parameter
    wide = torch.promote_types(parameter.dtype, torch.float32)
    gradient = tensors.gradient.to(wide)
    first = tensors.exp_avg.to(wide).lerp(gradient, 1 - numbers.beta1)
    second = (tensors.exp_avg_sq.to(wide) * numbers.beta2).addcmul_(gradient, gradient, value=1 - numbers.beta2)
    scale = second.sqrt().div_(numbers.root).add_(numbers.eps)
    updated = (parameter.to(wide) * numbers.kept).addcdiv_(first, scale, value=-numbers.size)
    stop = start + parameter.numel()
    noises = [None, None] if draws is None else [draw.bits(start, stop, parameter.device) for draw in draws]
    round_to(parameter, updated, noises[0])
    round_to(tensors.exp_avg, first, None if noises[0] is None else noises[0] >> 16)
    round_to(tensors.exp_avg_sq, second, noises[1])


@torch.no_grad()
def fill_missing_gradients(optimizer: Optimizer) -> None:
    """Zeros for parameters that the step did not use, so that their averages and weight decay go on alike, however many
    ranks there are: wrapped models give such parameters zeros, plain ones nothing."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
