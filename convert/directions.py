"""The directions between Hugging Face layouts: which table, which geometry, which configuration, which base."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from convert.agreement import check_agreement
from convert.assemble import Base, Origin, base_files, into, into_new, stated_by
from convert.families import Model, expected, expert_form, family_of, model_of, read_config
from convert.job import Conversion
from convert.ledger import Recipe
from convert.model_config import (
    PROCESSOR_FILES,
    TEXT_FILES,
    carried_files,
    config_bytes,
    omni_to_text,
    omni_to_vl,
)
from convert.quantised import refuse_quantised
from convert.rules import Rule, prefixed, rename
from convert.safetensors_io import SafetensorsReader
from convert.tables.experts import FORMS
from convert.tables.hub import FAMILIES, Family
from convert.tables.omni_text import OMNI_TO_TEXT
from convert.tables.omni_vl import KEEP_AUDIO, KEEP_SPEECH, NO_AUDIO, NO_SPEECH, OMNI_TO_VL, VL_TO_OMNI
from schemas.errors import ConfigError, UnsupportedError

# form in which the hub publishes a family -> forms that transformers 5 loads; of those, 4 loads the hub's own only
READABLE = {"per-expert": ("per-expert", "v5"), "hub": ("hub", "v5")}
THINKERS = ("qwen3_omni_moe", "qwen3_omni_moe_thinker")


def omni_to_vl_conversion(source: Path, dtype: torch.dtype | None = None, experts: str = "hub") -> Conversion:
    """Qwen3-Omni (whole, or a thinker alone) -> pseudo Qwen3-VL-MoE. experts: "hub" or "v5", the layout to write."""
    reader, model = open_model(source, THINKERS)
    prefix = model.family.head
    rules = (
        *prefixed(FORMS[expert_form(model, reader.tensors), experts], f"{prefix}model.", "model.language_model."),
        *prefixed((*OMNI_TO_VL, *NO_AUDIO), prefix),
        *NO_SPEECH,
    )
    target = Model(FAMILIES["qwen3_vl_moe"], model.config, model.geometry, model.tied, stored=model.stored)

    def files(made: Sequence[Recipe]) -> dict[str, bytes]:
        config = omni_to_vl(model, source, stated_by(made))
        return {**carried_files(source, TEXT_FILES + PROCESSOR_FILES), "config.json": config_bytes(config)}

    origin = Origin("omni-to-vl", source.resolve().name, reader, model.geometry)
    return into_new(origin, rules, expected(target, experts), files, override=dtype)


def omni_to_text_conversion(source: Path, dtype: torch.dtype | None = None) -> Conversion:
    """Qwen3-Omni (whole, or a thinker alone) -> the text model of its thinker as Qwen3-MoE."""
    reader, model = open_model(source, THINKERS)
    prefix = model.family.head
    rules = (
        *prefixed(FORMS[expert_form(model, reader.tensors), "per-expert"], f"{prefix}model.", "model."),
        *prefixed(OMNI_TO_TEXT, prefix),
        *NO_SPEECH,
    )
    target = Model(FAMILIES["qwen3_moe"], model.config, model.geometry, model.tied, stored=model.stored)

    def files(made: Sequence[Recipe]) -> dict[str, bytes]:
        config = omni_to_text(model, source, stated_by(made))
        return {**carried_files(source, TEXT_FILES), "config.json": config_bytes(config)}

    origin = Origin("omni-to-text", source.resolve().name, reader, model.geometry)
    return into_new(origin, rules, expected(target), files, override=dtype)


def vl_to_omni_conversion(source: Path, base: Path, dtype: torch.dtype | None = None) -> Conversion:
    """Pseudo Qwen3-VL-MoE, in either layout of its experts -> the base Omni with these weights in its thinker."""
    reader, model = open_model(source, ("qwen3_vl_moe",))
    base_reader, base_model = open_model(base, THINKERS)
    check_agreement(model, source, base_model, base)
    prefix = base_model.family.head
    forms = expert_form(model, reader.tensors), expert_form(base_model, base_reader.tensors)
    rules: tuple[Rule, ...] = (
        *prefixed(FORMS[forms], model.family.text, base_model.family.text),
        *prefixed(VL_TO_OMNI, target=prefix),
        *prefixed(KEEP_AUDIO, target=prefix),
        *KEEP_SPEECH,
    )
    origin = Origin("vl-to-omni", source.resolve().name, reader, model.geometry)
    return into(origin, rules, Base(base, base_model, base_reader, forms[1]), override=dtype)


def relayout_conversion(source: Path, experts: str, dtype: torch.dtype | None = None) -> Conversion:
    """The same model with its experts in another form: "per-expert", "hub" or "v5"."""
    reader, model = open_model(source, tuple(FAMILIES))
    form, prefix = expert_form(model, reader.tensors), model.family.text
    if form == "none":
        raise UnsupportedError(f"{source}: is a dense model; it has no experts to store another way")
    rules = (*prefixed(FORMS[form, experts], prefix, prefix), rename("{name}", "{name}"))
    rest = {name: info.shape for name, info in reader.tensors.items() if name.startswith(model.family.rest)}
    target = Base(source, model, reader, experts)
    warnings = _unreadable(model.family, experts)
    numbers = {name for name in rest if not reader.tensors[name].dtype.is_floating_point}

    def files(made: Sequence[Recipe]) -> dict[str, bytes]:
        return base_files(target, {recipe.target: recipe.info for recipe in made})

    wanted = expected(model, experts) | (rest if model.family.rest else {})
    origin = Origin(
        "relayout", source.resolve().name, reader, model.geometry, (f"experts {form} -> {experts}",), warnings
    )
    return into_new(origin, rules, wanted, files, override=dtype, whole_numbers=numbers)


def _unreadable(family: Family, experts: str) -> tuple[str, ...]:
    """A warning for a layout in which transformers would start the experts anew, with a line in its log only."""
    known = READABLE[family.experts]
    if experts in known:
        return ()
    return (
        f"no released transformers loads a {family.model_type} with experts in the layout {experts!r} "
        f"(it does with {' and '.join(known)}): the output is an intermediate form",
    )


def open_model(folder: Path, model_types: Sequence[str]) -> tuple[SafetensorsReader, Model]:
    """The weights and the configuration of a model directory of one of these types."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such directory")
    config = read_config(folder)
    family = family_of(config, str(folder / "config.json"))
    if family.model_type not in model_types:
        raise UnsupportedError(
            f"{folder / 'config.json'}: model_type is {family.model_type!r}; this conversion takes "
            f"{' or '.join(model_types)}"
        )
    reader = SafetensorsReader(folder)
    refuse_quantised(str(folder), config, reader.tensors)
    return reader, model_of(config, str(folder / "config.json"), reader.tensors)
