"""Tiny models with adapters of which every part matters, and the same as whole weights, summed up by hand."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from schemas.strict import check_config
from tests.train.models import families
from train.config_lora import LoraConfig
from train.lora.apply import adapter_names
from train.lora.plan import LoraPlan
from train.models.foundation import FoundationModel
from train.ops.registry import Ops, eager_ops

DENSE = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["gate_proj", "up_proj", "down_proj"]


def lora_config(**keys: Any) -> LoraConfig:
    return check_config({"rank": 3, "alpha": 5.0, **keys}, LoraConfig, "lora")


def meta_model(name: str, ops: Ops | None = None) -> FoundationModel:
    family = families.FAMILIES[name]
    with torch.device("meta"):
        return family.ours(family.make_config(), ops or eager_ops())


def add(model: FoundationModel, config: LoraConfig, compute: torch.dtype = torch.float32) -> LoraPlan:
    """Adapters in a model on the meta device."""
    plan = LoraPlan.make(model, config, ())
    plan.freeze(model, compute)
    plan.add(model, torch.float32)
    return plan


def adapted(name: str, ops: Ops | None = None, **keys: Any) -> tuple[FoundationModel, LoraPlan]:
    """With the base of `base_of` and random adapters."""
    model = meta_model(name, ops)
    plan = add(model, lora_config(**keys))
    model.to_empty(device="cpu")
    fill(model, base_of(name))
    return model, plan


@cache
def base_of(name: str) -> FoundationModel:
    """The weights of `families.make_pair`."""
    return families.make_pair(name).ours


@torch.no_grad()
def fill(model: nn.Module, base: nn.Module) -> None:
    """The base's weights, and adapters whose products are not small beside them."""
    weights, adapters = dict(base.named_parameters()), set(adapter_names(model))
    for name, parameter in model.named_parameters():
        parameter.copy_(adapter_value(name, tuple(parameter.shape)) if name in adapters else weights[name])


def adapter_value(name: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(shape, generator=generator) * 0.2


def merged(model: FoundationModel, plan: LoraPlan) -> dict[str, Tensor]:
    """Weights of the plain model that computes the same: W + scale * B A, by the words of the paper."""
    found = {n: p.detach().double() for n, p in model.named_parameters() if n not in set(adapter_names(model))}
    named = {n: p.detach().double() for n, p in model.named_parameters()}
    for path, pair in plan.targets.linears.items():
        found[f"{path}.weight"] = found[f"{path}.weight"] + pair.scale * (
            named[f"{path}.lora_B.weight"] @ named[f"{path}.lora_A.weight"]
        )
    for path, pairs in plan.targets.experts.items():
        gate_up, down = found[f"{path}.gate_up_proj"].clone(), found[f"{path}.down_proj"].clone()
        inner = down.shape[2]
        for name, pair in pairs.items():
            at = path.removesuffix("experts") + f"expert_lora.{name}"
            product = pair.scale * (named[f"{at}.lora_B.weight"] @ named[f"{at}.lora_A.weight"])  # [n, out, in]
            for expert in range(len(down)):
                delta = product[expert % len(product)]
                rows = {"gate_proj": gate_up[expert, :inner], "up_proj": gate_up[expert, inner:]}
                rows.get(name, down[expert]).add_(delta)
        found[f"{path}.gate_up_proj"], found[f"{path}.down_proj"] = gate_up, down
    return {name: value.float() for name, value in found.items()}
