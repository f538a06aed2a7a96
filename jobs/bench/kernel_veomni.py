"""VeOmni's own Qwen3-MoE model, as its wheel builds it, for comparing whole layers."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from train.ops.registry import OPS
from train.ops.segments import Segments

ATTENTION = "omniloom_bench_packed"  # in transformers' table of attention functions
FUSED = {
    "moe_implementation": "fused_triton",
    "cross_entropy_loss_implementation": "chunk_loss",
    "rms_norm_implementation": "liger_kernel",
    "rotary_pos_emb_implementation": "liger_kernel",
    "swiglu_mlp_implementation": "liger_kernel",
    "load_balancing_loss_implementation": "triton",
}
EAGER = {name: "eager" for name in FUSED} | {"cross_entropy_loss_implementation": "chunk_loss"}


def build(config: Any, attention: str, segments: Segments, dtype: str, device: str) -> Any:
    """Its model for causal language modelling with random weights. config: transformers' Qwen3MoeConfig; attention: a
    backend of ours, which its attention layers call on these segments through transformers' table; fused kernels on a
    GPU, eager ones elsewhere."""
    choice = import_module("veomni.arguments.arguments_types").OpsImplementationConfig
    import_module("veomni.ops").apply_ops_config(choice(**(FUSED if device == "cuda" else EAGER)))
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, packed_attention(attention, segments))
    make = import_module("veomni.models.auto").build_foundation_model
    return make(config, torch_dtype=dtype, attn_implementation=ATTENTION, init_device=device).train()


def packed_attention(name: str, segments: Segments) -> Callable[..., tuple[Tensor, None]]:
    """An attention function in transformers' form: q, k, v [1, heads, T, D] -> ([1, T, heads, D], None)."""
    attend = OPS["attention"].backends[name].load()

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        assert mask is None and query.shape[0] == 1
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return attend(q, k, v, segments, causal=True, scale=scaling)[None], None

    return forward


def loss_of(model: nn.Module, ids: Tensor, positions: Tensor, segments: Segments) -> Tensor:
    """Mean loss of the next token inside each document. ids, positions: int64 [T]; it shifts the labels itself, so that
    the first token of a document is what must not be asked for."""
    labels = ids.clone()
    labels[segments.cu_seqlens[:-1].long()] = -100
    bounds = {"cu_seq_lens_q": segments.cu_seqlens, "cu_seq_lens_k": segments.cu_seqlens}
    longest = {"max_length_q": segments.max_seqlen, "max_length_k": segments.max_seqlen}
    found = model(
        input_ids=ids[None], position_ids=positions[None], labels=labels[None], use_cache=False, **bounds, **longest
    )
    loss: Tensor = found.loss
    return loss


def recompute_blocks(model: Any, on: bool) -> None:
    """Gradient checkpointing of every layer, as its trainer turns it on."""
    if on:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
