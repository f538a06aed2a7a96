"""Experts of one layer between their three forms on disk; see `convert.tables.hub` for the forms.

Patterns begin at the layer; `prefixed` puts a family's prefix before them.
"""

from __future__ import annotations

from convert.rules import Fuse, Map, Rule, Stack, Transpose, inverse

EXPERTS = "layers.{layer}.mlp.experts."
GATE, UP, DOWN = (EXPERTS + f"{{expert}}.{part}_proj.weight" for part in ("gate", "up", "down"))
GATE_UP_FUSED, DOWN_FUSED = EXPERTS + "gate_up_proj", EXPERTS + "down_proj"
HALVES = ("moe_intermediate", "moe_intermediate")

PER_EXPERT_TO_HUB: tuple[Rule, ...] = (
    Map((GATE, UP), (GATE_UP_FUSED,), (Fuse(0, HALVES), Transpose(), Stack("expert"))),
    Map((DOWN,), (DOWN_FUSED,), (Transpose(), Stack("expert"))),
)
PER_EXPERT_TO_V5: tuple[Rule, ...] = (
    Map((GATE, UP), (GATE_UP_FUSED,), (Fuse(0, HALVES), Stack("expert"))),
    Map((DOWN,), (DOWN_FUSED,), (Stack("expert"),)),
)
HUB_TO_V5: tuple[Rule, ...] = (
    Map((GATE_UP_FUSED,), (GATE_UP_FUSED,), (Transpose(1, 2),)),
    Map((DOWN_FUSED,), (DOWN_FUSED,), (Transpose(1, 2),)),
)
SAME: tuple[Rule, ...] = ()

# (form of the source, form of the target) -> rules; an equal pair needs none, the general rules rename
FORMS: dict[tuple[str, str], tuple[Rule, ...]] = {
    ("per-expert", "hub"): PER_EXPERT_TO_HUB,
    ("per-expert", "v5"): PER_EXPERT_TO_V5,
    ("hub", "per-expert"): inverse(PER_EXPERT_TO_HUB),
    ("v5", "per-expert"): inverse(PER_EXPERT_TO_V5),
    ("hub", "v5"): HUB_TO_V5,
    ("v5", "hub"): inverse(HUB_TO_V5),
    ("per-expert", "per-expert"): SAME,
    ("hub", "hub"): SAME,
    ("v5", "v5"): SAME,
    ("none", "per-expert"): SAME,
    ("none", "hub"): SAME,
    ("none", "v5"): SAME,
}
