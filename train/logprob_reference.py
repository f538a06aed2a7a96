"""The model of transformers as a reference for log-probabilities: one sample in a call, whole, not packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

from schemas.geometry import MEL_WINDOW, TOKENS_PER_WINDOW
from train.config import ModelConfig
from train.data.batch import Batch, MediaFeatures
from train.data.route import Tower
from train.data.sample import IGNORE
from train.models.compare import load_reference
from train.models.frozen_audio import PREFIX
from train.models.inputs import Grid
from train.models.loading import assign_whole, load, open_part
from train.models.spec import read_model

HEAD_ROWS = 1024  # rows whose probabilities are in float32 at a time


@dataclass(frozen=True)
class SampleRow:
    """One sample of a micro-batch. start: of its rows; labels: shifted; position_ids: [3, L]; images, videos: (patches,
    grid) of each; sounds: log-mel [num_mel, frames] of each; all in the order of their tokens."""

    start: int
    ids: Tensor
    labels: Tensor
    position_ids: Tensor
    images: list[tuple[Tensor, Grid]]
    videos: list[tuple[Tensor, Grid]]
    sounds: list[Tensor]


def sample_rows(batch: Batch, features: MediaFeatures) -> Iterator[SampleRow]:
    """The samples of a micro-batch that is not sliced, apart again. A unit is whole there: one piece."""
    patches = features.patches.split([prod(grid) for grid in features.grids])
    sounds = features.mel.split(features.mel_lengths, 1)
    seen = [piece.sample for piece in batch.route.pieces if piece.tower == "vision"]
    heard = [piece.sample for piece in batch.route.pieces if piece.tower == "audio"]
    pictures = list(zip(seen, batch.vision, patches, features.grids, strict=True))
    start = 0
    for number, length in enumerate(batch.sample_tokens.tolist()):
        here = slice(start, start + length)
        yield SampleRow(
            start=start,
            ids=batch.ids[0, here],
            labels=batch.labels[0, here],
            position_ids=batch.position_ids[:, 0, here],
            images=[(rows, grid) for owner, found, rows, grid in pictures if owner == number and found.is_image],
            videos=[(rows, grid) for owner, found, rows, grid in pictures if owner == number and not found.is_image],
            sounds=[sound for owner, sound in zip(heard, sounds, strict=True) if owner == number],
        )
        start += length


@dataclass(frozen=True, eq=False)
class Reference:
    """model: of transformers; sees: it has a vision tower, and takes a first axis of text positions before time, height
    and width; hearing: an audio tower beside a model without one, whose rows stand where audio_token does."""

    model: nn.Module
    sees: bool
    hearing: nn.Module | None = None
    audio_token: int = -1

    @classmethod
    def load(cls, config: ModelConfig, folder: Path, dtype: torch.dtype, device: torch.device) -> Reference:
        """What `model` of a configuration names, from the files. VerificationError: transformers misses a tensor."""
        if config.backend == "transformers":
            model: nn.Module = AutoModelForCausalLM.from_pretrained(
                str(folder),
                dtype=dtype,
                attn_implementation="sdpa",
                local_files_only=True,
                trust_remote_code=config.trust_remote_code,
            )
            return cls(model.to(device).eval(), sees=False)
        source = read_model(folder)
        model, sees = load_reference(source, dtype, device), source.spec.names.visual is not None
        if config.audio_tower_path is None:
            found = cls(model, sees)
        else:
            beside = Path(config.audio_tower_path)
            token = int(read_model(beside).config.audio_token_id)
            found = cls(model, sees, load_hearing(beside, dtype, device), token)
        if (tower := found.towers().get("audio")) is not None:
            hear_whole_seconds(tower)
        return found

    def towers(self) -> dict[Tower, nn.Module]:
        """By kind."""
        ends: dict[str, Tower] = {"visual": "vision", "audio_tower": "audio"}
        modules = [(name.rpartition(".")[2], module) for name, module in self.model.named_modules()]
        found = {ends[name]: module for name, module in modules if name in ends}
        return found if self.hearing is None else {**found, "audio": self.hearing}

    def losses(self, row: SampleRow) -> Tensor:
        """float32 [L], minus the log-probability of each label, 0 without one."""
        logits: Tensor = self.model(**self._arguments(row), use_cache=False).logits[0]
        parts = zip(logits.split(HEAD_ROWS), row.labels.split(HEAD_ROWS), strict=True)
        return torch.cat([F.cross_entropy(x.float(), t, ignore_index=IGNORE, reduction="none") for x, t in parts])

    def _arguments(self, row: SampleRow) -> dict[str, Tensor]:
        """Of the forward call."""
        device = row.ids.device
        steps = torch.arange(len(row.ids), device=device)
        found = {"input_ids": row.ids[None], "position_ids": steps[None]}
        if self.sees:
            every = torch.cat([steps[None].to(row.position_ids.dtype), row.position_ids])
            found["position_ids"] = every[:, None]
        for kind, suffix, pictures in (("image", "", row.images), ("video", "_videos", row.videos)):
            if pictures:
                found[f"pixel_values{suffix}"] = torch.cat([patches for patches, _ in pictures])
                found[f"{kind}_grid_thw"] = torch.tensor([grid for _, grid in pictures], device=device)
        if not row.sounds:
            return found
        if self.hearing is not None:
            found["inputs_embeds"] = self._heard(self.hearing, found.pop("input_ids"), row.sounds)
            return found
        lengths = torch.tensor([sound.shape[1] for sound in row.sounds])
        found["input_features"] = pad_sequence([sound.T for sound in row.sounds], batch_first=True).transpose(1, 2)
        found["feature_attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long().to(device)
        return found

    def _heard(self, hearing: nn.Module, ids: Tensor, sounds: Sequence[Tensor]) -> Tensor:
        """[1, L, H], the embeddings of a sample with its sounds in."""
        lengths = torch.tensor([sound.shape[1] for sound in sounds], device=ids.device)
        rows = hearing(torch.cat(list(sounds), 1), feature_lens=lengths).last_hidden_state
        embedded: Tensor = self.model.get_input_embeddings()(ids)  # type: ignore[operator]
        return embedded.masked_scatter((ids == self.audio_token)[..., None], rows.to(embedded.dtype))


def load_hearing(folder: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """transformers' audio tower of a Qwen3-Omni, with its weights."""
    config = read_model(folder).config.audio_config
    tower: nn.Module = Qwen3OmniMoeAudioEncoder._from_config(config, attn_implementation="sdpa", dtype=dtype)
    shapes = {name: tuple(parameter.shape) for name, parameter in tower.named_parameters()}
    load(open_part(folder, PREFIX, shapes), assign_whole(tower))
    return tower.to(device).eval()


def hear_whole_seconds(tower: nn.Module) -> None:
    """Lets the audio tower of transformers hear a second of silence behind sounds that are all shorter than one.

    It pads each second of log-mel to the longest of the call, and its convolutions see how much: a sound of 0.3 s gives
    other rows alone than beside a longer one. What is trained, and what transformers itself gives in a longer batch, is
    padded to the whole second.
    """
    silence = _Silence()
    tower.register_forward_pre_hook(silence.before, with_kwargs=True)
    tower.register_forward_hook(silence.after)


class _Silence:
    """Hooks: one second more goes in, and its rows are taken away again."""

    def __init__(self) -> None:
        self._added = False

    def before(self, _tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        named = dict(zip(("input_features", "feature_lens"), args, strict=False)) | kwargs
        mel, lengths = named["input_features"], named["feature_lens"]
        self._added = int(lengths.max()) < MEL_WINDOW
        if self._added:
            named["input_features"] = F.pad(mel, (0, MEL_WINDOW))
            named["feature_lens"] = F.pad(lengths, (0, 1), value=MEL_WINDOW)
        return (), named

    def after(self, _tower: nn.Module, _args: Any, output: Any) -> Any:
        if self._added:
            for key, rows in output.items():
                output[key] = rows[:-TOKENS_PER_WINDOW]
        return output
