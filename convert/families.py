"""A config.json -> the model family it describes, its sizes, and every tensor its files must hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convert.geometry import Geometry, Section, audio_geometry, text_geometry, vision_geometry
from convert.patterns import expand, placeholders
from convert.small_files import read_object
from convert.tables.hub import DENSE_MLP, EXPERT_FORMS, FAMILIES, HEAD, OTHER_NAMES, ROUTER, Family, Param
from convert.tensors import TensorInfo
from schemas.errors import ConfigError, IncompleteSourceError, UnsupportedError
from schemas.wording import known_names

MAX_TENSORS = 4_000_000  # of one model; a mixture of 256 experts in 100 layers has 80,000


@dataclass(frozen=True)
class Model:
    """tied: the head is the embedding. stored: the files hold the head, as a tied model's may, too."""

    family: Family
    config: Mapping[str, Any]
    geometry: Geometry
    tied: bool
    stored: bool = field(kw_only=True)


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model directory. ConfigError when it is missing or no JSON object."""
    path = folder / "config.json"
    try:
        return read_object(path)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; {folder} is not a Hugging Face model directory") from error


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """UnsupportedError for a model type that no table knows."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"{where}.model_type: is {str(model_type)[:60]}; it must be the name of a model type")
    if model_type not in FAMILIES:
        raise UnsupportedError(f"{where}: model_type {model_type!r} is not handled{known_names(model_type, FAMILIES)}")
    return FAMILIES[model_type]


def model_of(config: Mapping[str, Any], where: str, tensors: Mapping[str, TensorInfo] | None = None) -> Model:
    """The model of a config.json. where: its path, for messages.

    tensors: the model's own tensors, if there are any; what they tell (head_dim, rows of pos_embed, a head of its own)
    goes before what config.json leaves out or only has by default.
    """
    known = tensors or {}
    family = _as_named(family_of(config, where), known)
    root = Section(config, where)
    head_dim = _rows(known, f"{family.text}layers.0.self_attn.q_norm.weight")
    geometry = text_geometry(_at(root, family.text_at), head_dim, moe="moe" in family.model_type)
    if family.vision_at is not None:
        prefix = next(prefix for prefix, _ in family.parts if prefix.endswith("visual."))
        positions = _rows(known, f"{prefix}pos_embed.weight")
        geometry = geometry | vision_geometry(_at(root, family.vision_at), positions)
    if family.audio_at is not None:
        geometry = geometry | audio_geometry(_at(root, family.audio_at))
    tied = _is_tied(root, family, known)
    return Model(family, config, geometry, tied, stored=not tied or f"{family.head}lm_head.weight" in known)


def _as_named(family: Family, tensors: Mapping[str, TensorInfo]) -> Family:
    """The family under the names that the files have: a thinker's begin with `thinker.` or do not, whichever model it
    was saved from. The token embedding tells."""
    other = OTHER_NAMES.get(family.model_type)
    here, there = (f"{it.text}embed_tokens.weight" in tensors if it else False for it in (family, other))
    return other if other is not None and there and not here else family


def _rows(tensors: Mapping[str, TensorInfo], name: str) -> int | None:
    """The first dimension of a tensor; None when it is not there or has none."""
    shape = tensors[name].shape if name in tensors else ()
    return shape[0] if shape and shape[0] else None


def text_section(model: Model, folder: Path) -> Section:
    """The section of a directory's config.json that describes the text model."""
    return _at(Section(model.config, str(folder / "config.json")), model.family.text_at)


def expected(model: Model, experts: str | None = None) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the family's files that a conversion may make, in the order of the model.

    experts: "per-expert", "hub" or "v5"; by default the form in which the hub publishes the family.
    """
    family = model.family
    form = experts or family.experts
    text = (*DENSE_MLP, *ROUTER, *EXPERT_FORMS.get(form, ()))  # "none" of a dense model has no tensors
    parts = [*family.parts, (family.text, text)]
    if model.stored:
        parts.append((family.head, HEAD))
    count = sum(
        math.prod(len(model.geometry.indices(index)) for index in placeholders(param.name))
        for _, params in parts
        for param in params
    )
    if count > MAX_TENSORS:
        raise ConfigError(f"config.json describes a {family.model_type} of {count} tensors; that is no real model")
    shapes: dict[str, tuple[int, ...]] = {}
    for prefix, params in parts:
        for param in params:
            _add(shapes, prefix, param, model.geometry)
    return shapes


def expert_form(model: Model, tensors: Mapping[str, TensorInfo], prefix: str | None = None) -> str:
    """In which of the three forms experts are stored: "per-expert", "hub", "v5"; "none" for a dense model.

    Names tell the first. The two fused forms share their names: both tensors are held against the sizes of config.json,
    and as at most one of the two can be square, exactly one form fits. prefix: of the text model, when it is not the
    family's. UnsupportedError when neither fits.
    """
    moe = model.geometry.ranges["moe_layer"]
    if not moe:
        return "none"
    at = f"{model.family.text if prefix is None else prefix}layers.{moe[0]}.mlp.experts."
    gate_up, down = tensors.get(f"{at}gate_up_proj"), tensors.get(f"{at}down_proj")
    if gate_up is None and down is None:
        return "per-expert"
    if gate_up is None or down is None:
        missing = "gate_up_proj" if gate_up is None else "down_proj"
        raise IncompleteSourceError(f"{at}{missing} is missing beside its sibling")
    for form in ("hub", "v5"):
        shapes = [tuple(map(model.geometry.size, param.shape)) for param in EXPERT_FORMS[form]]
        if [gate_up.shape, down.shape] == shapes:
            return form
    size = model.geometry.size
    raise UnsupportedError(
        f"{at}gate_up_proj {list(gate_up.shape)} and down_proj {list(down.shape)} fit neither layout of "
        f"{size('experts')} experts with hidden size {size('hidden')} and intermediate size {size('moe_intermediate')}"
    )


def _add(shapes: dict[str, tuple[int, ...]], prefix: str, param: Param, geometry: Geometry) -> None:
    shape = None
    for name in expand(prefix + param.name, geometry):
        shape = shape or tuple(map(geometry.size, param.shape))
        shapes[name] = shape


def _at(section: Section, path: tuple[str, ...]) -> Section:
    for key in path:
        section = section.section(key)
    return section


def _is_tied(root: Section, family: Family, tensors: Mapping[str, TensorInfo]) -> bool:
    """The outermost statement of the configuration; without one the tensors tell."""
    for depth in range(len(family.text_at) + 1):
        stated = _at(root, family.text_at[:depth]).flag("tie_word_embeddings")
        if stated is not None:
            return stated
    if not tensors:
        raise ConfigError(
            f"{root.where}.tie_word_embeddings: missing; the conversion needs it and there is no safe default"
        )
    return f"{family.head}lm_head.weight" not in tensors
