"""Adapters put into a model, on the meta device and before it is sharded; everything else is frozen."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from schemas.errors import ConfigError
from train.lora.layers import ExpertAdapters, Factor, LoraLinear, Starts
from train.lora.targets import Targets, head_path
from train.models.hub_model import HubModel
from train.models.moe import Experts

BESIDE = "expert_lora"  # name of the adapters beside `experts`


def freeze_base(model: nn.Module, targets: Targets, dtype: torch.dtype) -> None:
    """Leaves only the modules to be saved trained. Frozen parameters, of a model on the meta device, get the dtype that
    is computed in: a wider copy of what never changes would be memory for nothing."""
    kept = {id(parameter) for path in targets.saved for parameter in model.get_submodule(path).parameters()}
    for parameter in model.parameters():
        if id(parameter) in kept:
            parameter.requires_grad_(True)
        else:
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)


def add_adapters(
    model: nn.Module, targets: Targets, *, dtype: torch.dtype, init: bool | str = True, dropout: float = 0.0
) -> None:
    """Puts the adapters in, in place; dtype: of the adapters. `freeze_base` comes before it."""
    starts, head = Starts.of(init), head_path(model)
    device = next(model.parameters()).device
    with torch.device(device):
        for path, settings in targets.linears.items():
            base = model.get_submodule(path)
            assert isinstance(base, nn.Linear), "targets are linear layers"
            made = LoraLinear(base, settings, starts, dtype, dropout)
            _replace(model, path, made)
            if path == head:
                model.widen_head = made.widened  # type: ignore[assignment]
        for path, pairs in targets.experts.items():
            experts = model.get_submodule(path)
            assert isinstance(experts, Experts), "targets are experts"
            count, hidden, inner = experts.down_proj.shape
            adapters = ExpertAdapters((count, hidden, inner), pairs, starts, dtype, shared=targets.shared)
            model.get_submodule(path.rpartition(".")[0]).add_module(BESIDE, adapters)
            experts.lora = adapters.factors


def adapter_names(model: nn.Module) -> list[str]:
    """Names of the adapters' parameters, in the model's order; empty for a model without."""
    return [f"{path}.weight" for path, module in model.named_modules() if isinstance(module, Factor)]


def has_adapters(model: nn.Module) -> bool:
    """Whether the model is trained by adapters."""
    return any(isinstance(module, Factor) for module in model.modules())


def trained_table(model: nn.Module) -> list[str]:
    """Lines that say what is trained: parameters by kind of module, with their number and the shape of one, and the
    share of the whole."""
    named = dict(model.named_parameters())
    total = sum(parameter.numel() for parameter in named.values())
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    if not trained:
        raise ConfigError("model.lora_config: leaves nothing to train")
    count = sum(parameter.numel() for parameter in trained.values())
    kinds: dict[str, list[torch.Tensor]] = {}
    for name, parameter in trained.items():
        kinds.setdefault(_kind(name), []).append(parameter)
    lines = [f"{count:,} of {total:,} parameters are trained ({count / total:.3%})"]
    width = max(map(len, kinds))
    for kind, found in kinds.items():
        shape = " x ".join(map(str, found[0].shape))
        size = sum(parameter.numel() for parameter in found)
        lines.append(f"  {kind:<{width}}  {len(found):>4} of {shape:<20} {size:>15,}  {size / count:6.1%}")
    return lines


def _kind(name: str) -> str:
    """A parameter's name with `*` for the numbers of its layer."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _replace(model: nn.Module, path: str, made: nn.Module) -> None:
    above, _, name = path.rpartition(".")
    setattr(model.get_submodule(above), name, made)
    if isinstance(model, HubModel) and not above:
        setattr(model.hub, name, made)  # the same child of the library's model, which finds its head there


def adapted_weights(targets: Targets) -> Iterable[str]:
    """Names of the frozen weights that have an adapter."""
    yield from (f"{path}.weight" for path in targets.linears)
    for path, pairs in targets.experts.items():
        yield from {f"{path}.{'down_proj' if name == 'down_proj' else 'gate_up_proj'}" for name in pairs}
