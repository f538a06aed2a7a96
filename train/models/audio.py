"""The audio tower of Qwen3-Omni: convolutions over one second at a time, then attention within windows.

Each second of log-mel frames is convolved by itself, a shorter last one padded with zeros to the whole second, so that
a sound gives the same rows alone and beside others; positions count from each second's start. A sound may therefore
come in pieces cut at the windows of attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from schemas.errors import ConfigError, UnsupportedError
from schemas.geometry import MEL_WINDOW, TOKENS_PER_WINDOW
from train.models.checkpointing import BlockStack
from train.models.layer_norm import LayerNorm
from train.models.linear import TowerLinear, activated, activation
from train.models.rope import to_device
from train.ops.registry import Ops
from train.ops.segments import Segments

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NORM_EPS = 1e-5
LONGEST_PERIOD = 10000.0  # of the sinusoids


def halved(size: int) -> int:
    """Places after a convolution of stride 2 and width 3, padded by one."""
    return (size - 1) // 2 + 1


def tokens_of(num_mel: int) -> int:
    """Rows that the tower makes of a sound of so many log-mel frames."""
    whole, rest = divmod(num_mel, MEL_WINDOW)
    return whole * TOKENS_PER_WINDOW + (halved(halved(halved(rest))) if rest else 0)


class AudioAttention(nn.Module):
    """Full attention within each window."""

    def __init__(self, config: PreTrainedConfig, ops: Ops) -> None:
        super().__init__()
        width = config.d_model
        self.heads: int = config.encoder_attention_heads
        if width % self.heads:
            raise ConfigError(f"audio_config: d_model {width} is no multiple of {self.heads} heads")
        self.q_proj = TowerLinear(width, width, ops)
        self.k_proj = TowerLinear(width, width, ops)
        self.v_proj = TowerLinear(width, width, ops)
        self.out_proj = TowerLinear(width, width, ops)
        self.attention: Callable[..., Tensor] = ops.attention

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        """[m, C] of rows [m, C]."""
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)) for part in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(self.attention(q, k, v, segments, causal=False).flatten(-2))


class AudioBlock(nn.Module):
    """One layer."""

    def __init__(self, config: PreTrainedConfig, ops: Ops) -> None:
        super().__init__()
        self.self_attn_layer_norm = LayerNorm(config.d_model, NORM_EPS, ops)
        self.self_attn = AudioAttention(config, ops)
        self.final_layer_norm = LayerNorm(config.d_model, NORM_EPS, ops)
        self.fc1 = TowerLinear(config.d_model, config.encoder_ffn_dim, ops)
        self.fc2 = TowerLinear(config.encoder_ffn_dim, config.d_model, ops)
        self.act = activation(config.activation_function, "audio_config")

    def forward(self, hidden: Tensor, segments: Segments) -> Tensor:
        """[m, C] of rows [m, C]."""
        normed, hidden = self.self_attn_layer_norm(hidden)
        normed, hidden = self.final_layer_norm(self.self_attn(normed, segments), hidden)
        return hidden + self.fc2(activated(self.fc1, normed, self.act))


class AudioTower(BlockStack):
    """Log-mel frames -> rows of the text model."""

    part = "audio"

    def __init__(self, config: PreTrainedConfig, ops: Ops) -> None:
        super().__init__()
        _check(config)
        width, channels = config.d_model, config.downsample_hidden_size
        self.initializer_range: float = config.initializer_range
        self.num_mel: int = config.num_mel_bins
        self.window_tokens = config.n_window_infer // MEL_WINDOW * TOKENS_PER_WINDOW
        self.chunks_at_once: int = config.conv_chunksize
        self.conv2d1 = nn.Conv2d(1, channels, 3, 2, padding=1)
        self.conv2d2 = nn.Conv2d(channels, channels, 3, 2, padding=1)
        self.conv2d3 = nn.Conv2d(channels, channels, 3, 2, padding=1)
        self.conv_out = nn.Linear(channels * halved(halved(halved(self.num_mel))), width, bias=False)
        self.layers = nn.ModuleList(AudioBlock(config, ops) for _ in range(config.encoder_layers))
        self.ln_post = LayerNorm(width, NORM_EPS, ops)
        self.proj1 = TowerLinear(width, width, ops)
        self.act = activation(config.activation_function, "audio_config")
        self.proj2 = TowerLinear(width, config.output_dim, ops)

    def forward(self, mel: Tensor, lengths: Sequence[int]) -> Tensor:
        """[m, H] of log-mel [num_mel, M] whose pieces have these lengths; the rows of each piece follow one another,
        `tokens_of` many."""
        if sum(lengths) != mel.shape[1]:
            raise ValueError(f"{mel.shape[1]} log-mel frames for pieces of {list(lengths)}")
        padded = [F.pad(piece, (0, -piece.shape[1] % MEL_WINDOW)) for piece in mel.split(list(lengths), 1)]
        chunks = torch.cat(padded, 1).unflatten(1, (-1, MEL_WINDOW)).transpose(0, 1)[:, None]
        made = [self.run_block(self._convolve, part) for part in chunks.split(self.chunks_at_once)]
        rows = torch.cat(made)
        rows = rows + sinusoids(TOKENS_PER_WINDOW, rows.shape[-1], rows.device).to(rows.dtype)
        hidden = _without_padding(rows.flatten(0, 1), lengths)
        segments = Segments.from_lengths(self._windows(lengths), mel.device)
        for block in self.layers:
            hidden = self.run_block(block, hidden, segments)
        normed, _ = self.ln_post(hidden)
        out: Tensor = self.proj2(activated(self.proj1, normed, self.act))
        return out

    def dummy(self, device: torch.device) -> tuple[Tensor, list[int]]:
        """(log-mel of zeros, lengths): the shortest sound that fills a chunk."""
        return torch.zeros(self.num_mel, MEL_WINDOW, device=device), [MEL_WINDOW]

    def _convolve(self, chunks: Tensor) -> Tensor:
        """[chunks, 13, C] of [chunks, 1, num_mel, 100]."""
        hidden = chunks.to(self.conv2d1.weight.dtype)
        for convolution in (self.conv2d1, self.conv2d2, self.conv2d3):
            hidden = F.gelu(convolution(hidden))
        rows: Tensor = self.conv_out(hidden.permute(0, 3, 1, 2).flatten(2))
        return rows

    def _windows(self, lengths: Sequence[int]) -> list[int]:
        """Rows of each window of attention."""
        windows = []
        for length in lengths:
            whole, rest = divmod(tokens_of(length), self.window_tokens)
            windows += [self.window_tokens] * whole + [rest] * bool(rest)
        return windows


def _without_padding(rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """Of 13 rows for each begun second of each piece, those that stand for sound."""
    kept, start = [], 0
    for length in lengths:
        kept.append(rows[start : start + tokens_of(length)])
        start += -(-length // MEL_WINDOW) * TOKENS_PER_WINDOW
    return torch.cat(kept)


def sinusoids(length: int, width: int, device: torch.device) -> Tensor:
    """float32 [length, width]: sines of all periods, then cosines (Vaswani et al. 2017, as Whisper arranges them)."""
    step = math.log(LONGEST_PERIOD) / (width // 2 - 1)
    rates = torch.exp(-step * torch.arange(width // 2, dtype=torch.float32, device="cpu"))
    angles = torch.arange(length, device="cpu")[:, None] * rates
    return to_device(torch.cat([angles.sin(), angles.cos()], 1), device)


def _check(config: PreTrainedConfig) -> None:
    """UnsupportedError for a tower that the data path does not cut and count sounds for."""
    if 2 * config.n_window != MEL_WINDOW or config.n_window_infer < MEL_WINDOW or config.n_window_infer % MEL_WINDOW:
        raise UnsupportedError(
            f"audio_config: n_window {config.n_window} and n_window_infer {config.n_window_infer}; convolutions take "
            f"{MEL_WINDOW} frames (n_window {MEL_WINDOW // 2}), and attention whole multiples of that"
        )
    if config.d_model % 2:
        raise ConfigError(f"audio_config: d_model {config.d_model} must be even")
