"""The vision tower of Qwen3-VL as Megatron blocks (`vision_model.`) -> hub names of Qwen3-VL and Qwen3-Omni.

Sources begin behind `vision_model.`, targets behind the hub's `visual.`. Megatron keeps q, k and v of each head
together, the hub all of q, then all of k, then all of v.
"""

from __future__ import annotations

from convert.rules import Fuse, Map, Rule, Split, Step, Unstack, rename

_QKV = ("vision_hidden", "vision_hidden", "vision_hidden")


def _both(source: str, target: str, steps: tuple[Step, ...] = ()) -> tuple[Map, Map]:
    """The rule of a block's tensor for stacked blocks and for single ones."""
    at = ("blocks.{block}." + target,)
    stacked = Map(("decoder.layers." + source,), at, (Unstack("block"), *steps))
    return stacked, Map(("decoder.layers.{block}." + source,), at, steps)


def _norm(source: str, plain: str, target: str) -> tuple[Rule, ...]:
    """A norm kept inside the linear layer that follows it, or as a module of its own."""
    return (
        *_both(f"{source}.layer_norm_weight", f"{target}.weight"),
        *_both(f"{source}.layer_norm_bias", f"{target}.bias"),
        *_both(plain + ".weight", f"{target}.weight"),
        *_both(plain + ".bias", f"{target}.bias"),
    )


def _linear(source: str, target: str, steps: tuple[Step, ...] = ()) -> tuple[Rule, ...]:
    return (*_both(source + ".weight", target + ".weight", steps), *_both(source + ".bias", target + ".bias", steps))


BLOCKS: tuple[Rule, ...] = (
    rename("patch_embed.proj.{leaf}", "patch_embed.proj.{leaf}"),
    rename("pos_embed.weight", "pos_embed.weight"),
    *_linear("self_attention.linear_qkv", "attn.qkv", (Split(0, _QKV, groups="vision_heads"), Fuse(0, _QKV))),
    *_linear("self_attention.linear_proj", "attn.proj"),
    *_linear("mlp.linear_fc1", "mlp.linear_fc1"),
    *_linear("mlp.linear_fc2", "mlp.linear_fc2"),
    *_norm("self_attention.linear_qkv", "input_layernorm", "norm1"),
    *_norm("mlp.linear_fc1", "pre_mlp_layernorm", "norm2"),
)


def _mergers(deep: str, norm: str, fc1: str, fc2: str) -> tuple[Rule, ...]:
    one, many = "merger.", "decoder.deepstack_merger_list.{merger}."
    return tuple(
        rename(source + module + ".{leaf}", target + hub + ".{leaf}")
        for source, target in ((one, one), (many, deep + ".{merger}."))
        for module, hub in (("patch_norm", norm), ("linear_fc1", fc1), ("linear_fc2", fc2))
    )


# model family -> its merger names
MERGERS: dict[str, tuple[Rule, ...]] = {
    "vl": _mergers("deepstack_merger_list", "norm", "linear_fc1", "linear_fc2"),
    "omni": _mergers("merger_list", "ln_q", "mlp.0", "mlp.2"),
}
