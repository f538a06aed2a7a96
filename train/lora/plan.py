"""What a configuration makes of a model: which adapters, how they begin, and what of them a checkpoint notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from schemas.errors import ConfigError
from train.config_lora import LoraConfig
from train.lora.apply import add_adapters, freeze_base
from train.lora.read import AdapterFile
from train.lora.targets import KEY, Targets, find_targets
from train.models.initialize import HasInitializer


@dataclass(frozen=True, eq=False)
class LoraPlan:
    """file: the adapter that training starts from, if any."""

    config: LoraConfig
    targets: Targets
    file: AdapterFile | None = None

    @classmethod
    def make(cls, model: nn.Module, config: LoraConfig, frozen: Iterable[str]) -> LoraPlan:
        """Of a model on the meta device. frozen: parameters that train.freeze_* keeps as they are. ConfigError and the
        errors of `AdapterFile`."""
        if config.lora_adapter is None:
            return cls(config, find_targets(model, config, frozen))
        file = AdapterFile(Path(config.lora_adapter), model)
        targets = file.targets(model)
        if config.lora_dropout and targets.experts:
            raise ConfigError(f"{KEY}.lora_dropout: {config.lora_dropout:g}, but {config.lora_adapter} adapts experts")
        return cls(config, targets, file)

    def freeze(self, model: nn.Module, compute: torch.dtype) -> None:
        """Everything but modules_to_save; compute: dtype of what is frozen."""
        freeze_base(model, self.targets, compute)

    def add(self, model: nn.Module, dtype: torch.dtype) -> None:
        """The adapters, without values; dtype: of what is trained."""
        init = self.config.init_lora_weights
        add_adapters(model, self.targets, dtype=dtype, init=init, dropout=self.config.lora_dropout)

    def start(self, model: nn.Module, seed: int) -> Mapping[str, StartValue]:
        """Name -> its whole value, float32 on the CPU: of the adapters, and of saved modules that the file has."""
        found: dict[str, StartValue] = {}
        for path, module in model.named_modules():
            for local, _ in module.named_parameters(recurse=False):
                name = f"{path}.{local}" if path else local
                if isinstance(module, HasInitializer) or (self.file is not None and name in self.file.saved):
                    found[name] = StartValue(self, module, name, seed)
        return found

    def record(self, base: str) -> dict[str, Any]:
        """What a checkpoint notes, see `Targets.to_json`; base: see `base_digest`."""
        return {**self.targets.to_json(), "base": base}


@dataclass(frozen=True, eq=False)
class StartValue:
    """One parameter that is yet to be made."""

    plan: LoraPlan
    module: nn.Module
    name: str
    seed: int

    def make(self) -> Tensor:
        """float32 on the CPU, whole; it depends on the seed and the name alone, or is the file's."""
        if self.plan.file is not None:
            found = self.plan.file.values(self.name)
            assert found is not None, f"{self.name} is not in the adapter"
            return found
        assert isinstance(self.module, HasInitializer)
        return self.module.initializer(self.name).make(self.seed)


def check_record(path: Path, saved: Any, ours: Mapping[str, Any] | None) -> None:
    """ConfigError when a checkpoint and this training do not both have adapters, or not the same. saved: what the
    checkpoint notes of them, None for one of a full training."""
    if saved is None and ours is None:
        return
    if saved is None:
        raise ConfigError(
            f"{path}: is a checkpoint of a full training, and model.lora_config asks for adapters; start from its "
            "export (model.model_path) in another output_dir"
        )
    if ours is None:
        raise ConfigError(
            f"{path}: holds adapters only, and model.lora_config is not set; set it as it was, or merge the exported "
            "adapter (omniloom convert merge-lora) and start from that in another output_dir"
        )
    theirs = saved if isinstance(saved, dict) else {}
    scales, now = theirs.get("scales") or {}, ours["scales"]
    ranks = theirs.get("ranks") or ours["ranks"]  # older ones do not note them; then shapes tell
    for name in now:
        if name in ranks and ranks[name] != ours["ranks"][name]:
            raise ConfigError(
                f"{path}: the adapter of {name} has rank {ranks[name]} in the checkpoint and {ours['ranks'][name]} "
                f"now; {KEY}.rank and rank_pattern must be those of the checkpoint"
            )
        if name in scales and scales[name] != now[name]:
            raise ConfigError(
                f"{path}: the adapter of {name} has the scale {scales[name]:g} in the checkpoint and {now[name]:g} "
                f"now; {KEY}.alpha, alpha_pattern and use_rslora must be those of the checkpoint"
            )
    if theirs.get("base") != ours["base"]:
        raise ConfigError(
            f"{path}: its adapters were trained on another base ({theirs.get('base')}, now {ours['base']}); "
            "model.model_path, or train.seed without one, must be that of the checkpoint"
        )
    for key in ("share_expert_lora", "modules_to_save"):
        if theirs.get(key) != ours[key]:
            raise ConfigError(f"{path}: {KEY}.{key} was {theirs.get(key)} and is {ours[key]}; write what it was")
    if scales.keys() != now.keys():
        odd = sorted(scales.keys() ^ now.keys())
        raise ConfigError(f"{path}: has other adapters than {KEY} asks for, {odd[0]} for one; name the same modules")
