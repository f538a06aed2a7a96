"""The text model of the Qwen3 families: pre-norm blocks of grouped-query attention, with per-head norms of queries and
keys, and a gated MLP or experts. Rows of packed documents, no batch dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from schemas.errors import ConfigError, UnsupportedError
from train.models.checkpointing import BlockStack, Projection
from train.models.inputs import RouterStats
from train.models.moe import SparseMLP, is_sparse
from train.models.rope import RopeSpec, RotaryTable, head_dim_of, text_table
from train.ops.registry import Ops
from train.ops.segments import Segments

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019), with the addition before it."""

    def __init__(self, size: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.compute: Callable[..., tuple[Tensor, Tensor]] = ops.rms_norm

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm of s, s), where s = x + residual."""
        return self.compute(x, self.weight, self.eps, residual)


class Attention(nn.Module):
    """Causal attention within each document. attention: the bound op; sequence parallelism replaces it."""

    def __init__(self, config: PreTrainedConfig, ops: Ops) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = head_dim_of(config)
        if self.heads % self.kv_heads:
            raise ConfigError(f"num_attention_heads {self.heads} is no multiple of num_key_value_heads {self.kv_heads}")
        self.q_proj = Projection(hidden, self.heads * self.head_dim, bias=bias)
        self.k_proj = Projection(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = Projection(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = Projection(self.heads * self.head_dim, hidden, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, ops)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, ops)
        self.attention: Callable[..., Tensor] = ops.attention
        self.norm_rope: Callable[..., tuple[Tensor, Tensor]] = ops.qk_norm_rope

    def forward(self, x: Tensor, rope: RotaryTable, segments: Segments) -> Tensor:
        """[S, H] of rows [S, H]."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        q, k = self.norm_rope(q, k, self.q_norm.weight, self.k_norm.weight, rope.cos, rope.sin, self.q_norm.eps)
        return self.o_proj(self.attention(q, k, v, segments, causal=True).flatten(-2))


class DenseMLP(nn.Module):
    """Gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: PreTrainedConfig, ops: Ops) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Projection(hidden, inner, bias=False, kind="mlp")
        self.up_proj = Projection(hidden, inner, bias=False, kind="mlp")
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.swiglu: Callable[..., Tensor] = ops.swiglu

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.swiglu(self.gate_proj(x), self.up_proj(x)))


class TextBlock(nn.Module):
    """One layer."""

    def __init__(self, config: PreTrainedConfig, layer: int, ops: Ops) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.self_attn = Attention(config, ops)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.mlp = SparseMLP(config, ops) if is_sparse(config, layer) else DenseMLP(config, ops)

    def forward(
        self, hidden: Tensor, rope: RotaryTable, segments: Segments, num_valid: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(rows [S, H], choices of each expert, sums of their probabilities); None for a layer without experts."""
        normed, _ = self.input_layernorm(hidden)
        normed, hidden = self.post_attention_layernorm(self.self_attn(normed, rope, segments), hidden)
        if isinstance(self.mlp, SparseMLP):
            out, counts, prob_sums = self.mlp(normed, num_valid)
            return hidden + out, counts, prob_sums
        return hidden + self.mlp(normed), None, None


class TextModel(BlockStack):
    """Embeddings, layers and the last norm. multimodal: positions on three axes."""

    def __init__(self, config: PreTrainedConfig, ops: Ops, *, multimodal: bool) -> None:
        super().__init__()
        _check(config)
        self.initializer_range: float = config.initializer_range
        self.rope = RopeSpec.of_text(config, multimodal=multimodal)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, getattr(config, "pad_token_id", None))
        self.layers = nn.ModuleList(TextBlock(config, layer, ops) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)

    def forward(
        self,
        hidden: Tensor,
        position_ids: Tensor,
        segments: Segments,
        num_valid: int,
        deepstack_rows: Tensor | None = None,
        deepstack: tuple[Tensor, ...] = (),
    ) -> tuple[Tensor, RouterStats | None]:
        """(rows [S, H] after the last norm, statistics of the routers or None) of embedded rows [S, H].

        deepstack: per level features [n, H] that are added to the rows deepstack_rows, int64 [n], after the layer of
        that number (Meng et al. 2024).
        """
        rope = text_table(position_ids, self.rope)
        counts, prob_sums = [], []
        for number, block in enumerate(self.layers):
            hidden, chosen, probabilities = self.run_block(block, hidden, rope, segments, num_valid)
            if chosen is not None:
                counts.append(chosen)
                prob_sums.append(probabilities)
            if number < len(deepstack) and deepstack_rows is not None:
                hidden = hidden.index_add(0, deepstack_rows, deepstack[number].to(hidden.dtype))
        hidden, _ = self.norm(hidden)
        if not counts:
            return hidden, None
        stacked = torch.stack(counts)
        tokens = stacked.new_full((), num_valid)
        return hidden, RouterStats(stacked, torch.stack(prob_sums), tokens)


def _check(config: PreTrainedConfig) -> None:
    """UnsupportedError for what this model does not compute and would otherwise pass over."""
    name = config.model_type
    if config.hidden_act != "silu":
        raise UnsupportedError(f"{name}: hidden_act {config.hidden_act!r}; Qwen3's MLPs take 'silu'")
    if config.attention_dropout:
        raise UnsupportedError(f"{name}: attention_dropout {config.attention_dropout}; set it to 0")
    types = getattr(config, "layer_types", None)
    windowed = getattr(config, "use_sliding_window", False) and getattr(config, "sliding_window", None) is not None
    if "sliding_attention" in types if types else windowed:
        raise UnsupportedError(f"{name}: sliding_window attention; the native models attend to the whole document")
