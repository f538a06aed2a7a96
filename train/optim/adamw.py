"""The optimizer of a configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import AdamW, Optimizer

from schemas.errors import UnsupportedError
from train.config_trainer import OptimizerConfig


def make_optimizer(groups: list[dict[str, Any]], config: OptimizerConfig) -> Optimizer:
    """AdamW (Loshchilov and Hutter 2019) over groups of `parameter_groups`. UnsupportedError: what is not built."""
    if config.type != "adamw":
        raise UnsupportedError(f"train.optimizer.type: {config.type} is not built; write adamw")
    if config.state_dtype != "fp32":
        raise UnsupportedError(f"train.optimizer.state_dtype: {config.state_dtype} is not built; write fp32")
    beta1, beta2 = config.betas
    fused = all(parameter.is_cuda for group in groups for parameter in group["params"])
    return AdamW(groups, lr=config.lr, betas=(beta1, beta2), eps=config.eps, fused=fused or None)


@torch.no_grad()
def fill_missing_gradients(optimizer: Optimizer) -> None:
    """Zeros for parameters that the step did not use, so that their averages and weight decay go on alike, however many
    ranks there are: wrapped models give such parameters zeros, plain ones nothing."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
