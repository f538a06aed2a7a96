"""A PEFT adapter to start from: ours, or one that PEFT trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from convert.adapter import Adapter, LowRank, adapted_modules, adapter_reader
from convert.adapter_config import CONFIG_FILE, read_adapter_config
from convert.adapter_modules import check_complete
from convert.patterns import some
from convert.tensors import TensorInfo
from schemas.errors import ConfigError, IncompleteSourceError, UnsupportedError
from train.lora.apply import BESIDE
from train.lora.fused import Factors, copied, divide, of_file
from train.lora.layers import PROJECTIONS, PairSettings
from train.lora.names import ROOTS, Naming, namings
from train.lora.settings import BLOCK, BLOCK_VERSION
from train.lora.targets import FUSED, Targets
from train.models.moe import Experts


class AdapterFile:
    """The content of a directory for a model without adapters. UnsupportedError: modules that the model does not have,
    and what `convert.adapter` refuses; ConfigError and IncompleteSourceError: missing or damaged files."""

    def __init__(self, folder: Path, model: nn.Module) -> None:
        settings = read_adapter_config(folder)
        parameters = {name: TensorInfo(tuple(p.shape), torch.float32) for name, p in model.named_parameters()}
        names = adapted_modules(adapter_reader(folder))
        self.folder, self.rslora = folder, bool(settings.get("use_rslora"))
        self.naming, root = _naming(folder, model, names, parameters)
        there = {self.naming.there(name): info for name, info in parameters.items()}
        self._adapter = Adapter(folder, there, root)
        check_complete(folder, self._adapter, there, root)
        self._own = self._block(settings.get(BLOCK))
        self._experts = {path: m.down_proj.shape[0] for path, m in model.named_modules() if isinstance(m, Experts)}
        self.deltas = {self.naming.here(name): found for name, found in self._adapter.deltas.items()}
        replaced = {self.naming.here(name): key for name, key in self._adapter.replaced.items()}
        # PEFT saves the weight of an adapted head or embedding, too, though it was not trained
        self.copies = {name: key for name, key in replaced.items() if name in self.deltas}
        self.saved = {name: key for name, key in replaced.items() if name not in self.deltas}
        self._check_kinds(model)

    def targets(self, model: nn.Module) -> Targets:
        """What it adapts."""
        linears: dict[str, PairSettings] = {}
        experts: dict[str, dict[str, PairSettings]] = {}
        for path, module in model.named_modules():
            found = self.deltas.get(f"{path}.weight")
            if found is not None and isinstance(module, nn.Linear):
                linears[path] = self._settings(found)
            if isinstance(module, Experts):
                pairs = self._projections(path)
                if pairs:
                    experts[path] = pairs
        kinds = {self.deltas[f"{path}.{name}"].kind for path in experts for name in FUSED if self._has(path, name)}
        shared = self._own["share_expert_lora"] if self._own is not None else kinds == {"shared"}
        if "shared" in kinds and len(kinds) > 1:
            raise UnsupportedError(f"{self.folder}: some pairs are shared by all experts and others are not")
        saved = list(dict.fromkeys(name.rpartition(".")[0] for name in self.saved))
        for path in saved:
            held = {f"{path}.{name}" for name, _ in model.get_submodule(path).named_parameters(recurse=False)}
            if lacking := held - self.saved.keys():
                raise IncompleteSourceError(f"{self.folder}: replaces a part of {path} only, not {some(lacking)}")
        return Targets(linears, experts, saved, bool(shared))

    def values(self, name: str) -> Tensor | None:
        """float32 of a parameter of the model with adapters; None for one that is not in the file."""
        if name in self.saved:
            return self._adapter.reader.read(self.saved[name]).float()
        path, letter = name.removesuffix(".weight").rsplit(".lora_", 1) if ".lora_" in name else (name, "")
        if not letter:
            return None
        index = "AB".index(letter)
        linear = self.deltas.get(f"{path}.weight")
        if linear is not None:
            return self._read(linear)[index]
        above, _, projection = path.rpartition(".")
        experts = above.removesuffix(BESIDE) + "experts"
        parameter = next(name for name, parts in FUSED.items() if projection in parts)
        return self._pairs(experts, parameter)[projection][index].contiguous()

    def copy_of_base(self, name: str) -> Tensor:
        """float32 of a weight of the base that the file holds."""
        return self._adapter.reader.read(self.copies[name]).float()

    def _pairs(self, path: str, parameter: str) -> dict[str, Factors]:
        found = self.deltas[f"{path}.{parameter}"]
        factors = of_file(*self._read(found), self._experts[path], found.kind)
        if self._own is None:
            return copied(parameter, factors)
        if self._own["share_expert_lora"] and found.kind != "shared":
            factors = factors[0][:1], factors[1][:1]
        settings = {name: pair for name, pair in self._projections(path).items() if name in FUSED[parameter]}
        return divide(parameter, factors, settings)

    def _read(self, found: LowRank) -> Factors:
        return self._adapter.reader.read(found.a).float(), self._adapter.reader.read(found.b).float()

    def _has(self, path: str, parameter: str) -> bool:
        return f"{path}.{parameter}" in self.deltas

    def _settings(self, found: LowRank) -> PairSettings:
        return PairSettings(found.rank, float(found.alpha), self.rslora)

    def _projections(self, path: str) -> dict[str, PairSettings]:
        """Of the experts at a path, in the order of the projections."""
        held = [name for name in FUSED if self._has(path, name)]
        if self._own is None:
            return {part: self._settings(self.deltas[f"{path}.{name}"]) for name in held for part in FUSED[name]}
        stated = self._own["experts"].get(self.naming.there(path), {})
        pairs = {name: PairSettings(pair["rank"], float(pair["alpha"]), self.rslora) for name, pair in stated.items()}
        for name in FUSED:
            ranks = sum(pairs[part].rank for part in FUSED[name] if part in pairs)
            found = self.deltas.get(f"{path}.{name}")
            if ranks != (0 if found is None else found.rank):
                raise IncompleteSourceError(
                    f"{self.folder / CONFIG_FILE}: {BLOCK} says rank {ranks} for {path}.{name}, the file has "
                    f"{0 if found is None else found.rank}"
                )
        return {part: pairs[part] for parts in FUSED.values() for part in parts if part in pairs}

    def _block(self, stated: Any) -> dict[str, Any] | None:
        """What we wrote ourselves, checked."""
        where = f"{self.folder / CONFIG_FILE}: {BLOCK}"
        if stated is None:
            return None
        if not isinstance(stated, dict) or stated.get("schema_version") != BLOCK_VERSION:
            raise UnsupportedError(f"{where}: this omniloom reads schema_version {BLOCK_VERSION}")
        experts = stated.get("experts")
        if not isinstance(stated.get("share_expert_lora"), bool) or not _are_pairs(experts):
            raise IncompleteSourceError(f"{where}: is damaged")
        return stated

    def _check_kinds(self, model: nn.Module) -> None:
        linears = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Linear)}
        experts = {f"{path}.{parameter}" for path in self._experts for parameter in FUSED}
        if strange := sorted(self.deltas.keys() - linears - experts):
            raise UnsupportedError(f"{self.folder}: adapts {some(strange)}; only linear layers and experts are trained")
        if not self.deltas:
            raise UnsupportedError(f"{self.folder}: adapts nothing")


def _naming(
    folder: Path, model: nn.Module, names: list[str], parameters: Mapping[str, TensorInfo]
) -> tuple[Naming, str]:
    """(naming, root) under which all modules of the adapter are in the model."""
    best: list[str] | None = None
    for naming in namings(model):
        known = {naming.there(name) for name in parameters}
        known |= {name.removesuffix(".weight") for name in known} | {name.rpartition(".")[0] for name in known}
        for root in ROOTS:
            unknown = [n for n in names if not n.startswith(root) or n.removeprefix(root) not in known]
            if not unknown:
                return naming, root
            if best is None or len(unknown) < len(best):
                best = unknown
    raise ConfigError(
        f"model.lora_config.lora_adapter: {len(best or ())} of the {len(names)} modules that {folder} adapts are not "
        f"in the model: {some(best or ())}"
    )


def _are_pairs(experts: Any) -> bool:
    if not isinstance(experts, dict) or not all(isinstance(of, dict) for of in experts.values()):
        return False
    return all(name in PROJECTIONS and _is_pair(pair) for of in experts.values() for name, pair in of.items())


def _is_pair(pair: Any) -> bool:
    rank, alpha = (pair.get("rank"), pair.get("alpha")) if isinstance(pair, dict) else (None, None)
    return type(rank) is int and rank > 0 and isinstance(alpha, int | float) and not isinstance(alpha, bool)
