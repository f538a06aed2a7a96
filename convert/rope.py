"""What a text section of config.json says of its rotary embedding, in any of the places where it may say it.

transformers 5 writes `rope_parameters`, those before wrote `rope_scaling` with `rope_theta` beside it, and many
configurations have both. transformers 5 takes `rope_scaling` before `rope_parameters` and the inner `rope_theta` before
the outer one, older ones the other way round: statements that differ mean two models, and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from convert.geometry import Section
from schemas.errors import ConfigError, UnsupportedError

KEYS = ("rope_parameters", "rope_scaling")


def rope_of(text: Section) -> Mapping[str, Any]:
    """The rotary parameters as `rope_parameters` has them, but without rope_theta; {} when nothing is stated.

    `type` becomes rope_type, `interleaved` mrope_interleaved, and the type "mrope", which is how configurations called
    the default before the axes had a key of their own, "default". UnsupportedError for statements that differ.
    """
    stated = {key: _normal(text.section(key).values) for key in KEYS if text.values.get(key) is not None}
    found = list(stated.values())
    if len(found) == 2 and found[0] != found[1]:
        keys = sorted(k for k in found[0].keys() | found[1].keys() if found[0].get(k) != found[1].get(k))
        says = "; ".join(f"{key} says {_short({k: values.get(k) for k in keys})}" for key, values in stated.items())
        raise UnsupportedError(f"{text.where}: {says}; keep the one that the model was trained with")
    return found[0] if found else {}


def need_rope(text: Section) -> Mapping[str, Any]:
    """`rope_of`. ConfigError when nothing is stated."""
    rope = rope_of(text)
    if not any(isinstance(text.values.get(key), dict) for key in KEYS):
        raise ConfigError(f"{text.where}.rope_scaling: missing; the conversion needs it and there is no safe default")
    return rope


def theta_of(text: Section) -> float | None:
    """The base of the rotary frequencies, None where it is not stated. UnsupportedError for statements that differ."""
    rope_of(text)
    places = {"rope_theta": text}
    places |= {f"{key}.rope_theta": text.section(key) for key in KEYS if text.values.get(key) is not None}
    stated = {
        name: place.number("rope_theta") for name, place in places.items() if place.values.get("rope_theta") is not None
    }
    if len(set(map(float, stated.values()))) > 1:
        says = " and ".join(f"{name} is {value}" for name, value in stated.items())
        raise UnsupportedError(f"{text.where}: {says}; keep the one that the model was trained with")
    return next(iter(stated.values()), None)


def need_theta(text: Section) -> float:
    theta = theta_of(text)
    if theta is None:
        raise ConfigError(f"{text.where}.rope_theta: missing; the conversion needs it and there is no safe default")
    return theta


def default_type(text: Section) -> str:
    """ "default". UnsupportedError for any other embedding: a thinker, VL and text models state those differently."""
    rope = need_rope(text)
    stated = rope.get("rope_type")
    if stated is None:
        raise ConfigError(f"{text.where}.rope_scaling.rope_type: missing; the conversion needs it")
    if stated != "default":
        raise UnsupportedError(f"{text.where}: rotary embedding of type {_short(stated)} is not handled")
    for key, part in (("partial_rotary_factor", text.values), ("partial_rotary_factor", rope)):
        if part.get(key) not in (None, 1, 1.0):
            raise UnsupportedError(f"{text.where}: {key} is {_short(part[key])}; only whole heads are rotated here")
    return "default"


def axes_of(text: Section) -> list[int]:
    """Frequencies of each rotary axis, [] where they are not stated."""
    section = Section(rope_of(text), f"{text.where}.rope_scaling")
    return section.whole_numbers("mrope_section") if section.values.get("mrope_section") is not None else []


def _normal(values: Mapping[str, Any]) -> dict[str, Any]:
    names = {"type": "rope_type", "interleaved": "mrope_interleaved"}
    found = {names.get(key, key): value for key, value in values.items() if key != "rope_theta" and value is not None}
    for old, new in names.items():
        if values.get(new) is not None:
            found[new] = values[new]
            if values.get(old) not in (None, values[new]) and {values[old], values[new]} != {"default", "mrope"}:
                raise UnsupportedError(f"{old} is {_short(values[old])} and {new} is {_short(values[new])}")
    return found | ({"rope_type": "default"} if found.get("rope_type") == "mrope" else {})


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 120 else text[:117] + "..."
