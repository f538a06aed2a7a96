"""What was trained, as a PEFT adapter: adapter_config.json and adapter_model.safetensors, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from convert.adapter import ROOT, WEIGHTS_FILE
from convert.adapter_config import CONFIG_FILE
from convert.output import check_space, sync_directory
from schemas.errors import OmniloomError
from train.lora.apply import BESIDE, adapter_names
from train.lora.fused import Factors, fuse, fused_settings, to_file
from train.lora.layers import PROJECTIONS, ExpertAdapters, LoraLinear, PairSettings
from train.lora.names import Naming, hub_naming, namings
from train.lora.settings import BLOCK, adapter_settings, block
from train.lora.targets import FUSED
from train.models.moe import Experts

TEXT_FAMILIES = ("qwen3", "qwen3_moe")  # models for which PEFT has a class of its own


def trained_tensors(model: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """Whole values of what is trained, on the CPU, by name; a collective call where the model is sharded. keep: False
    on ranks that only take part; they get nothing."""
    found: dict[str, Tensor] = {}
    model.state_dict()  # FSDP2 puts the sharded parameters back where whole ones are left from a forward pass
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if keep:
                found[name] = whole.detach().to("cpu", copy=True)
    return found


class AdapterWriter:
    """Of a model with adapters. base: name of the base in the settings; dropout: that it is trained with."""

    def __init__(self, model: nn.Module, base: str | None = None, dropout: float = 0.0) -> None:
        self.naming = namings(model)[0]
        self.hub = hub_naming(model)
        text = str(model.config.model_type) in TEXT_FAMILIES  # type: ignore[union-attr]
        self._stated = {
            "task_type": "CAUSAL_LM" if text else None,
            "base_model_name_or_path": base,
            "lora_dropout": dropout,
        }
        self._modules = [path for path, _ in model.named_modules()]
        self._parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self.linears = {path: m.settings for path, m in model.named_modules() if isinstance(m, LoraLinear)}
        self.experts: dict[str, dict[str, PairSettings]] = {}
        self.shared = False
        self._with_experts = any(isinstance(module, Experts) for module in model.modules())
        for path, module in model.named_modules():
            if isinstance(module, ExpertAdapters):
                pairs = {name: pair.settings for name, pair in module.pairs.items()}
                self.experts[path.removesuffix(BESIDE) + "experts"] = pairs
                self.shared = module.shared
        adapters = set(adapter_names(model))
        self.saved = [n for n, p in model.named_parameters() if p.requires_grad and n not in adapters]

    def tensors(self, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The content of a PEFT file."""
        found = self._plain(trained, self.naming)
        for path in self.experts:
            fused = self._fused(path, trained)
            for number, factors in enumerate(fused.values()):
                # PEFT wraps the module once for each parameter, the first one inside
                inside = ".base_layer" if number + 1 < len(fused) else ""
                found |= _keys(self.naming.there(path) + inside, *to_file(factors, self._count(path)))
        return found

    def settings(self) -> dict[str, Any]:
        """The content of its adapter_config.json."""
        there = self.naming.there
        parameters: dict[str, PairSettings] = {}
        for path, pairs in self.experts.items():
            fused = {f"{there(path)}.{name}": fused_settings(name, pairs) for name in FUSED}
            parameters |= {name: found for name, found in fused.items() if found is not None}
        modules = {there(path): settings for path, settings in self.linears.items()}
        for path in [path for path in modules if self._with_experts and path.endswith(PROJECTIONS)]:
            # PEFT takes such a name in a model with experts for the experts; a parameter it takes at its word
            parameters[f"{path}.weight"] = modules.pop(path)
        own = {there(path): pairs for path, pairs in self.experts.items()}
        found = self._settings(modules, parameters, self.naming)
        return found | {BLOCK: block(own, shared=self.shared)}

    def per_expert(self, trained: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, settings) with a pair for each projection of each expert, under the names of the hub's files."""
        there = self.hub.there
        found = self._plain(trained, self.hub)
        modules = {there(path): settings for path, settings in self.linears.items()}
        for path, pairs in self.experts.items():
            count = self._count(path)
            for name, settings in pairs.items():
                a, b = (factor.expand(count, -1, -1) for factor in _pair(trained, f"{_beside(path)}.{name}"))
                for expert in range(count):
                    at = f"{there(path)}.{expert}.{name}"
                    modules[at] = settings
                    found |= _keys(at, a[expert].clone(), b[expert].clone())
        return found, self._settings(modules, {}, self.hub)

    def _plain(self, trained: Mapping[str, Tensor], naming: Naming) -> dict[str, Tensor]:
        """Linear layers, and modules that were trained whole."""
        found: dict[str, Tensor] = {}
        for path in self.linears:
            found |= _keys(naming.there(path), *_pair(trained, path))
        return found | {ROOT + naming.there(name): trained[name] for name in self.saved}

    def _fused(self, path: str, trained: Mapping[str, Tensor]) -> dict[str, Factors]:
        settings = self.experts[path]
        pairs = {name: _pair(trained, f"{_beside(path)}.{name}") for name in settings}
        inner = self._parameters[f"{path}.down_proj"][2]
        there = [name for name, parts in FUSED.items() if any(part in pairs for part in parts)]
        return {name: fuse(name, pairs, settings, inner) for name in there}

    def _count(self, path: str) -> int:
        return self._parameters[f"{path}.down_proj"][0]

    def _settings(
        self, modules: Mapping[str, PairSettings], parameters: Mapping[str, PairSettings], naming: Naming
    ) -> dict[str, Any]:
        held = [naming.there(path) for path in self._modules], [naming.there(name) for name in self._parameters]
        saved = {naming.there(name).rpartition(".")[0] for name in self.saved}
        names = ([*held[0], *modules], held[1])
        return adapter_settings(modules, parameters, names, sorted(saved)) | self._stated


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
    """Writes beside and renames; takes the place of what has the name. OmniloomError when it cannot be written."""
    temporary, old = folder.with_name(f"{folder.name}.tmp"), folder.with_name(f"{folder.name}.old")
    try:
        check_space(folder.parent, sum(tensor.nbytes for tensor in tensors.values()), OmniloomError)
        for left in (temporary, old):
            shutil.rmtree(left, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(dict(tensors), temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        (temporary / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n")
        for file in temporary.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        sync_directory(temporary)
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        sync_directory(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise OmniloomError(f"{folder}: the adapter could not be written: {error}") from error


def difference(folder: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> str | None:
    """Why a folder is not the adapter of exactly these values, bit by bit; None = it is."""
    try:
        if json.loads((folder / CONFIG_FILE).read_text()) != json.loads(json.dumps(settings)):
            return f"has another {CONFIG_FILE}"
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            if odd := set(file.keys()) ^ set(tensors):
                return f"has other tensors, {min(odd)} for one"
            others = [name for name, tensor in tensors.items() if not _same_bits(file.get_tensor(name), tensor)]
            return f"has other values, in {others[0]} for one" if others else None
    except (OSError, ValueError, SafetensorError) as error:
        return f"cannot be read ({' '.join(str(error).split())})"


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _pair(trained: Mapping[str, Tensor], path: str) -> Factors:
    return trained[f"{path}.lora_A.weight"], trained[f"{path}.lora_B.weight"]


def _beside(path: str) -> str:
    return path.removesuffix("experts") + BESIDE


def _keys(name: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {f"{ROOT}{name}.lora_A.weight": a, f"{ROOT}{name}.lora_B.weight": b}
