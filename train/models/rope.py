"""Rotary tables, computed from the config at every forward pass: no buffer that could be left uninitialised.

Text: RoPE (Su et al. 2021), and its multimodal form, in which each frequency turns with the position on one of three
axes (time, height, width), interleaved as in Qwen3-VL. Vision: half of the frequencies turn with the row of the patch,
half with its column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from schemas.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DEFAULT_SECTIONS = (24, 20, 20)  # what transformers takes where the config of a multimodal text model has none
VISION_THETA = 10000.0


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """cos, sin: float32 [rows, R], R = half of the head's dimensions. One object, because FSDP's mixed precision casts
    bare tensors given to a block."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class RopeSpec:
    """theta: base of the frequencies; head_dim: dimensions that turn; sections: frequencies of (time, height, width)
    for multimodal RoPE, None for plain."""

    theta: float
    head_dim: int
    sections: tuple[int, int, int] | None = None

    @classmethod
    def of_text(cls, config: PreTrainedConfig, *, multimodal: bool) -> RopeSpec:
        """Of a text config with `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` beside it.

        UnsupportedError for other types than plain RoPE, and for sections that are not interleaved.
        """
        parameters = _parameters(config)
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind not in ("default", "mrope"):
            raise UnsupportedError(f"{config.model_type}: rope_type {kind!r}; the native models know 'default' only")
        if parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedError(f"{config.model_type}: partial_rotary_factor; Qwen3 turns whole heads")
        theta = parameters.get("rope_theta", getattr(config, "rope_theta", None))
        if theta is None:
            raise ConfigError(f"{config.model_type}: neither rope_parameters nor the config has rope_theta")
        sections = None
        if multimodal:
            if parameters.get("mrope_interleaved", parameters.get("interleaved", True)) is not True:
                raise UnsupportedError(f"{config.model_type}: mrope_interleaved is false; Qwen3's sections interleave")
            time, height, width = parameters.get("mrope_section", DEFAULT_SECTIONS)
            sections = (time, height, width)
        return cls(float(theta), head_dim_of(config), sections)

    @classmethod
    def of_vision(cls, config: PreTrainedConfig) -> RopeSpec:
        """Of a vision config; UnsupportedError for other types than the axial one."""
        parameters = _parameters(config)
        kind = parameters.get("rope_type", "axial")
        if kind not in ("axial", "default"):
            raise UnsupportedError(f"{config.model_type}: rope_type {kind!r}; the vision towers know 'axial' only")
        head_dim = config.hidden_size // config.num_heads
        if head_dim % 4:
            raise ConfigError(f"{config.model_type}: vision heads of {head_dim} dimensions; RoPE needs a multiple of 4")
        return cls(float(parameters.get("rope_theta", VISION_THETA)), head_dim)


def head_dim_of(config: PreTrainedConfig) -> int:
    """Of a text config: its own, or hidden size / heads."""
    found: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return found


def _parameters(config: PreTrainedConfig) -> Mapping[str, Any]:
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if any(isinstance(value, Mapping) for value in found.values()):
        raise UnsupportedError(f"{config.model_type}: rope_parameters per layer type {sorted(found)}")
    parameters: Mapping[str, Any] = found
    return parameters


def frequencies(theta: float, dim: int, device: torch.device) -> Tensor:
    """float32 [dim / 2]: theta ** (-2i / dim), made on the CPU, so that every device has the same ones."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    return to_device(1.0 / theta**exponents, device)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """values of the CPU on a device, without waiting for it."""
    if device.type == "cuda":
        values = values.pin_memory()  # a copy from pageable memory would wait
    return values.to(device, non_blocking=True)


def text_table(position_ids: Tensor, spec: RopeSpec) -> RotaryTable:
    """Of position_ids [3, S]; plain RoPE takes the first axis."""
    inverse = frequencies(spec.theta, spec.head_dim, position_ids.device)
    angles = position_ids[0].float()[:, None] * inverse
    if spec.sections is not None:
        for axis in (1, 2):  # every third frequency from 1 and 2 on, as many as the section has
            columns = slice(axis, 3 * spec.sections[axis], 3)
            angles[:, columns] = position_ids[axis].float()[:, None] * inverse[columns]
    return RotaryTable(angles.cos(), angles.sin())


def vision_table(rows: Tensor, columns: Tensor, spec: RopeSpec) -> RotaryTable:
    """Of patches at these places (int64 [P] each) of their picture, counted in patches."""
    inverse = frequencies(spec.theta, spec.head_dim // 2, rows.device)
    angles = torch.cat([rows.float()[:, None] * inverse, columns.float()[:, None] * inverse], -1)
    return RotaryTable(angles.cos(), angles.sin())
