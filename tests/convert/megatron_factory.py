"""Hub weights -> the tensors Megatron would save, written down a second time from the layout's description.

Nothing of `convert` is used here, so that these are an independent opinion on names and orders.
"""

from __future__ import annotations

import torch

Weights = dict[str, torch.Tensor]


def grouped_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int) -> torch.Tensor:
    """[Q, H], [K, H], [K, H] -> rows q q .. k v of group 0, then those of group 1, ..."""
    parts = [part.reshape(groups, part.shape[0] // groups, *part.shape[1:]) for part in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def padded(table: torch.Tensor, rows: int) -> torch.Tensor:
    """Megatron pads the vocabulary with rows that mean nothing."""
    return torch.cat([table, torch.full((rows - table.shape[0], table.shape[1]), 9.0, dtype=table.dtype)])


def _experts(weights: Weights, at: str) -> tuple[torch.Tensor, torch.Tensor]:
    """fc1 [E, 2I, H] and fc2 [E, H, I] of a layer from either form of the hub."""
    if f"{at}gate_up_proj" in weights:
        return weights[f"{at}gate_up_proj"].transpose(1, 2), weights[f"{at}down_proj"].transpose(1, 2)
    fc1, fc2 = [], []
    expert = 0
    while f"{at}{expert}.gate_proj.weight" in weights:
        fc1.append(torch.cat([weights[f"{at}{expert}.{name}_proj.weight"] for name in ("gate", "up")]))
        fc2.append(weights[f"{at}{expert}.down_proj.weight"])
        expert += 1
    return torch.stack(fc1), torch.stack(fc2)


def _layer(weights: Weights, at: str, groups: int, norms: str, singleton: bool) -> Weights:
    """One layer under its names behind `decoder.layers.N.`; norms: "engine", "local" or "plain"."""
    attention, after = f"{at}self_attn.", weights[f"{at}post_attention_layernorm.weight"]
    dense = f"{at}mlp.gate_proj.weight" in weights
    input_norm = "input_layernorm.weight" if norms == "plain" else "self_attention.linear_qkv.layer_norm_weight"
    fused_norm = norms == "local" or (norms == "engine" and dense)
    layer = {
        input_norm: weights[f"{at}input_layernorm.weight"],
        "self_attention.linear_qkv.weight": grouped_qkv(
            *(weights[f"{attention}{name}_proj.weight"] for name in "qkv"), groups
        ),
        "self_attention.linear_proj.weight": weights[f"{attention}o_proj.weight"],
        "self_attention.q_layernorm.weight": weights[f"{attention}q_norm.weight"],
        "self_attention.k_layernorm.weight": weights[f"{attention}k_norm.weight"],
        ("mlp.linear_fc1.layer_norm_weight" if fused_norm else "pre_mlp_layernorm.weight"): after,
    }
    if dense:
        gate, up = weights[f"{at}mlp.gate_proj.weight"], weights[f"{at}mlp.up_proj.weight"]
        parts = {"mlp.linear_fc1.weight_w": gate, "mlp.linear_fc1.weight_v": up}
        layer |= parts if singleton else {"mlp.linear_fc1.weight": torch.cat([gate, up])}
        return layer | {"mlp.linear_fc2.weight": weights[f"{at}mlp.down_proj.weight"]}
    layer["mlp.router.weight"] = weights[f"{at}mlp.gate.weight"]
    fc1, fc2 = _experts(weights, f"{at}mlp.experts.")
    experts = "mlp.experts.experts."
    if not singleton:
        return layer | {f"{experts}linear_fc1.weight": fc1, f"{experts}linear_fc2.weight": fc2}
    for i, (gate_up, down) in enumerate(zip(fc1, fc2, strict=True)):
        gate, up = gate_up.chunk(2)
        layer |= {f"{experts}{i}.linear_fc1.weight_w": gate, f"{experts}{i}.linear_fc1.weight_v": up}
        layer[f"{experts}{i}.linear_fc2.weight"] = down
    return layer


def _stack(layers: list[Weights], at: str, stacked: bool) -> Weights:
    if stacked:
        return {at + name: torch.stack([layer[name] for layer in layers]) for name in layers[0]}
    return {f"{at}{i}.{name}": tensor for i, layer in enumerate(layers) for name, tensor in layer.items()}


def language_model(
    weights: Weights,
    text: str,
    head: str,
    groups: int,
    *,
    form: str = "stacked",
    norms: str = "engine",
    rows: int | None = None,
    prefix: str = "",
) -> Weights:
    """text, head: hub prefixes of the text model and of lm_head; form: "stacked", "per layer" or "singleton"; rows: of
    the padded vocabulary; prefix: before every Megatron name."""
    layers, number = [], 0
    while f"{text}layers.{number}.input_layernorm.weight" in weights:
        layers.append(_layer(weights, f"{text}layers.{number}.", groups, norms, form == "singleton"))
        number += 1
    embedding = weights[f"{text}embed_tokens.weight"]
    rows = rows or embedding.shape[0]
    model = {
        "embedding.word_embeddings.weight": padded(embedding, rows),
        "decoder.final_layernorm.weight": weights[f"{text}norm.weight"],
        **_stack(layers, "decoder.layers.", form == "stacked"),
    }
    if f"{head}lm_head.weight" in weights:
        model["output_layer.weight"] = padded(weights[f"{head}lm_head.weight"], rows)
    return {prefix + name: tensor.contiguous().clone() for name, tensor in model.items()}


def vision_blocks(weights: Weights, visual: str, heads: int, *, stacked: bool = True, prefix: str = "") -> Weights:
    """The vision tower as Megatron blocks, from the names of Qwen3-VL or Qwen3-Omni behind `visual`."""
    hub = {name.removeprefix(visual): tensor for name, tensor in weights.items() if name.startswith(visual)}
    plain = {
        "attn.proj.weight": "self_attention.linear_proj.weight",
        "attn.proj.bias": "self_attention.linear_proj.bias",
        "mlp.linear_fc1.weight": "mlp.linear_fc1.weight",
        "mlp.linear_fc1.bias": "mlp.linear_fc1.bias",
        "mlp.linear_fc2.weight": "mlp.linear_fc2.weight",
        "mlp.linear_fc2.bias": "mlp.linear_fc2.bias",
        "norm1.weight": "self_attention.linear_qkv.layer_norm_weight",
        "norm1.bias": "self_attention.linear_qkv.layer_norm_bias",
        "norm2.weight": "mlp.linear_fc1.layer_norm_weight",
        "norm2.bias": "mlp.linear_fc1.layer_norm_bias",
    }
    blocks: list[Weights] = []
    while f"blocks.{len(blocks)}.norm1.weight" in hub:
        at = f"blocks.{len(blocks)}."
        block = {ours: hub[at + theirs] for theirs, ours in plain.items()}
        for leaf in ("weight", "bias"):
            block[f"self_attention.linear_qkv.{leaf}"] = grouped_qkv(*hub[f"{at}attn.qkv.{leaf}"].chunk(3), heads)
        blocks.append(block)
    tower = _stack(blocks, "decoder.layers.", stacked)
    renamed = {"ln_q": "patch_norm", "norm": "patch_norm", "mlp.0": "linear_fc1", "mlp.2": "linear_fc2"}
    for name, tensor in hub.items():
        if name.startswith("blocks."):
            continue
        parts = name.rsplit(".", 1)
        if "merger" in name:
            where = "merger." if name.startswith("merger.") else f"decoder.deepstack_merger_list.{name.split('.')[1]}."
            module = parts[0].split(".", 1 if name.startswith("merger.") else 2)[-1]
            tower[f"{where}{renamed.get(module, module)}.{parts[1]}"] = tensor
        else:
            tower[name] = tensor
    return {prefix + name: tensor.contiguous().clone() for name, tensor in tower.items()}


def hub_tower(weights: Weights, hub: str, prefix: str) -> Weights:
    """A tower that runs as the hub's own module."""
    return {prefix + name.removeprefix(hub): tensor.clone() for name, tensor in weights.items() if name.startswith(hub)}
