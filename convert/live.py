"""The parameters of a model that is being trained -> the tensors of hub files, by the rules of the conversions.

The native names of a family are those of its files without `thinker.`, experts fused as transformers 5 has them. They
go to the family's own files, or, for what was made from a Qwen3-Omni, back into its thinker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from convert.directions import THINKERS
from convert.engine import Resolution, resolve
from convert.families import Model, expected, model_of
from convert.ledger import check_ledger
from convert.rules import Rule, inverse, prefixed
from convert.tables.experts import FORMS
from convert.tables.hub import EXPERT_FORMS, FAMILIES, Family
from convert.tables.omni_text import OMNI_TO_TEXT
from convert.tables.omni_vl import VL_TO_OMNI
from convert.tables.trainer import STYLES
from convert.tensors import TensorInfo
from convert.trainer import to_hub
from schemas.errors import ConfigError
from schemas.wording import known_names

TOWERS = ("visual.", "audio_tower.")  # ends of their prefixes
# family that was made from a thinker -> its names to the thinker's
TO_THINKER: dict[str, tuple[Rule, ...]] = {"qwen3_vl_moe": VL_TO_OMNI, "qwen3_moe": inverse(OMNI_TO_TEXT)}


def hub_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], to: str | None = None, experts: str | None = None
) -> Resolution:
    """What each tensor of the files is made of. config: of the model, as config.json has it; tensors: its parameters
    by native names.

    to: model type whose files they are; None: the model's own, of a thinker the whole Qwen3-Omni's (`thinker.` before
    the names). experts: "per-expert", "hub" or "v5"; None: as the hub publishes the family. Towers that the model lacks
    are not made. ConfigError: no such form, a model type that this one cannot become; UnsupportedError: parameters that
    have no place in the files (adapters); IncompleteSourceError: tensors that no parameter makes.
    """
    own = model_of(config, "the model's config", tensors)
    family = _target(own.family.model_type, to)
    form = "v5" if own.geometry.ranges["moe_layer"] else "none"
    wanted = "none" if form == "none" else (experts or family.experts)
    if wanted != "none" and wanted not in EXPERT_FORMS:
        raise ConfigError(f"{wanted!r} is no form of experts{known_names(wanted, EXPERT_FORMS)}")
    target = Model(_held(family, own), own.config, own.geometry, own.tied, stored=own.stored)
    resolution = resolve(_rules(own, target, form, wanted), tensors, own.geometry)
    check_ledger(resolution, tensors, expected(target, wanted))
    return resolution


def _target(own: str, to: str | None) -> Family:
    thinker = own in THINKERS
    name = to or ("qwen3_omni_moe" if thinker else own)
    possible = THINKERS if thinker else (own, *(THINKERS if own in TO_THINKER else ()))
    if name not in possible:
        raise ConfigError(f"a {own} cannot be written as {name!r}{known_names(name, possible)}")
    return FAMILIES[name]


def _rules(own: Model, target: Model, form: str, experts: str) -> tuple[Rule, ...]:
    names = next(names for names in STYLES[own.family.model_type] if names.style == "native")
    if target.family.model_type not in THINKERS or own.family.model_type in THINKERS:
        return to_hub(names, target, form, experts)
    fused = prefixed(FORMS[form, experts], names.text, target.family.text)
    return (*fused, *prefixed(TO_THINKER[own.family.model_type], target=target.family.head))


def _held(family: Family, own: Model) -> Family:
    """The family without the towers that the model lacks."""
    held = [prefix for prefix, _ in own.family.parts]
    lacking = tuple(tower for tower in TOWERS if not any(prefix.endswith(tower) for prefix in held))
    return replace(family, parts=tuple(part for part in family.parts if not part[0].endswith(lacking)))
