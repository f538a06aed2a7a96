"""Tiny models of the real architectures, saved as the hub lays them out, for the tests of the converter."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
)

IDS = {
    "audio_token_id": 301,
    "image_token_id": 302,
    "video_token_id": 303,
    "audio_start_token_id": 304,
    "audio_end_token_id": 305,
    "vision_start_token_id": 306,
    "vision_end_token_id": 307,
    "user_token_id": 308,
}
VOCAB = 320


ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [3, 1, 1], "mrope_interleaved": True}
TEXT = {
    "vocab_size": VOCAB,
    "intermediate_size": 56,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "num_experts_per_tok": 2,
    "rope_parameters": ROPE,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
VISION = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 44,
    "num_heads": 2,
    "patch_size": 4,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 1],
}
AUDIO = {
    "num_mel_bins": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 36,
    "d_model": 12,
    "downsample_hidden_size": 8,
    "max_source_positions": 100,
}
SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
TALKER_TEXT = {
    **SMALL,
    "vocab_size": 64,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]},
}
PREDICTOR = {**SMALL, "vocab_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "num_code_groups": 4}
TALKER = {
    "text_config": TALKER_TEXT,
    "code_predictor_config": PREDICTOR,
    "num_code_groups": 4,
    "accept_hidden_layer": 1,
    "spatial_merge_size": 2,
}
CODE2WAV = {
    "codebook_size": 32,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_quantizers": 4,
    "upsample_rates": [2, 2],
    "upsampling_ratios": [2],
    "decoder_dim": 16,
}


def omni_config(hidden: int = 32, moe: int = 24, experts: int = 8, layers: int = 3) -> Qwen3OmniMoeConfig:
    """All sizes differ from one another unless asked otherwise; head_dim is not hidden / heads."""
    sizes = {"hidden_size": hidden, "moe_intermediate_size": moe, "num_experts": experts, "num_hidden_layers": layers}
    thinker = {
        "text_config": deepcopy(TEXT) | sizes,
        "vision_config": VISION | {"out_hidden_size": hidden},
        "audio_config": AUDIO | {"output_dim": hidden},
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
        **IDS,
    }
    return Qwen3OmniMoeConfig(
        thinker_config=thinker,
        talker_config=deepcopy(TALKER) | {"thinker_hidden_size": hidden},
        code2wav_config=dict(CODE2WAV),
    )


def make_omni(
    folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, shards: int = 1, **sizes: int
) -> Path:
    """A whole Qwen3-Omni with random weights, norms and biases included, under the hub's names, with small files."""
    torch.manual_seed(seed)
    model = Qwen3OmniMoeForConditionalGeneration(omni_config(**sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn_like(parameter) * 0.1
            parameter.copy_(values + 1 if "norm" in name and name.endswith("weight") else values)
    model.to(dtype).save_pretrained(folder)
    if shards > 1:
        _split(folder, shards)
    write_small_files(folder)
    return folder


def write_small_files(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    (folder / "merges.txt").write_text("a b\n")
    (folder / "preprocessor_config.json").write_text('{"patch_size": 4}')
    (folder / "chat_template.json").write_text(
        json.dumps({"chat_template": "{% for m in messages %}{{ m }}{% endfor %}"})
    )
    (folder / "README.md").write_text("a model\n")


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory, read by the safetensors library."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def rewrite_weights(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replaces the weights of a directory by one file."""
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def edit_config(folder: Path, *path: str, **values: Any) -> None:
    """Sets keys of config.json below `path`; None removes them."""
    config = json.loads((folder / "config.json").read_text())
    section = config
    for key in path:
        section = section[key]
    for key, value in values.items():
        if value is None:
            section.pop(key, None)
        else:
            section[key] = value
    (folder / "config.json").write_text(json.dumps(config))


def _split(folder: Path, shards: int) -> None:
    """Spreads the tensors over files in a way that no converter would choose."""
    tensors = read_weights(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[number::shards]}
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def make_text(folder: Path, *, tied: bool = False, moe: bool = True, dtype: torch.dtype = torch.float32) -> Path:
    """A tiny Qwen3 or Qwen3-MoE with random weights and small files."""
    torch.manual_seed(1)
    sizes = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 128, "tie_word_embeddings": tied,
    }  # fmt: skip
    if moe:
        experts = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.to(dtype).save_pretrained(folder)
    write_small_files(folder)
    return folder
