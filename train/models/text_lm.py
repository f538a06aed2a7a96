"""Qwen3 language models without towers, dense and with experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.models.foundation import FoundationModel
from train.models.text import TextModel
from train.ops.registry import Ops

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Qwen3LM(FoundationModel):
    """`Qwen3ForCausalLM` and `Qwen3MoeForCausalLM`: parameters `model.*` and, unless tied, `lm_head`."""

    def __init__(self, config: PreTrainedConfig, ops: Ops) -> None:
        super().__init__(config, config, ops, tied=config.tie_word_embeddings)
        self.model = TextModel(config, ops, multimodal=False)

    @property
    def text(self) -> TextModel:
        return self.model
