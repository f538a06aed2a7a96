"""The vision towers of Qwen3-VL and Qwen3-Omni: one computation, two sets of names.

Patches come from all pictures of the micro-batch in one run of rows, those of one merged patch beside one another.
Attention stays within a temporal grid, and positions do not depend on time, so a clip may come in pieces cut between
grids and gives the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from schemas.errors import ConfigError, UnsupportedError
from train.models.checkpointing import BlockStack, Projection
from train.models.inputs import Grid
from train.models.layer_norm import LayerNorm
from train.models.linear import Gelu, TowerLinear, activated, activation
from train.models.rope import RopeSpec, RotaryTable, vision_table
from train.ops.registry import Ops
from train.ops.segments import Segments

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NORM_EPS = 1e-6


class PatchProjection(nn.Module):
    """The convolution of patches that do not overlap, as a product: weight [C, channels, temporal_patch, patch, patch],
    as in the hub's files."""

    def __init__(self, config: PreTrainedConfig, ops: Ops) -> None:
        super().__init__()
        patch = config.patch_size
        shape = (config.hidden_size, config.in_channels, config.temporal_patch_size, patch, patch)
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(config.hidden_size))
        self.compute: Callable[..., Tensor] = ops.linear

    def forward(self, patches: Tensor) -> Tensor:
        """[P, C] of patches [P, channels * temporal_patch * patch * patch]."""
        return self.compute(patches.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class PatchEmbed(nn.Module):
    """Holds the projection under its name."""

    def __init__(self, config: PreTrainedConfig, ops: Ops) -> None:
        super().__init__()
        self.proj = PatchProjection(config, ops)

    def forward(self, patches: Tensor) -> Tensor:
        rows: Tensor = self.proj(patches)
        return rows


class VisionAttention(nn.Module):
    """Full attention within each temporal grid."""

    def __init__(self, config: PreTrainedConfig, ops: Ops) -> None:
        super().__init__()
        self.heads: int = config.num_heads
        self.qkv = TowerLinear(config.hidden_size, 3 * config.hidden_size, ops)
        self.proj = Projection(config.hidden_size, config.hidden_size, compute=partial(ops.linear, kept=True))
        self.attention: Callable[..., Tensor] = ops.attention
        self.turn: Callable[..., tuple[Tensor, Tensor]] = ops.vision_rope

    def forward(self, x: Tensor, rope: RotaryTable, segments: Segments) -> Tensor:
        """[P, C] of rows [P, C]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)
        q, k = self.turn(q, k, rope.cos, rope.sin)
        return self.proj(self.attention(q, k, v, segments, causal=False).flatten(-2))


class VisionMLP(nn.Module):
    """Two layers with an activation between."""

    def __init__(self, config: PreTrainedConfig, ops: Ops) -> None:
        super().__init__()
        self.linear_fc1 = TowerLinear(config.hidden_size, config.intermediate_size, ops)
        self.linear_fc2 = TowerLinear(config.intermediate_size, config.hidden_size, ops)
        self.act = activation(config.hidden_act, config.model_type)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(activated(self.linear_fc1, x, self.act))


class VisionBlock(nn.Module):
    """One layer."""

    def __init__(self, config: PreTrainedConfig, ops: Ops) -> None:
        super().__init__()
        self.norm1 = LayerNorm(config.hidden_size, NORM_EPS, ops)
        self.attn = VisionAttention(config, ops)
        self.norm2 = LayerNorm(config.hidden_size, NORM_EPS, ops)
        self.mlp = VisionMLP(config, ops)

    def forward(self, hidden: Tensor, rope: RotaryTable, segments: Segments) -> Tensor:
        """[P, C] of rows [P, C]."""
        normed, hidden = self.norm1(hidden)
        normed, hidden = self.norm2(self.attn(normed, rope, segments), hidden)
        return hidden + self.mlp(normed)


class VLMerger(nn.Module):
    """merge_size ** 2 patches -> one row of the text model, with Qwen3-VL's names. late_norm: normalises the joined
    patches instead of each one."""

    def __init__(self, config: PreTrainedConfig, ops: Ops, *, late_norm: bool) -> None:
        super().__init__()
        self.joined: int = config.hidden_size * config.spatial_merge_size**2
        self.late_norm = late_norm
        self.norm = LayerNorm(self.joined if late_norm else config.hidden_size, NORM_EPS, ops)
        self.linear_fc1 = TowerLinear(self.joined, self.joined, ops)
        self.linear_fc2 = TowerLinear(self.joined, config.out_hidden_size, ops)
        self.act = Gelu()

    def forward(self, x: Tensor) -> Tensor:
        """[P / merge_size ** 2, H] of patches [P, C]."""
        normed, _ = self.norm(x.reshape(-1, self.joined) if self.late_norm else x)
        return self.linear_fc2(activated(self.linear_fc1, normed.reshape(-1, self.joined), self.act))


class OmniMerger(nn.Module):
    """The same with Qwen3-Omni's names; `mlp.1`, the activation, has no weights."""

    def __init__(self, config: PreTrainedConfig, ops: Ops, *, late_norm: bool) -> None:
        super().__init__()
        self.joined: int = config.hidden_size * config.spatial_merge_size**2
        self.late_norm = late_norm
        self.ln_q = LayerNorm(self.joined if late_norm else config.hidden_size, NORM_EPS, ops)
        first = TowerLinear(self.joined, self.joined, ops)
        self.mlp = nn.Sequential(first, nn.GELU(), TowerLinear(self.joined, config.out_hidden_size, ops))

    def forward(self, x: Tensor) -> Tensor:
        """[P / merge_size ** 2, H] of patches [P, C]."""
        normed, _ = self.ln_q(x.reshape(-1, self.joined) if self.late_norm else x)
        first, act, second = self.mlp
        rows: Tensor = second(activated(first, normed.reshape(-1, self.joined), act))
        return rows


class VisionTower(BlockStack):
    """What both families share; they name the mergers of the deepstack levels."""

    part = "vision"

    def __init__(self, config: PreTrainedConfig, ops: Ops, merger: type[VLMerger] | type[OmniMerger]) -> None:
        super().__init__()
        if not isinstance(config.patch_size, int) or not isinstance(config.temporal_patch_size, int):
            raise UnsupportedError(f"{config.model_type}: patch_size {config.patch_size}; patches must be squares")
        self.initializer_range: float = config.initializer_range
        self.merge_size: int = config.spatial_merge_size
        self.patch_dim: int = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self.side = int(config.num_position_embeddings**0.5)
        if self.side**2 != config.num_position_embeddings:
            raise ConfigError(f"num_position_embeddings {config.num_position_embeddings} is no square")
        self.rope = RopeSpec.of_vision(config)
        self.deepstack_indexes = tuple(config.deepstack_visual_indexes)
        if any(not 0 <= index < config.depth for index in self.deepstack_indexes):
            raise ConfigError(f"deepstack_visual_indexes {self.deepstack_indexes} of a tower of depth {config.depth}")
        self.patch_embed = PatchEmbed(config, ops)
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(VisionBlock(config, ops) for _ in range(config.depth))
        self.merger = merger(config, ops, late_norm=False)

    def deepstack_mergers(self) -> nn.ModuleList:
        """One per level, in the order of `deepstack_visual_indexes`."""
        raise NotImplementedError

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(rows [P / merge_size ** 2, H], per deepstack level the same shape) of patches [P, patch_dim] and the grids
        (t, h, w) of the pieces."""
        if sum(t * h * w for t, h, w in grids) != len(patches):
            raise ValueError(f"{len(patches)} patches for grids {list(grids)}")
        segments = Segments.from_lengths([h * w for t, h, w in grids for _ in range(t)], patches.device)
        rope = self._rope(grids, patches.device)
        hidden = self.patch_embed(patches)
        hidden = hidden + self._positions(grids).to(hidden.dtype)
        levels: dict[int, Tensor] = {}
        mergers = self.deepstack_mergers()
        for number, block in enumerate(self.blocks):
            hidden = self.run_block(block, hidden, rope, segments)
            if number in self.deepstack_indexes:
                level = self.deepstack_indexes.index(number)
                levels[level] = mergers[level](hidden)
        # by depth, which is the order of the text layers that they go to
        return self.merger(hidden), tuple(levels.values())

    def dummy(self, device: torch.device) -> tuple[Tensor, list[Grid]]:
        """(patches of zeros, grids): the smallest picture. device: that computes, which may not be that of the weights
        before the tower runs."""
        grid = (1, self.merge_size, self.merge_size)
        return torch.zeros(self.merge_size**2, self.patch_dim, device=device), [grid]

    def _merged_order(self, grid: Tensor) -> Tensor:
        """[h * w, ...] of [h, w, ...], the patches of one merged patch beside one another."""
        height, width, merge = grid.shape[0], grid.shape[1], self.merge_size
        blocks = grid.unflatten(1, (width // merge, merge)).unflatten(0, (height // merge, merge))
        return blocks.transpose(1, 2).flatten(0, 3)

    def _rope(self, grids: Sequence[Grid], device: torch.device) -> RotaryTable:
        places = {}
        for _, height, width in grids:
            if (height, width) not in places:
                rows = torch.arange(height, device=device)[:, None].expand(height, width)
                columns = torch.arange(width, device=device)[None, :].expand(height, width)
                places[height, width] = self._merged_order(torch.stack([rows, columns], -1))
        both = torch.cat([places[h, w].repeat(t, 1) for t, h, w in grids])
        return vision_table(both[:, 0], both[:, 1], self.rope)

    def _positions(self, grids: Sequence[Grid]) -> Tensor:
        """float32 [P, C]: the learned square of positions, stretched over each picture by bilinear interpolation whose
        corners meet. As two products, because a gather of four rows per patch sums its gradient in no fixed order."""
        square = self.pos_embed.weight.float().view(self.side, self.side, -1)
        stretched: dict[tuple[int, int], Tensor] = {}
        for _, height, width in grids:
            if (height, width) not in stretched:
                down = _stretch(self.side, height, square.device)
                across = _stretch(self.side, width, square.device)
                full = torch.einsum("hi,ijc->hjc", down, square)
                stretched[height, width] = self._merged_order(torch.einsum("wj,hjc->hwc", across, full))
        return torch.cat([stretched[h, w].repeat(t, 1) for t, h, w in grids])


def _stretch(side: int, size: int, device: torch.device) -> Tensor:
    """float32 [size, side]: the weights of the `side` points for each of `size` evenly spaced places from the first
    point to the last."""
    places = torch.arange(size, dtype=torch.float32, device=device) * (side - 1) / max(size - 1, 1)
    points = torch.arange(side, dtype=torch.float32, device=device)
    return (1 - (places[:, None] - points).abs()).clamp(min=0)


class VLVisionTower(VisionTower):
    """Names of Qwen3-VL."""

    def __init__(self, config: PreTrainedConfig, ops: Ops) -> None:
        super().__init__(config, ops, VLMerger)
        self.deepstack_merger_list = nn.ModuleList(
            VLMerger(config, ops, late_norm=True) for _ in self.deepstack_indexes
        )

    def deepstack_mergers(self) -> nn.ModuleList:
        return self.deepstack_merger_list


class OmniVisionTower(VisionTower):
    """Names of Qwen3-Omni."""

    def __init__(self, config: PreTrainedConfig, ops: Ops) -> None:
        super().__init__(config, ops, OmniMerger)
        self.merger_list = nn.ModuleList(OmniMerger(config, ops, late_norm=True) for _ in self.deepstack_indexes)

    def deepstack_mergers(self) -> nn.ModuleList:
        return self.merger_list
