"""Tiny models of every family with sizes that all differ, the same weights in transformers and in ours, and the
comparison of logits, losses and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    PreTrainedConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeThinkerConfig

from train.models.foundation import FoundationModel
from train.models.inputs import ModelInputs, ModelOutput
from train.models.omni_thinker import OmniThinker
from train.models.text_lm import Qwen3LM
from train.models.vl import Qwen3VL
from train.ops.registry import Ops, eager_ops

VOCAB = 211
IMAGE, VIDEO, AUDIO = 208, 209, 210
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.05,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = {**ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_heads": 2,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "out_hidden_size": 48,
    "num_position_embeddings": 49,
    "deepstack_visual_indexes": [0, 2],
}
SOUND: dict[str, Any] = {
    "num_mel_bins": 128,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 28,
    "d_model": 40,
    "downsample_hidden_size": 6,
    "n_window": 50,
    "n_window_infer": 200,
    "output_dim": 48,
    "conv_chunksize": 3,
}
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO}


@dataclass(frozen=True)
class Family:
    """reference: transformers' class; ours: builds the same from (config, ops)."""

    make_config: Callable[[], PreTrainedConfig]
    reference: Any
    ours: Callable[[PreTrainedConfig, Ops], FoundationModel]


def dense(**changes: Any) -> PreTrainedConfig:
    return Qwen3Config(**{**TEXT, "rope_parameters": ROPE, **changes})


def sparse(**changes: Any) -> PreTrainedConfig:
    return Qwen3MoeConfig(**{**TEXT, **MOE, "rope_parameters": ROPE, **changes})


def vl_dense(**changes: Any) -> PreTrainedConfig:
    text = {**TEXT, "rope_parameters": MROPE}
    return Qwen3VLConfig(**{"text_config": text, "vision_config": VISION, **TOKENS, **changes})


def vl_sparse(**changes: Any) -> PreTrainedConfig:
    text = {**TEXT, **MOE, "norm_topk_prob": False, "rope_parameters": MROPE}  # which transformers does not read
    return Qwen3VLMoeConfig(**{"text_config": text, "vision_config": VISION, **TOKENS, **changes})


def omni(**changes: Any) -> PreTrainedConfig:
    parts = {
        "text_config": {**TEXT, **MOE, "rope_parameters": MROPE},
        "vision_config": VISION,
        "audio_config": SOUND,
        "audio_token_id": AUDIO,
        "position_id_per_seconds": 13,
    }
    return Qwen3OmniMoeThinkerConfig(**{**parts, **TOKENS, **changes})


FAMILIES = {
    "dense": Family(dense, Qwen3ForCausalLM, Qwen3LM),
    "tied": Family(
        lambda: dense(tie_word_embeddings=True, attention_bias=True, pad_token_id=17), Qwen3ForCausalLM, Qwen3LM
    ),
    "moe": Family(sparse, Qwen3MoeForCausalLM, Qwen3LM),
    "mixed_moe": Family(
        lambda: sparse(num_hidden_layers=5, mlp_only_layers=[3], decoder_sparse_step=2, norm_topk_prob=False),
        Qwen3MoeForCausalLM,
        Qwen3LM,
    ),
    "vl": Family(vl_dense, Qwen3VLForConditionalGeneration, Qwen3VL),
    "vl_tied": Family(lambda: vl_dense(tie_word_embeddings=True), Qwen3VLForConditionalGeneration, Qwen3VL),
    "vl_moe": Family(vl_sparse, Qwen3VLMoeForConditionalGeneration, Qwen3VL),
    "omni": Family(omni, Qwen3OmniMoeThinkerForConditionalGeneration, OmniThinker),
}


@dataclass(frozen=True)
class Pair:
    """One model twice, with the same weights."""

    config: PreTrainedConfig
    reference: nn.Module
    ours: FoundationModel


def make_pair(name: str) -> Pair:
    family = FAMILIES[name]
    config = family.make_config()
    reference = family.reference._from_config(config, attn_implementation="sdpa", experts_implementation="eager")
    randomise(reference)
    ours = family.ours(config, eager_ops())
    ours.load_state_dict(hub_names(reference), strict=True)
    return Pair(config, reference.eval(), ours)


def make_ours(name: str) -> FoundationModel:
    """Ours alone, with weights of the same kind."""
    family = FAMILIES[name]
    model = family.ours(family.make_config(), eager_ops())
    randomise(model)
    return model


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Weights under which every part of the model matters: no bias is 0 and no norm is 1."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            parameter.copy_(0.2 * noise + (0 if name.endswith("bias") else 1))
        elif "pos_embed" in name:
            parameter.copy_(0.5 * noise)
        else:
            fan_in = parameter[0].numel() if parameter.ndim != 3 else parameter.shape[-1]
            parameter.copy_(noise * fan_in**-0.5)


def hub_names(reference: nn.Module, gradients: bool = False) -> dict[str, Tensor]:
    """Weights or gradients of a model of transformers (5.17 or 5.24) by our names."""
    is_omni = type(reference).__name__.startswith("Qwen3OmniMoeThinker")
    found = {}
    for name, parameter in reference.named_parameters():
        if is_omni:
            name = name.replace("model.language_model.", "model.", 1)
            name = name.replace("model.visual.", "visual.", 1).replace("model.audio_tower.", "audio_tower.", 1)
        value = parameter.grad if gradients else parameter.detach()
        if value is not None:
            found[name] = value.clone()
    return found


@dataclass(frozen=True)
class Reference:
    """What transformers makes of the same rows: logits [T, V]; aux_loss: without its coefficient."""

    logits: Tensor
    ce_loss: Tensor
    aux_loss: Tensor | None
    gradients: dict[str, Tensor]


def run_reference(pair: Pair, inputs: ModelInputs, media: dict[str, Tensor]) -> Reference:
    """One packed row of `num_valid` tokens. transformers tells documents apart by text positions that start again,
    given as the first of four axes, and by no attention mask."""
    model, rows = pair.reference, inputs.num_valid
    model.zero_grad(set_to_none=True)
    restart = torch.cat([torch.arange(length) for length in inputs.segments.lengths])[:rows]
    if isinstance(pair.ours, Qwen3LM):
        positions = restart[None]
    else:
        given = inputs.position_ids[:, :rows]
        positions = torch.cat([restart[None].to(given.dtype), given])[:, None]
    how = {"output_router_logits": True} if hasattr(text_config(pair.config), "num_experts") else {}
    found = model(input_ids=inputs.ids[None, :rows], position_ids=positions, use_cache=False, **how, **media)
    logits = found.logits[0]
    assert inputs.labels is not None
    ce_loss = F.cross_entropy(logits, inputs.labels[:rows], ignore_index=-100)
    aux_loss = getattr(found, "aux_loss", None) if how else None
    loss = ce_loss
    if aux_loss is not None:
        loss = loss + text_config(pair.config).router_aux_loss_coef * aux_loss
    loss.backward()
    aux = None if aux_loss is None else aux_loss.detach()
    return Reference(logits.detach(), ce_loss.detach(), aux, hub_names(model, gradients=True))


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    found: PreTrainedConfig = config.get_text_config()
    return found


def run_ours(model: FoundationModel, inputs: ModelInputs) -> tuple[ModelOutput, dict[str, Tensor]]:
    """(output with logits, gradients by name)."""
    model.zero_grad(set_to_none=True)
    output = model(inputs, logits=True)
    assert output.loss is not None
    output.loss.backward()
    named = model.named_parameters()
    return output, {name: p.grad.clone() for name, p in named if p.grad is not None}


def assert_equal_runs(output: ModelOutput, gradients: dict[str, Tensor], expected: Reference) -> None:
    """Logits within 1e-5; each gradient within 1e-5 of its own greatest + 1e-7 of the greatest of all."""
    assert output.logits is not None and output.ce_loss is not None
    rows = len(expected.logits)
    assert (output.logits[:rows] - expected.logits).abs().max() < 1e-5
    assert torch.allclose(output.ce_loss, expected.ce_loss, rtol=1e-6)
    if expected.aux_loss is not None:
        assert output.aux_loss is not None
        assert torch.allclose(output.aux_loss, expected.aux_loss, rtol=1e-6)
    assert_equal_gradients(gradients, expected.gradients)


def assert_equal_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """A gradient that one side lacks counts as zeros."""
    greatest = max(value.abs().max() for value in expected.values())
    for name in found.keys() | expected.keys():
        got = found.get(name, torch.zeros(()))
        want = expected.get(name, torch.zeros(()))
        limit = 1e-5 * want.abs().max() + 1e-7 * greatest
        difference = (got - want).abs().max()
        assert difference <= limit, f"{name}: {difference:.3g} over {limit:.3g}"
