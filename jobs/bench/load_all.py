"""The straightforward converter that the streaming one is measured against: everything loaded, converted, then saved.

    python -m jobs.bench.load_all CHECKPOINT BASE OUTPUT

As scripts for Megatron checkpoints do it, but generous: optimizer states are left out, and q, k, v are split right.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def load_all(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every model tensor of the checkpoint."""
    entries = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and not key.startswith("optimizer.")
    }
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    return state


def convert(state: dict[str, torch.Tensor], config: dict) -> dict[str, torch.Tensor]:
    """The hub's tensors."""
    groups, dim, moe = config["num_key_value_heads"], config["head_dim"], config["moe_intermediate_size"]
    per_group = config["num_attention_heads"] // groups
    at = "decoder.layers."
    made = {
        "model.embed_tokens.weight": state["embedding.word_embeddings.weight"],
        "model.norm.weight": state["decoder.final_layernorm.weight"],
        "lm_head.weight": state["output_layer.weight"],
    }
    renamed = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.router.weight": "mlp.gate.weight",
    }
    for layer in range(config["num_hidden_layers"]):
        to = f"model.layers.{layer}."
        made |= {to + new: state[at + old][layer].clone() for old, new in renamed.items()}
        qkv = state[f"{at}self_attention.linear_qkv.weight"][layer].view(groups, per_group + 2, dim, -1)
        parts = {"q": qkv[:, :per_group], "k": qkv[:, per_group], "v": qkv[:, per_group + 1]}
        hidden = qkv.shape[-1]
        made |= {f"{to}self_attn.{n}_proj.weight": part.reshape(-1, hidden).clone() for n, part in parts.items()}
        for expert in range(config["num_experts"]):
            fc1 = state[f"{at}mlp.experts.experts.linear_fc1.weight"][layer, expert]
            made[f"{to}mlp.experts.{expert}.gate_proj.weight"] = fc1[:moe].clone()
            made[f"{to}mlp.experts.{expert}.up_proj.weight"] = fc1[moe:].clone()
            fc2 = state[f"{at}mlp.experts.experts.linear_fc2.weight"][layer, expert]
            made[f"{to}mlp.experts.{expert}.down_proj.weight"] = fc2.clone()
    return made


def main(checkpoint: Path, base: Path, output: Path) -> None:
    config = json.loads((base / "config.json").read_text())
    output.mkdir()
    save_file(convert(load_all(checkpoint), config), output / "model.safetensors", {"format": "pt"})
    (output / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
