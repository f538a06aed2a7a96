"""Under which names a training checkpoint (torch DCP) holds a model: its parts, without the root before them.

`native` is the trainer's module path, the hub's names without `thinker.`. `transformers` is the module path of
transformers 5, which differs for Qwen3-Omni only. Each part goes to the part of the hub family in the same place.
"""

from __future__ import annotations

from dataclasses import dataclass

ROOT = r"(?:(?:model|module|thinker|_orig_mod|app|state)\.)*"  # what may stand before the names of a model


@dataclass(frozen=True)
class Names:
    """Prefixes of a model's parts in a training checkpoint; None for parts that the family lacks."""

    style: str
    text: str
    head: str
    visual: str | None = None
    audio: str | None = None


_TEXT = (Names("native", "model.", ""),)
_VL = (Names("native", "model.language_model.", "", "model.visual."),)
_OMNI = (
    Names("transformers", "model.language_model.", "", "model.visual.", "model.audio_tower."),
    Names("native", "model.", "", "visual.", "audio_tower."),
)

STYLES: dict[str, tuple[Names, ...]] = {
    "qwen3": _TEXT,
    "qwen3_moe": _TEXT,
    "qwen3_vl": _VL,
    "qwen3_vl_moe": _VL,
    "qwen3_omni_moe": _OMNI,
    "qwen3_omni_moe_thinker": _OMNI,
}
