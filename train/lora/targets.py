"""Which modules the configuration names: linear layers, projections of experts, modules that are trained whole."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from schemas.errors import ConfigError
from schemas.nearest import nearest_key
from train.config_lora import LoraConfig
from train.lora.layers import PROJECTIONS, PairSettings
from train.models.foundation import FoundationModel
from train.models.hub_model import HubModel
from train.models.moe import Experts

KEY = "model.lora_config"
WHOLE_OMNI = "thinker."  # what names begin with in a whole Qwen3-Omni, of which the thinker is trained
ALL_LINEAR = "all-linear"  # PEFT's word for all layers but the head
# projections that stand in each fused parameter
FUSED: dict[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class Targets:
    """linears: path of a linear layer -> its pair; experts: path of experts -> projection -> its pair; saved: paths of
    modules that are trained whole. Paths in the order of the model."""

    linears: Mapping[str, PairSettings]
    experts: Mapping[str, Mapping[str, PairSettings]]
    saved: Sequence[str] = ()
    shared: bool = False

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint notes: scales decide about the result, and nothing in the tensors tells them."""
        pairs = {**self.linears, **{f"{path}.{name}": p for path, e in self.experts.items() for name, p in e.items()}}
        scales, ranks = ({name: getattr(pair, key) for name, pair in pairs.items()} for key in ("scale", "rank"))
        return {"scales": scales, "ranks": ranks, "modules_to_save": list(self.saved), "share_expert_lora": self.shared}


@dataclass(frozen=True)
class Candidates:
    """What may be adapted. linears: paths; projections: `<experts>.gate_proj` and so on -> path of the experts; frozen:
    those of both that train.freeze_* keeps as they are; head: path of the head, None for a tied one."""

    linears: list[str]
    projections: dict[str, str]
    frozen: set[str]
    head: str | None = None

    @classmethod
    def of(cls, model: nn.Module, frozen: Iterable[str]) -> Candidates:
        held = set(frozen)
        linears = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
        experts = [path for path, module in model.named_modules() if isinstance(module, Experts)]
        projections = {f"{path}.{name}": path for path in experts for name in PROJECTIONS}
        kept = {path for path in linears if f"{path}.weight" in held}
        kept |= {name for name, path in projections.items() if _fused(name) in held}
        return cls(linears, projections, kept, head_path(model))

    @property
    def names(self) -> list[str]:
        return [*self.linears, *self.projections]

    def said(self) -> str:
        """The last parts of all names, for messages."""
        ends = dict.fromkeys(path.rpartition(".")[2] for path in self.linears if not path[-1].isdigit())
        linears = f"linear layers {', '.join(ends)}" if ends else "no linear layers"
        return linears + (f"; of experts {', '.join(PROJECTIONS)}" if self.projections else "")


def find_targets(model: nn.Module, config: LoraConfig, frozen: Iterable[str]) -> Targets:
    """What a configuration names. frozen: parameters that train.freeze_* keeps as they are; what lies there gets no
    adapter. ConfigError, with what there is: an entry that matches nothing, dropout for experts, a module that is both
    adapted and saved."""
    candidates = Candidates.of(model, frozen)
    chosen = _chosen(config, candidates)
    chosen = _without_excluded(config, candidates, chosen)
    names = [name for name in candidates.names if name in chosen]
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, key):
            if not any(_fits(pattern, name) for name in names):
                raise ConfigError(f"{KEY}.{key}: {pattern!r} matches nothing that is adapted; {_some(names)}")
    settings = {name: _settings(config, name) for name in names}
    experts: dict[str, dict[str, PairSettings]] = {}
    for name in names:
        if name in candidates.projections:
            experts.setdefault(candidates.projections[name], {})[name.rpartition(".")[2]] = settings[name]
    if experts and config.lora_dropout:
        raise ConfigError(
            f"{KEY}.lora_dropout: {config.lora_dropout:g} with adapters of experts ({next(iter(experts))}): their rows "
            "are shared with the base's products; write 0, or leave the experts out (exclude_modules)"
        )
    if config.share_expert_lora and not experts:
        raise ConfigError(f"{KEY}.share_expert_lora: no experts are adapted; {candidates.said()}")
    linears = {name: settings[name] for name in names if name not in candidates.projections}
    saved = _saved(model, config, [*linears, *experts])
    return Targets(linears, experts, saved, config.share_expert_lora)


def _chosen(config: LoraConfig, candidates: Candidates) -> set[str]:
    found: set[str] = set()
    for entry, hits in _entries(config.lora_modules, candidates):
        found |= _adaptable(f"{KEY}.lora_modules", entry, hits, candidates)
    for entry in config.target_parameters or ():
        hits = {n for n in candidates.projections if _is_parameter(_fused(n), entry)}
        if not hits:
            known = sorted({_fused(name).rpartition("mlp.")[2] for name in candidates.projections})
            said = f"there are {', '.join(known)}" if known else "the model has no fused experts"
            raise ConfigError(f"{KEY}.target_parameters: {entry!r} matches no parameter of experts; {said}")
        found |= _adaptable(f"{KEY}.target_parameters", entry, hits, candidates)
    return found


def _entries(stated: list[str] | str | None, candidates: Candidates) -> Iterator[tuple[str, set[str]]]:
    """(entry, names that it matches)."""
    if stated is None:
        return
    if stated == ALL_LINEAR:
        yield stated, {name for name in candidates.names if name != candidates.head} - candidates.frozen
    elif isinstance(stated, str):
        yield stated, {name for name in candidates.names if re.fullmatch(stated, name)}
    else:
        for entry in stated:
            yield entry, {name for name in candidates.names if _ends(name, entry)}


def _adaptable(key: str, entry: str, hits: set[str], candidates: Candidates) -> set[str]:
    if not hits:
        ends = {name.rpartition(".")[2] for name in candidates.names}
        near = nearest_key(entry, [*ends, *candidates.names])
        hint = f"; did you mean {near!r}?" if near else ";"
        raise ConfigError(f"{key}: {entry!r} matches nothing{hint} there are {candidates.said()}")
    if not hits - candidates.frozen:
        raise ConfigError(
            f"{key}: {entry!r} matches only what train.freeze_* leaves without adapters, {sorted(hits)[0]} for one"
        )
    return hits - candidates.frozen


def _without_excluded(config: LoraConfig, candidates: Candidates, chosen: set[str]) -> set[str]:
    for entry, hits in _entries(config.exclude_modules, candidates):
        if not hits:
            raise ConfigError(f"{KEY}.exclude_modules: {entry!r} matches nothing; there are {candidates.said()}")
        chosen = chosen - hits
    if not chosen:
        raise ConfigError(f"{KEY}.exclude_modules: leaves nothing of what lora_modules names")
    return chosen


def _settings(config: LoraConfig, name: str) -> PairSettings:
    rank, alpha = config.rank, config.alpha
    rank = next((value for pattern, value in config.rank_pattern.items() if _fits(pattern, name)), rank)
    alpha = next((value for pattern, value in config.alpha_pattern.items() if _fits(pattern, name)), alpha)
    return PairSettings(rank, alpha, config.use_rslora)


def _fits(pattern: str, name: str) -> bool:
    """As PEFT decides it: a regular expression of the name or its end. A projection of experts also goes by the name of
    its fused parameter."""
    expression = re.compile(rf"(.*\.)?({pattern})$")
    return any(expression.match(each) for each in {name, _fused(name)})


def _saved(model: nn.Module, config: LoraConfig, adapted: Sequence[str]) -> list[str]:
    key = f"{KEY}.modules_to_save"
    modules = {
        path: module for path, module in model.named_modules() if path and any(True for _ in module.parameters())
    }
    found: dict[str, None] = {}
    for entry in config.modules_to_save or ():
        hits = [path for path in modules if _ends(path, entry)]
        if not hits:
            ends = dict.fromkeys(path.rpartition(".")[2] for path in modules if not path[-1].isdigit())
            near = nearest_key(entry, ends)
            hint = f"; did you mean {near!r}?" if near else ";"
            raise ConfigError(f"{key}: {entry!r} matches no module with parameters{hint} there are {', '.join(ends)}")
        for path in hits:
            if both := [name for name in adapted if name == path or name.startswith(f"{path}.")]:
                raise ConfigError(f"{key}: {path} has an adapter ({both[0]}); either adapt it or train it whole")
            if head_path(model) is None and any(isinstance(part, nn.Embedding) for part in modules[path].modules()):
                raise ConfigError(
                    f"{key}: {entry!r} holds the embedding, which is tied to the head: an adapter has one tensor for "
                    "each, and they would part; leave it out"
                )
        found |= dict.fromkeys(hits)
    return list(found)


def head_path(model: nn.Module) -> str | None:
    """Where the head is a linear layer of its own; None for one that is tied to the embedding."""
    assert isinstance(model, FoundationModel | HubModel)
    weight = model.head_weight
    layers = ((path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear))
    return next((path for path, module in layers if module.weight is weight), None)


def _fused(name: str) -> str:
    """`...experts.gate_proj` -> the parameter that it stands in; any other name as it is."""
    path, _, last = name.rpartition(".")
    fused = next((parameter for parameter, parts in FUSED.items() if last in parts), None)
    return f"{path}.{fused}" if fused is not None and path.endswith("experts") else name


def _ends(name: str, entry: str) -> bool:
    inner = entry.removeprefix(WHOLE_OMNI)
    return name == inner or name.endswith(f".{inner}")


def _is_parameter(name: str, entry: str) -> bool:
    return _ends(name, entry) or fnmatchcase(name, entry.removeprefix(WHOLE_OMNI))


def _some(names: Sequence[str]) -> str:
    ends = dict.fromkeys(name.rpartition(".")[2] for name in names)
    return f"adapted are {', '.join(ends)}"
