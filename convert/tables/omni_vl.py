"""Qwen3-Omni thinker <-> pseudo Qwen3-VL-MoE, without the `thinker.` before the Omni names; experts stand in
`convert.tables.experts`.

The rules of the mergers name them in full: `blocks.N.mlp.linear_fc1` must stay what it is.
"""

from __future__ import annotations

from convert.rules import Copy, Drop, Rule, inverse, rename

VISUAL: tuple[Rule, ...] = (
    rename("visual.merger.ln_q.{leaf}", "model.visual.merger.norm.{leaf}"),
    rename("visual.merger.mlp.0.{leaf}", "model.visual.merger.linear_fc1.{leaf}"),
    rename("visual.merger.mlp.2.{leaf}", "model.visual.merger.linear_fc2.{leaf}"),
    rename("visual.merger_list.{merger}.ln_q.{leaf}", "model.visual.deepstack_merger_list.{merger}.norm.{leaf}"),
    rename("visual.merger_list.{merger}.mlp.0.{leaf}", "model.visual.deepstack_merger_list.{merger}.linear_fc1.{leaf}"),
    rename("visual.merger_list.{merger}.mlp.2.{leaf}", "model.visual.deepstack_merger_list.{merger}.linear_fc2.{leaf}"),
    rename("visual.patch_embed.proj.{leaf}", "model.visual.patch_embed.proj.{leaf}"),
    rename("visual.pos_embed.weight", "model.visual.pos_embed.weight"),
    rename("visual.blocks.{block}.{name}", "model.visual.blocks.{block}.{name}"),
)
TEXT: tuple[Rule, ...] = (
    rename("lm_head.weight", "lm_head.weight"),
    rename("model.{name}", "model.language_model.{name}"),
)
OMNI_TO_VL: tuple[Rule, ...] = VISUAL + TEXT
VL_TO_OMNI: tuple[Rule, ...] = inverse(OMNI_TO_VL)

NO_AUDIO: tuple[Rule, ...] = (Drop("audio_tower.{name}", "Qwen3-VL has no audio tower"),)
NO_SPEECH: tuple[Rule, ...] = (
    Drop("talker.{name}", "only the thinker is converted"),
    Drop("code2wav.{name}", "only the thinker is converted"),
)
# what an Omni checkpoint holds that a VL one cannot give back
KEEP_AUDIO: tuple[Rule, ...] = (Copy("audio_tower.{name}", "Qwen3-VL has no audio tower"),)
KEEP_SPEECH: tuple[Rule, ...] = (
    Copy("talker.{name}", "only the thinker is converted"),
    Copy("code2wav.{name}", "only the thinker is converted"),
)
