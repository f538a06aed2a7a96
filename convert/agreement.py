"""Two configurations that must mean the same computation: a pseudo Qwen3-VL and the Omni that it goes back to.

Sizes that shapes show are checked with the tensors, and here once more, where a shape would not show them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from convert.families import Model, text_section
from convert.geometry import Section
from convert.rope import axes_of, need_theta, rope_of
from schemas.errors import UnsupportedError

TEXT = ("rms_norm_eps", "num_experts_per_tok", "norm_topk_prob", "hidden_act")
VISION = (
    *("depth", "hidden_size", "num_heads", "intermediate_size", "patch_size", "temporal_patch_size"),
    *("spatial_merge_size", "in_channels", "out_hidden_size", "hidden_act", "deepstack_visual_indexes"),
)
VISION_THETA = 10000.0  # that of the published models, which only transformers 5 writes
MEDIA_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def check_agreement(source: Model, source_folder: Path, base: Model, base_folder: Path) -> None:
    """UnsupportedError with every key that differs, unless both models compute the same on text and pictures."""
    sides = [_Side.of(source, source_folder), _Side.of(base, base_folder)]
    differing = []
    for part in ("text", "vision", "whole"):
        ours, theirs = (getattr(side, part)() for side in sides)
        where = [side.where[part] for side in sides]
        differing += [
            f"{key} is {ours[key]!r} in {where[0]} and {theirs[key]!r} in {where[1]}"
            for key in ours
            if ours[key] != theirs[key]
        ]
    if differing:
        raise UnsupportedError("; ".join(differing))


class _Side:
    """One of the two: the values that decide about its computation, part by part."""

    def __init__(self, text: Section, vision: Section, outer: Section) -> None:
        self._text, self._vision, self._outer = text, vision, outer
        self.where = {"text": text.where, "vision": vision.where, "whole": outer.where}

    @classmethod
    def of(cls, model: Model, folder: Path) -> _Side:
        outer = Section(model.config, str(folder / "config.json"))
        for key in model.family.text_at[:-1]:
            outer = outer.section(key)
        return cls(text_section(model, folder), outer.section("vision_config"), outer)

    def text(self) -> dict[str, Any]:
        values, rope = self._text.values, rope_of(self._text)
        kind = rope.get("rope_type", "default")
        found: dict[str, Any] = {key: values.get(key) for key in TEXT}
        found |= {
            "rope_theta": float(need_theta(self._text)),
            "rope_type": kind,
            "mrope_section": axes_of(self._text),
            "mrope_interleaved": rope.get("mrope_interleaved", True),
            "partial_rotary_factor": rope.get("partial_rotary_factor", values.get("partial_rotary_factor")) or 1,
            "sliding_window": values.get("sliding_window") if values.get("use_sliding_window") else None,
        }
        if kind != "default":  # numbers of a scaled embedding; the default has none that count
            numbers = {key: value for key, value in rope.items() if key not in found}
            numbers.setdefault("original_max_position_embeddings", values.get("max_position_embeddings"))
            found["rope_parameters"] = dict(sorted(numbers.items()))
        else:
            found["rope_parameters"] = None
        return found

    def vision(self) -> dict[str, Any]:
        found = {key: self._vision.need(key) for key in VISION}
        rope = self._vision.optional_section("rope_parameters")
        return found | {"rope_theta": float(rope.get("rope_theta", VISION_THETA))}

    def whole(self) -> dict[str, Any]:
        return {key: self._outer.whole_number(key) for key in MEDIA_IDS}
