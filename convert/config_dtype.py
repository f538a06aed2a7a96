"""The dtypes that a config.json states, made true of the tensors that were written beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from convert.families import Model
from convert.small_files import JSON_LIMIT, json_bytes, read_small
from convert.tensors import TensorInfo, dtype_name

KEYS = ("dtype", "torch_dtype")  # of transformers 5, and of those before


def restated(folder: Path, model: Model, written: Mapping[str, TensorInfo]) -> bytes:
    """The config.json of a directory, with every `dtype` in it that of most elements of the part that it describes.

    written: all tensors of the output by their names in the model's files. Parts of which nothing is written keep what
    they state, and a file that states everything right already keeps its bytes.
    """
    content = read_small(folder / "config.json", JSON_LIMIT)
    config = deepcopy(dict(model.config))
    for path, prefix, whole in _parts(model):
        dtype = main_dtype({name: info for name, info in written.items() if name.startswith(prefix)})
        section = _section(config, path)
        if dtype is not None and section is not None:
            _state(section, dtype_name(dtype), whole)
    if config == model.config:
        return content
    return json_bytes(config)


def main_dtype(tensors: Mapping[str, TensorInfo]) -> torch.dtype | None:
    """The floating point dtype of most elements, None where there is none."""
    counts: Counter[torch.dtype] = Counter()
    for info in tensors.values():
        if info.dtype.is_floating_point:
            counts[info.dtype] += max(1, info.numel)
    return counts.most_common(1)[0][0] if counts else None


def _parts(model: Model) -> list[tuple[tuple[str, ...], str, bool]]:
    """(place in config.json, prefix of its tensors, whether all sections below it are of the same part)."""
    family = model.family
    outer = family.text_at[:-1]
    parts: list[tuple[tuple[str, ...], str, bool]] = [((), "", False)]
    if outer:  # the thinker within a whole model
        parts += [((), family.head, False), (outer, family.head, False)]
    for prefix in family.rest:
        parts.append(((prefix.removesuffix(".") + "_config",), prefix, True))
    places = {"visual.": family.vision_at, "audio_tower.": family.audio_at}
    for prefix, _ in family.parts:
        at = next((place for end, place in places.items() if prefix.endswith(end)), family.text_at)
        if at:
            parts.append((at, prefix, True))
    return parts


def _section(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any] | None:
    section: Any = config
    for key in path:
        section = section.get(key) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else None


def _state(section: dict[str, Any], dtype: str, whole: bool) -> None:
    for key, value in section.items():
        if key in KEYS and value is not None:
            section[key] = dtype
        elif whole and isinstance(value, dict) and key != "quantization_config":
            _state(value, dtype, whole)
