"""The audio tower of a Qwen3-Omni beside a model that has none: it fills the rows of sound and is never trained.

It is no module of the model, so optimizer, FSDP and checkpoints do not see it. Every rank has all of it, in the dtype
that is computed in, and runs it on its own pieces of sound alone: no rank waits for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from schemas.errors import ConfigError
from train.models.audio import AudioTower
from train.models.foundation import FoundationModel
from train.models.loading import assign_whole, load, open_part
from train.models.spec import read_model, spec_of
from train.ops.registry import Ops

PREFIX = "audio_tower."


class FrozenAudioTower:
    """Reads its weights when the first sound comes, onto the device where that is; what the files hold is checked when
    it is made.

    folder: a Qwen3-Omni, whole or its thinker; width: hidden size of the text model; dtype: of the weights in memory.
    ConfigError: another family, or rows of another width; IncompleteSourceError, UnsupportedError: the files lack
    tensors of the tower, or have others or other shapes.
    """

    def __init__(self, folder: Path, ops: Ops, width: int, dtype: torch.dtype) -> None:
        source = read_model(folder)
        audio = getattr(source.config, "audio_config", None)
        if audio is None:
            raise ConfigError(
                f"model.audio_tower_path: {source.path} is a {source.values['model_type']}, which has no audio tower; "
                "give the folder of a Qwen3-Omni"
            )
        if audio.output_dim != width:
            raise ConfigError(
                f"model.audio_tower_path: the tower of {source.path} makes rows of {audio.output_dim} numbers, the "
                f"text model takes {width}"
            )
        self.folder, self.audio_token_id = folder, int(source.config.audio_token_id)
        self.window_frames: int = audio.n_window_infer
        with torch.device("meta"):
            self.tower = AudioTower(audio, ops).to(dtype).requires_grad_(False).eval()
        shapes = {name: tuple(parameter.shape) for name, parameter in self.tower.named_parameters()}
        self._weights = open_part(folder, PREFIX, shapes)

    @property
    def loaded(self) -> bool:
        """Whether its weights are in memory."""
        return not self.tower.proj1.weight.is_meta

    @property
    def nbytes(self) -> int:
        """Of its weights in memory."""
        return sum(parameter.nbytes for parameter in self.tower.parameters())

    @torch.no_grad()
    def __call__(self, mel: Tensor, lengths: Sequence[int]) -> Tensor:
        """[m, H], without gradient, of log-mel [num_mel, M] whose pieces have these lengths."""
        if not self.loaded:
            self.tower.to_empty(device=mel.device)
            load(self._weights, assign_whole(self.tower))
        rows: Tensor = self.tower(mel, lengths)
        return rows


def add_audio_tower(model: FoundationModel, folder: Path, ops: Ops, dtype: torch.dtype) -> None:
    """Gives a model without ears those of a Qwen3-Omni. ConfigError: it has its own, or no id for the rows of sound."""
    if spec_of(model).names.audio is not None:
        raise ConfigError(f"model.audio_tower_path: a {spec_of(model).family} has its own audio tower")
    text = model.config.get_text_config()
    tower = FrozenAudioTower(folder, ops, text.hidden_size, dtype)
    if tower.audio_token_id >= text.vocab_size:
        raise ConfigError(
            f"model.audio_tower_path: the audio_token_id {tower.audio_token_id} of {folder} lies beyond the "
            f"{text.vocab_size} tokens of the model"
        )
    model.frozen_audio = tower
