"""Qwen3-VL, dense and with experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from train.models.foundation import FoundationModel
from train.models.inputs import MediaEmbeddings, ModelInputs
from train.models.text import TextModel
from train.models.vision import VisionTower, VLVisionTower
from train.ops.registry import Ops

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def encode_vision(tower: VisionTower, inputs: ModelInputs) -> MediaEmbeddings:
    """Of the pictures of this rank, or of a dummy unit when asked for."""
    if inputs.grids and inputs.patches is not None:
        rows, deepstack = tower(inputs.patches, inputs.grids)
        return MediaEmbeddings(vision=rows, deepstack=deepstack)
    if not inputs.dummy_vision:
        return MediaEmbeddings()
    rows, deepstack = tower(*tower.dummy(inputs.ids.device))
    return MediaEmbeddings(zero=zero_of(rows, *deepstack))


def zero_of(*results: Tensor) -> Tensor:
    """float32 scalar 0 that depends on every one of them."""
    return torch.stack([result.float().sum() for result in results]).sum() * 0


class VLBody(nn.Module):
    """Holds tower and text model under their names."""

    def __init__(self, config: PreTrainedConfig, ops: Ops) -> None:
        super().__init__()
        self.visual = VLVisionTower(config.vision_config, ops)
        self.language_model = TextModel(config.text_config, ops, multimodal=True)


class Qwen3VL(FoundationModel):
    """`Qwen3VLForConditionalGeneration` and `Qwen3VLMoeForConditionalGeneration`: parameters `model.language_model.*`,
    `model.visual.*` and, unless tied, `lm_head`."""

    def __init__(self, config: PreTrainedConfig, ops: Ops) -> None:
        super().__init__(config, config.text_config, ops, tied=config.tie_word_embeddings)
        self.model = VLBody(config, ops)

    @property
    def text(self) -> TextModel:
        return self.model.language_model

    def encode(self, inputs: ModelInputs) -> MediaEmbeddings:
        return self.hear(inputs, encode_vision(self.model.visual, inputs))
