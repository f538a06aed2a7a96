"""What the files of each model family hold: every tensor's name and shape, as the hub publishes them.

Shapes are names of sizes (convert.geometry). The prefixes of a family's parts stand in `FAMILIES`. Experts have three
forms on disk: two-dimensional ones per expert, fused ones as the hub has them (input dimension first), and fused ones
as transformers 5 saves them (output dimension first). The last two carry the same names.
"""

from __future__ import annotations

from dataclasses import dataclass

from convert.rules import Size


@dataclass(frozen=True)
class Param:
    name: str
    shape: tuple[Size, ...]


def _biased(name: str, *shape: Size) -> tuple[Param, Param]:
    return Param(f"{name}.weight", shape), Param(f"{name}.bias", shape[:1])


LAYER = "layers.{layer}."
ATTENTION = LAYER + "self_attn."

TEXT = (
    Param("embed_tokens.weight", ("vocab", "hidden")),
    Param(LAYER + "input_layernorm.weight", ("hidden",)),
    Param(ATTENTION + "q_proj.weight", ("query", "hidden")),
    Param(ATTENTION + "k_proj.weight", ("kv", "hidden")),
    Param(ATTENTION + "v_proj.weight", ("kv", "hidden")),
    Param(ATTENTION + "o_proj.weight", ("hidden", "query")),
    Param(ATTENTION + "q_norm.weight", ("head_dim",)),
    Param(ATTENTION + "k_norm.weight", ("head_dim",)),
    Param(LAYER + "post_attention_layernorm.weight", ("hidden",)),
    Param("norm.weight", ("hidden",)),
)
DENSE_MLP = (
    Param("layers.{dense_layer}.mlp.gate_proj.weight", ("intermediate", "hidden")),
    Param("layers.{dense_layer}.mlp.up_proj.weight", ("intermediate", "hidden")),
    Param("layers.{dense_layer}.mlp.down_proj.weight", ("hidden", "intermediate")),
)
ROUTER = (Param("layers.{moe_layer}.mlp.gate.weight", ("experts", "hidden")),)

EXPERTS = "layers.{moe_layer}.mlp.experts."
PER_EXPERT = (
    Param(EXPERTS + "{expert}.gate_proj.weight", ("moe_intermediate", "hidden")),
    Param(EXPERTS + "{expert}.up_proj.weight", ("moe_intermediate", "hidden")),
    Param(EXPERTS + "{expert}.down_proj.weight", ("hidden", "moe_intermediate")),
)
FUSED_HUB = (
    Param(EXPERTS + "gate_up_proj", ("experts", "hidden", "gate_up")),
    Param(EXPERTS + "down_proj", ("experts", "moe_intermediate", "hidden")),
)
FUSED_V5 = (
    Param(EXPERTS + "gate_up_proj", ("experts", "gate_up", "hidden")),
    Param(EXPERTS + "down_proj", ("experts", "hidden", "moe_intermediate")),
)
EXPERT_FORMS: dict[str, tuple[Param, ...]] = {"per-expert": PER_EXPERT, "hub": FUSED_HUB, "v5": FUSED_V5}

HEAD = (Param("lm_head.weight", ("vocab", "hidden")),)

VISION = (
    *_biased("patch_embed.proj", "vision_hidden", "in_channels", "temporal_patch", "patch", "patch"),
    Param("pos_embed.weight", ("positions", "vision_hidden")),
    *_biased("blocks.{block}.norm1", "vision_hidden"),
    *_biased("blocks.{block}.norm2", "vision_hidden"),
    *_biased("blocks.{block}.attn.qkv", "vision_qkv", "vision_hidden"),
    *_biased("blocks.{block}.attn.proj", "vision_hidden", "vision_hidden"),
    *_biased("blocks.{block}.mlp.linear_fc1", "vision_intermediate", "vision_hidden"),
    *_biased("blocks.{block}.mlp.linear_fc2", "vision_hidden", "vision_intermediate"),
)
OMNI_MERGERS = (
    *_biased("merger.ln_q", "vision_hidden"),
    *_biased("merger.mlp.0", "vision_merged", "vision_merged"),
    *_biased("merger.mlp.2", "vision_out", "vision_merged"),
    *_biased("merger_list.{merger}.ln_q", "vision_merged"),
    *_biased("merger_list.{merger}.mlp.0", "vision_merged", "vision_merged"),
    *_biased("merger_list.{merger}.mlp.2", "vision_out", "vision_merged"),
)
VL_MERGERS = (
    *_biased("merger.norm", "vision_hidden"),
    *_biased("merger.linear_fc1", "vision_merged", "vision_merged"),
    *_biased("merger.linear_fc2", "vision_out", "vision_merged"),
    *_biased("deepstack_merger_list.{merger}.norm", "vision_merged"),
    *_biased("deepstack_merger_list.{merger}.linear_fc1", "vision_merged", "vision_merged"),
    *_biased("deepstack_merger_list.{merger}.linear_fc2", "vision_out", "vision_merged"),
)

AUDIO_LAYER = "layers.{audio_layer}."
AUDIO = (
    *_biased("conv2d1", "audio_channels", 1, 3, 3),
    *_biased("conv2d2", "audio_channels", "audio_channels", 3, 3),
    *_biased("conv2d3", "audio_channels", "audio_channels", 3, 3),
    Param("conv_out.weight", ("audio_hidden", "audio_flat")),
    *_biased(AUDIO_LAYER + "self_attn.q_proj", "audio_hidden", "audio_hidden"),
    *_biased(AUDIO_LAYER + "self_attn.k_proj", "audio_hidden", "audio_hidden"),
    *_biased(AUDIO_LAYER + "self_attn.v_proj", "audio_hidden", "audio_hidden"),
    *_biased(AUDIO_LAYER + "self_attn.out_proj", "audio_hidden", "audio_hidden"),
    *_biased(AUDIO_LAYER + "self_attn_layer_norm", "audio_hidden"),
    *_biased(AUDIO_LAYER + "fc1", "audio_intermediate", "audio_hidden"),
    *_biased(AUDIO_LAYER + "fc2", "audio_hidden", "audio_intermediate"),
    *_biased(AUDIO_LAYER + "final_layer_norm", "audio_hidden"),
    *_biased("ln_post", "audio_hidden"),
    *_biased("proj1", "audio_hidden", "audio_hidden"),
    *_biased("proj2", "audio_out", "audio_hidden"),
)


@dataclass(frozen=True)
class Family:
    """A model type of config.json.

    parts: (prefix, parameters) of everything but experts and head; text and head: the prefixes of these two.
    text_at, vision_at, audio_at: where their sections stand in config.json, None for a part that the family lacks.
    experts: the form in which the hub publishes them. rest: prefixes of tensors that no conversion makes.
    """

    model_type: str
    architecture: str
    parts: tuple[tuple[str, tuple[Param, ...]], ...]
    text: str
    head: str
    text_at: tuple[str, ...]
    vision_at: tuple[str, ...] | None = None
    audio_at: tuple[str, ...] | None = None
    experts: str = "per-expert"
    rest: tuple[str, ...] = ()


def _thinker(model_type: str, prefix: str) -> Family:
    """A whole Qwen3-Omni or its thinker alone, whose names begin with `prefix`."""
    whole = model_type == "qwen3_omni_moe"
    architecture = f"Qwen3OmniMoe{'' if whole else 'Thinker'}ForConditionalGeneration"
    at, rest = (("thinker_config",), ("talker.", "code2wav.")) if whole else ((), ())
    parts = (
        (f"{prefix}model.", TEXT),
        (f"{prefix}visual.", VISION + OMNI_MERGERS),
        (f"{prefix}audio_tower.", AUDIO),
    )
    text_at, vision_at, audio_at = (*at, "text_config"), (*at, "vision_config"), (*at, "audio_config")
    return Family(
        model_type, architecture, parts, f"{prefix}model.", prefix, text_at, vision_at, audio_at, "per-expert", rest
    )


def _text(model_type: str, architecture: str) -> Family:
    return Family(model_type, architecture, (("model.", TEXT),), "model.", "", ())


def _vl(model_type: str, architecture: str) -> Family:
    parts = (("model.language_model.", TEXT), ("model.visual.", VISION + VL_MERGERS))
    at = (("text_config",), ("vision_config",))
    return Family(model_type, architecture, parts, "model.language_model.", "", *at, experts="hub")


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        _text("qwen3", "Qwen3ForCausalLM"),
        _text("qwen3_moe", "Qwen3MoeForCausalLM"),
        _vl("qwen3_vl", "Qwen3VLForConditionalGeneration"),
        _vl("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
        _thinker("qwen3_omni_moe", "thinker."),
        _thinker("qwen3_omni_moe_thinker", ""),
    )
}
# a thinker taken out of a whole model keeps the prefix when transformers 5 saves it; the other way round it lacks it
OTHER_NAMES: dict[str, Family] = {
    "qwen3_omni_moe": _thinker("qwen3_omni_moe", ""),
    "qwen3_omni_moe_thinker": _thinker("qwen3_omni_moe_thinker", "thinker."),
}
