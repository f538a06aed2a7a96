"""The model families: what config.json says -> which model is built, and what parallel code, checkpoints and the loss
need to know about it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeThinkerConfig

from convert.patterns import Pattern
from convert.tables.trainer import STYLES, Names
from schemas.errors import ConfigError, UnsupportedError
from schemas.wording import known_names, one_line
from train.models.foundation import FoundationModel
from train.models.hub_model import HubModel, build_hub_model
from train.models.initialize import initialize
from train.models.loading import assign_whole, load, open_weights
from train.models.omni_thinker import OmniThinker
from train.models.text_lm import Qwen3LM
from train.models.vl import Qwen3VL
from train.ops.registry import Ops
from train.progress import progress

CONFIG_FILE = "config.json"
Init = Literal["weights", "random"]


@dataclass(frozen=True)
class ModelSpec:
    """One family.

    family: the model_type of the config that the model has (the thinker's, for a whole Qwen3-Omni); section: where that
    config stands in config.json; reference: the class of transformers that computes the same; names: prefixes of the
    parts in parameter names, which are the hub's without `thinker.`; blocks: patterns of the modules that FSDP wraps
    and checkpointing runs again, in the order of their forward passes; experts: patterns of the parameters whose first
    dimension is the experts.
    """

    family: str
    section: tuple[str, ...]
    config_class: type[PreTrainedConfig]
    model_class: Callable[[PreTrainedConfig, Ops], FoundationModel]
    reference: str
    names: Names
    blocks: tuple[str, ...]
    experts: tuple[str, ...]

    def build(self, config: PreTrainedConfig, ops: Ops) -> FoundationModel:
        """The model on torch's current default device, its parameters not filled."""
        return self.model_class(config, ops)

    def fsdp_blocks(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """(path, module) of every block, in the order of `blocks`."""
        patterns = [Pattern.of(text) for text in self.blocks]
        modules = list(model.named_modules())
        return [(path, module) for pattern in patterns for path, module in modules if pattern.match(path) is not None]

    def fsdp_units(self, model: nn.Module, *, whole_towers: bool) -> list[tuple[str, nn.Module]]:
        """(path, module) of what FSDP gathers at a time: blocks, or whole towers and the blocks of the text model."""
        towers = [prefix for prefix in (self.names.visual, self.names.audio) if prefix is not None and whole_towers]
        inside = tuple(towers)
        blocks = [(path, block) for path, block in self.fsdp_blocks(model) if not path.startswith(inside)]
        paths = [prefix.rstrip(".") for prefix in towers]
        return [*((path, model.get_submodule(path)) for path in paths), *blocks]

    def expert_parameters(self, model: nn.Module) -> list[str]:
        """Names of the parameters that hold all experts of a layer."""
        patterns = [Pattern.of(text) for text in self.experts]
        return [name for name, _ in model.named_parameters() if any(p.match(name) is not None for p in patterns)]


def _spec(
    config_class: type[PreTrainedConfig],
    model_class: Callable[[PreTrainedConfig, Ops], FoundationModel],
    reference: str,
    section: tuple[str, ...] = (),
) -> ModelSpec:
    family = config_class.model_type
    names = next(names for names in STYLES[family] if names.style == "native")
    towers = [f"{names.visual}blocks.{{block}}"] if names.visual is not None else []
    towers += [f"{names.audio}layers.{{layer}}"] if names.audio is not None else []
    layer = f"{names.text}layers.{{layer}}"
    experts = tuple(f"{layer}.mlp.experts.{part}" for part in ("gate_up_proj", "down_proj"))
    return ModelSpec(family, section, config_class, model_class, reference, names, (*towers, layer), experts)


_THINKER = "Qwen3OmniMoeThinkerForConditionalGeneration"
# model_type of config.json -> its spec
SPECS: dict[str, ModelSpec] = {
    "qwen3": _spec(Qwen3Config, Qwen3LM, "Qwen3ForCausalLM"),
    "qwen3_moe": _spec(Qwen3MoeConfig, Qwen3LM, "Qwen3MoeForCausalLM"),
    "qwen3_vl": _spec(Qwen3VLConfig, Qwen3VL, "Qwen3VLForConditionalGeneration"),
    "qwen3_vl_moe": _spec(Qwen3VLMoeConfig, Qwen3VL, "Qwen3VLMoeForConditionalGeneration"),
    "qwen3_omni_moe": _spec(Qwen3OmniMoeThinkerConfig, OmniThinker, _THINKER, ("thinker_config",)),
    "qwen3_omni_moe_thinker": _spec(Qwen3OmniMoeThinkerConfig, OmniThinker, _THINKER),
}


@dataclass(frozen=True)
class ModelSource:
    """A config.json that was read. values: its content; config: of the model, a whole Qwen3-Omni's thinker."""

    path: Path
    values: Mapping[str, Any]
    spec: ModelSpec
    config: PreTrainedConfig


def read_model(path: Path | str) -> ModelSource:
    """What a config.json, or a directory with one, describes. ConfigError: no such file or damaged; UnsupportedError:
    another family."""
    file = Path(path) if str(path).endswith(".json") else Path(path) / CONFIG_FILE
    try:
        values = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be read ({error.strerror}); model_path is a Hugging Face directory"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{file}: is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: holds no object")
    model_type = values.get("model_type")
    if model_type not in SPECS:
        raise UnsupportedError(
            f"{file}: model_type {model_type!r} is not among the native models{known_names(str(model_type), SPECS)}; "
            "dense text models of transformers can be trained with model.backend: transformers"
        )
    spec = SPECS[model_type]
    return ModelSource(file, values, spec, _config(file, values, spec))


def spec_of(model: FoundationModel) -> ModelSpec:
    """The spec that a model was built by."""
    return SPECS[model.config.model_type]


def fsdp_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(path, module) of the blocks that FSDP wraps, of native models and those of transformers."""
    if isinstance(model, HubModel):
        blocks = {id(block) for block in model.blocks}
        return [(path, module) for path, module in model.named_modules() if id(module) in blocks]
    if isinstance(model, FoundationModel):
        return spec_of(model).fsdp_blocks(model)
    raise TypeError(f"{type(model).__name__} is no model of this trainer")


def fsdp_units(model: nn.Module, *, whole_towers: bool) -> list[tuple[str, nn.Module]]:
    """(path, module) of what FSDP gathers at a time, in the order of their forward passes."""
    if isinstance(model, FoundationModel):
        return spec_of(model).fsdp_units(model, whole_towers=whole_towers)
    return fsdp_blocks(model)


def build_foundation_model(
    config_path: Path | str,
    ops: Ops,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    init: Init = "weights",
    weights_path: Path | str | None = None,
    seed: int = 0,
    backend: Literal["native", "transformers"] = "native",
    trust_remote_code: bool = False,
) -> FoundationModel | HubModel:
    """A model in one process, built without memory, then given memory and values.

    config_path: a config.json or the directory around it; device: "meta" leaves it without memory and values, for
    parallel code to shard first; dtype: of all parameters; init: from the files in weights_path (default: the directory
    of the config), or random from the seed; backend: transformers for dense text models that are not native.
    """
    with torch.device("meta"):
        if backend == "native":
            source = read_model(config_path)
            model: FoundationModel | HubModel = source.spec.build(source.config, ops).to(dtype)
        else:
            folder = str(_folder(config_path))
            model = build_hub_model(folder, ops, dtype=dtype, trust_remote_code=trust_remote_code)
    if torch.device(device).type == "meta":
        return model
    model.to_empty(device=device)
    if init == "random":
        if isinstance(model, HubModel):
            model.initialize(seed)
        else:
            initialize(model, seed)
        return model
    load_whole(model, _folder(config_path) if weights_path is None else Path(weights_path))
    if isinstance(model, HubModel):
        model.restore_buffers()
    return model


def load_whole(model: FoundationModel | HubModel, folder: Path) -> None:
    """Fills a model that has memory and is not sharded from the files of a hub directory, with progress on stderr."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    weights = open_weights(folder, shapes, native=isinstance(model, FoundationModel))
    with progress(f"loading {folder.name}", weights.nbytes, "bytes") as advance:
        load(weights, assign_whole(model, advance))


def _folder(config_path: Path | str) -> Path:
    path = Path(config_path)
    return path.parent if path.name.endswith(".json") else path


def _config(file: Path, values: Mapping[str, Any], spec: ModelSpec) -> PreTrainedConfig:
    """The section of the model as transformers reads it; a head is tied when the outermost statement says so."""
    sections = [values]
    for key in (*spec.section, "text_config"):
        inner = sections[-1].get(key)
        if not isinstance(inner, Mapping):
            break
        sections.append(inner)
    if len(sections) <= len(spec.section):
        raise ConfigError(f"{file}.{spec.section[len(sections) - 1]}: missing; a {values['model_type']} has it")
    try:
        config = spec.config_class.from_dict(deepcopy(dict(sections[len(spec.section)])))
    except (StrictDataclassError, TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{file}: transformers does not accept it: {one_line(error)}") from error
    stated = [section["tie_word_embeddings"] for section in sections if "tie_word_embeddings" in section]
    if stated:
        config.tie_word_embeddings = bool(stated[0])
    return config
