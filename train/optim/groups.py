"""Parameter groups: which learning rate and weight decay each trained parameter has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from schemas.errors import ConfigError
from schemas.nearest import nearest_key
from train.config import TrainConfig
from train.config_optimizer import OptimizerConfig
from train.optim.muon_parameters import head_blocks, muon_names

DEFAULT = "default"
SHOWN = 8  # names in a message


@dataclass(frozen=True)
class LearningRate:
    """A learning rate for part of the model. key: of the configuration, for messages; pattern: path of a module or
    parameter, `*` for any run of characters, with all below it; name: of the group."""

    key: str
    name: str
    pattern: str
    lr: float


def learning_rates(config: TrainConfig, towers: Mapping[str, str | None]) -> list[LearningRate]:
    """What the configuration sets apart from the main rate; later ones win. towers: vit, audio -> prefix of their
    parameters, None for a tower that the model lacks."""
    rates = []
    for tower, lr in (("vit", config.vit_lr), ("audio", config.audio_lr)):
        if lr is None:
            continue
        prefix = towers.get(tower)
        if prefix is None:
            raise ConfigError(f"train.{tower}_lr: the model has no such tower")
        rates.append(LearningRate(f"train.{tower}_lr", tower, prefix.removesuffix("."), lr))
    return rates + [LearningRate("train.module_lr", pattern, pattern, lr) for pattern, lr in config.module_lr.items()]


def parameter_groups(
    model: nn.Module, config: OptimizerConfig, rates: Sequence[LearningRate] = ()
) -> list[dict[str, Any]]:
    """Groups for an optimizer: params, lr, weight_decay, name, base_lr, which the schedule scales, and kind, adamw or
    muon, with Muon's own numbers. Frozen parameters are in none. The rate of a module scales Muon's by what it is to
    `lr`. ConfigError: a pattern, class or name that matches nothing; muon without a matrix."""
    named = dict(model.named_parameters())
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    of = _rates(named, trained, config, rates)
    plain = names_without_decay(model, config)
    decays = _decays(named, config)
    matrices = muon_names(model, plain) if config.type == "muon" else set()
    if config.type == "muon" and not matrices:
        raise ConfigError("train.optimizer.type: muon, but no trained parameter is a matrix for it; write adamw")
    head_blocks(model, matrices, config)
    groups: dict[tuple[str, float, float, str], dict[str, Any]] = {}
    for name, parameter in trained.items():
        label, lr = of[name]
        kind = "muon" if name in matrices else "adamw"
        usual = config.muon_weight_decay if kind == "muon" else config.weight_decay
        decay = 0.0 if name in plain else decays.get(name, usual)
        if kind == "muon":
            lr *= config.muon_base_lr / config.lr
        key = (label, lr, decay, kind)
        if key not in groups:
            title = _title(label, kind, decay, usual)
            groups[key] = {"params": [], "lr": lr, "base_lr": lr, "weight_decay": decay, "name": title, "kind": kind}
            groups[key] |= _muon_numbers(config) if kind == "muon" else {}
        groups[key]["params"].append(parameter)
    return list(groups.values())


def decay_note(config: OptimizerConfig) -> str | None:
    """What somebody may not expect of Muon: its matrices have a weight decay of their own."""
    if config.type != "muon" or config.muon_weight_decay == config.weight_decay:
        return None
    return (
        f"weight decay: matrices of muon have muon_weight_decay {config.muon_weight_decay:g}, all other parameters "
        f"weight_decay {config.weight_decay:g}"
    )


def _rates(
    named: Mapping[str, Any], trained: Mapping[str, Any], config: OptimizerConfig, rates: Sequence[LearningRate]
) -> dict[str, tuple[str, float]]:
    """Label and learning rate of each trained parameter."""
    of = {name: (DEFAULT, config.lr) for name in trained}
    for rate in rates:
        found = matching(rate.pattern, named, rate.key)
        if not found & trained.keys():
            raise ConfigError(f"{rate.key}: {rate.pattern!r} names frozen parameters only; they have no learning rate")
        of |= {name: (rate.name, rate.lr) for name in found & trained.keys()}
    return of


def _decays(named: Mapping[str, Any], config: OptimizerConfig) -> dict[str, float]:
    """Weight decay of parameters that have their own."""
    found: dict[str, float] = {}
    for pattern, decay in config.module_weight_decay.items():
        found |= dict.fromkeys(matching(pattern, named, "train.optimizer.module_weight_decay"), decay)
    return found


def _title(label: str, kind: str, decay: float, usual: float) -> str:
    parts = [label] if kind == "adamw" else ["muon"] if label == DEFAULT else [label, "muon"]
    if decay != usual:
        parts.append(f"decay {decay:g}" if decay else "no decay")
    return ", ".join(parts)


def _muon_numbers(config: OptimizerConfig) -> dict[str, Any]:
    return {
        "momentum": config.muon_momentum,
        "nesterov": config.muon_nesterov,
        "adjust_lr_fn": config.muon_adjust_lr_fn,
        "head_group_size": config.muon_head_group_size,
        "head_split_modules": list(config.muon_head_split_modules),
    }


def matching(pattern: str, names: Iterable[str], key: str) -> set[str]:
    """Names of the parameters that a pattern means, by their own path or that of a module around them. ConfigError with
    the nearest path when there is none."""
    names = list(names)
    found = {name for name in names if any(fnmatchcase(path, pattern) for path in _paths(name))}
    if found:
        return found
    paths = sorted({path for name in names for path in _paths(name)}, key=lambda path: (path.count("."), path))
    near = nearest_key(pattern, paths)
    hint = f"; did you mean {near!r}?" if near else ";"
    raise ConfigError(
        f"{key}: {pattern!r} matches no module or parameter{hint} there are {', '.join(paths[:SHOWN])}, ..."
    )


def _paths(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def names_without_decay(model: nn.Module, config: OptimizerConfig) -> set[str]:
    """Names of parameters whose module is of a class in no_decay_modules, or which have a part of no_decay_params."""
    found: set[str] = set()
    # the class that FSDP puts in front of a module's own has another name
    classes = {path: {c.__name__ for c in type(module).__mro__} for path, module in model.named_modules()}
    for wanted in config.no_decay_modules:
        owners = [path for path, names in classes.items() if wanted in names]
        held = {f"{path}.{name}" if path else name for path in owners for name in _own(model.get_submodule(path))}
        if not held:
            known = ", ".join(sorted({type(module).__name__ for module in model.modules() if _own(module)}))
            raise ConfigError(
                f"train.optimizer.no_decay_modules: no module is a {wanted!r}; with parameters there are {known}"
            )
        found |= held
    names = [name for name, _ in model.named_parameters()]
    for part in config.no_decay_params:
        held = {name for name in names if part in name}
        if not held:
            raise ConfigError(f"train.optimizer.no_decay_params: no parameter has {part!r} in its name")
        found |= held
    return found


def _own(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(recurse=False)]
