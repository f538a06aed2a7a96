"""Mixture of experts: the router, the fused experts, and the auxiliary loss that keeps the experts evenly loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schemas.errors import ConfigError
from train.models.inputs import RouterStats
from train.ops.lora_types import ExpertLora
from train.ops.registry import Ops

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Router(nn.Module):
    """Chooses the experts of each row: softmax over all experts, the k greatest, made to add up to 1 or left alone."""

    def __init__(self, config: PreTrainedConfig, ops: Ops) -> None:
        super().__init__()
        self.top_k: int = config.num_experts_per_tok
        if not 0 < self.top_k <= config.num_experts:
            raise ConfigError(f"num_experts_per_tok {self.top_k} of num_experts {config.num_experts}")
        # the released Qwen3-VL-MoE has no such key and always divides
        self.normalize: bool = config.model_type.startswith("qwen3_vl_moe") or config.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.choose: Callable[..., tuple[Tensor, Tensor]] = ops.topk_softmax

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(logits [S, E], expert ids int64 [S, k], weights float32 [S, k]) of rows [S, H]."""
        logits = F.linear(x, self.weight)
        weights, ids = self.choose(logits, self.top_k, self.normalize)
        return logits, ids, weights


class Experts(nn.Module):
    """All experts of a layer in two parameters: gate_up_proj [E, 2I, H], gate first; down_proj [E, H, I].

    compute: the bound op, of its signature; expert parallelism replaces it, and start, which may send rows on their way
    while the router chooses: what it makes of x is what compute takes. lora: gives the adapters of one forward pass, or
    None. top_k: experts of each row.
    """

    def __init__(self, config: PreTrainedConfig, ops: Ops) -> None:
        super().__init__()
        experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))
        self.compute: Callable[..., Tensor] = ops.moe_experts
        self.start: Callable[[Tensor], Any] = as_it_is
        self.lora: Callable[[], ExpertLora] | None = None
        self.top_k: int = config.num_experts_per_tok

    def forward(self, x: Any, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """[S, H] of what `start` made of rows [S, H], of ids int64 [S, k] and weights float32 [S, k]."""
        lora = None if self.lora is None else self.lora()
        return self.compute(x, expert_ids, weights, self.gate_up_proj, self.down_proj, lora)


class SparseMLP(nn.Module):
    """Router and experts of one layer."""

    def __init__(self, config: PreTrainedConfig, ops: Ops) -> None:
        super().__init__()
        self.gate = Router(config, ops)
        self.experts = Experts(config, ops)
        self.statistics: Callable[..., tuple[Tensor, Tensor]] = ops.router_statistics

    def forward(self, x: Tensor, num_valid: int) -> tuple[Tensor, Tensor, Tensor]:
        """(rows [S, H], choices float32 [E], sums of probabilities float32 [E]), the last two over the first num_valid
        rows."""
        rows = self.experts.start(x)
        logits, ids, weights = self.gate(x)
        counts, prob_sums = self.statistics(logits, ids, num_valid)
        return self.experts(rows, ids, weights), counts, prob_sums


def has_experts(model: nn.Module) -> bool:
    """Whether any layer has."""
    return any(isinstance(module, Experts) for module in model.modules())


def as_it_is(x: Tensor) -> Tensor:
    """Rows that need not go anywhere."""
    return x


def is_sparse(config: PreTrainedConfig, layer: int) -> bool:
    """Whether that layer of the text model has experts."""
    experts: int = getattr(config, "num_experts", 0) or 0
    if not experts or layer in (getattr(config, "mlp_only_layers", None) or ()):
        return False
    return bool((layer + 1) % config.decoder_sparse_step == 0)


def load_balancing_loss(stats: RouterStats) -> Tensor:
    """float32 scalar: E * sum_e (C_e / N) * (P_e / N), with choices C and probabilities P summed over all layers, and
    N = layers x valid rows (Fedus et al. 2021, equations 4 to 6)."""
    layers, experts = stats.counts.shape
    rows = (stats.tokens * layers).clamp(min=1)  # a micro-batch may be all padding
    return experts * ((stats.counts.sum(0) / rows) * (stats.prob_sums.sum(0) / rows)).sum()
