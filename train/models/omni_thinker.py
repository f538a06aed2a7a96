"""The thinker of Qwen3-Omni: text with experts, pictures and sound."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from train.models.audio import AudioTower
from train.models.foundation import FoundationModel
from train.models.inputs import MediaEmbeddings, ModelInputs
from train.models.text import TextModel
from train.models.vision import OmniVisionTower
from train.models.vl import encode_vision, zero_of
from train.ops.registry import Ops

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class OmniThinker(FoundationModel):
    """`Qwen3OmniMoeThinkerForConditionalGeneration`: parameters `audio_tower.*`, `visual.*`, `model.*` and, unless
    tied, `lm_head`: the hub's names without `thinker.`."""

    def __init__(self, config: PreTrainedConfig, ops: Ops) -> None:
        super().__init__(config, config.text_config, ops, tied=config.tie_word_embeddings)
        self.audio_tower = AudioTower(config.audio_config, ops)
        self.visual = OmniVisionTower(config.vision_config, ops)
        self.model = TextModel(config.text_config, ops, multimodal=True)

    @property
    def text(self) -> TextModel:
        return self.model

    def encode(self, inputs: ModelInputs) -> MediaEmbeddings:
        # vision first: a GPU works long on few kernels, behind which the many short ones of sound are launched, also in
        # the backward pass, which vision ends
        found = encode_vision(self.visual, inputs)
        audio = zero = None
        if inputs.mel_lengths and inputs.mel is not None:
            audio = self.audio_tower(inputs.mel, inputs.mel_lengths)
        elif inputs.dummy_audio:
            zero = zero_of(self.audio_tower(*self.audio_tower.dummy(inputs.ids.device)))
        if zero is not None and found.zero is not None:
            zero = found.zero + zero
        return replace(found, audio=audio, zero=found.zero if zero is None else zero)
