"""Megatron-core `torch_dist` names -> hub names, for every form in which Megatron writes a layer.

One table holds all forms side by side, since their names differ: layers stacked along a first dimension or one by one,
experts stacked or each alone with gate and up apart (`weight_w`, `weight_v`), norms where Transformer Engine or the
local modules keep them. What a checkpoint has of two forms at once makes a target twice, which the ledger refuses.

Sources here begin behind the language model's own prefix, targets behind that of the hub family's part.
"""

from __future__ import annotations

from convert.rules import Fuse, Map, Rule, Slice, Split, Stack, Step, Transpose, Unstack, rename

STACKED, SINGLE = "decoder.layers.", "decoder.layers.{layer}."


def _both(source: str, targets: tuple[str, ...], steps: tuple[Step, ...] = ()) -> tuple[Map, Map]:
    """The rule of a layer's tensor for stacked layers and for single ones."""
    at = tuple("layers.{layer}." + target for target in targets)
    return Map((STACKED + source,), at, (Unstack("layer"), *steps)), Map((SINGLE + source,), at, steps)


_VOCAB = Slice(0, "vocab", "rows that pad the vocabulary for tensor parallelism")
_GATE_UP = Split(0, ("moe_intermediate", "moe_intermediate"))
_EXPERTS = "mlp.experts.experts."
_ALONE = SINGLE + _EXPERTS + "{expert}."

EMBEDDING: tuple[Rule, ...] = (
    Map(("embedding.word_embeddings.weight",), ("embed_tokens.weight",), (_VOCAB,)),
    rename("decoder.final_layernorm.weight", "norm.weight"),
)
HEAD: tuple[Rule, ...] = (Map(("output_layer.weight",), ("lm_head.weight",), (_VOCAB,)),)

ATTENTION: tuple[Rule, ...] = (
    *_both(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        (Split(0, ("query", "kv", "kv"), groups="kv_heads"),),
    ),
    *_both("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",)),
    *_both("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",)),
    *_both("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",)),
)
NORMS: tuple[Rule, ...] = (
    *_both("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",)),
    *_both("input_layernorm.weight", ("input_layernorm.weight",)),
    *_both("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",)),
    *_both("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",)),
)
DENSE_MLP: tuple[Rule, ...] = (
    *_both(
        "mlp.linear_fc1.weight",
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        (Split(0, ("intermediate", "intermediate")),),
    ),
    rename(SINGLE + "mlp.linear_fc1.weight_w", "layers.{layer}.mlp.gate_proj.weight"),
    rename(SINGLE + "mlp.linear_fc1.weight_v", "layers.{layer}.mlp.up_proj.weight"),
    *_both("mlp.linear_fc2.weight", ("mlp.down_proj.weight",)),
)
ROUTER: tuple[Rule, ...] = _both("mlp.router.weight", ("mlp.gate.weight",))

_PER_EXPERT = "mlp.experts.{expert}."


def _fused(*transposed: Step) -> tuple[Rule, ...]:
    """Experts as two tensors per layer; transposed: the step that puts the input dimension first, for the hub form."""
    fused = "layers.{layer}.mlp.experts."
    return (
        *_both(_EXPERTS + "linear_fc1.weight", ("mlp.experts.gate_up_proj",), transposed),
        *_both(_EXPERTS + "linear_fc2.weight", ("mlp.experts.down_proj",), transposed),
        Map(
            (_ALONE + "linear_fc1.weight_w", _ALONE + "linear_fc1.weight_v"),
            (fused + "gate_up_proj",),
            (Fuse(0, ("moe_intermediate", "moe_intermediate")), Stack("expert"), *transposed),
        ),
        Map((_ALONE + "linear_fc2.weight",), (fused + "down_proj",), (Stack("expert"), *transposed)),
    )


# target form -> rules; sources are [layers,] experts, out, in
EXPERT_FORMS: dict[str, tuple[Rule, ...]] = {
    "per-expert": (
        *_both(
            _EXPERTS + "linear_fc1.weight",
            (_PER_EXPERT + "gate_proj.weight", _PER_EXPERT + "up_proj.weight"),
            (Unstack("expert"), _GATE_UP),
        ),
        *_both(_EXPERTS + "linear_fc2.weight", (_PER_EXPERT + "down_proj.weight",), (Unstack("expert"),)),
        rename(_ALONE + "linear_fc1.weight_w", "layers.{layer}." + _PER_EXPERT + "gate_proj.weight"),
        rename(_ALONE + "linear_fc1.weight_v", "layers.{layer}." + _PER_EXPERT + "up_proj.weight"),
        rename(_ALONE + "linear_fc2.weight", "layers.{layer}." + _PER_EXPERT + "down_proj.weight"),
    ),
    "hub": _fused(Transpose(1, 2)),
    "v5": _fused(),
}

# what the language model of any family consists of, but for its experts and head
TEXT: tuple[Rule, ...] = EMBEDDING + ATTENTION + NORMS + DENSE_MLP + ROUTER
