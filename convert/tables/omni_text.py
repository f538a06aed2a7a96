"""Qwen3-Omni thinker -> its text model as Qwen3-MoE, without the `thinker.` before the Omni names."""

from __future__ import annotations

from convert.rules import Drop, Rule, rename

OMNI_TO_TEXT: tuple[Rule, ...] = (
    rename("lm_head.weight", "lm_head.weight"),
    rename("model.{name}", "model.{name}"),
    Drop("visual.{name}", "a text model has no vision tower"),
    Drop("audio_tower.{name}", "a text model has no audio tower"),
)
