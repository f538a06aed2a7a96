"""Seeded inputs of every kind that a family takes, as ours and as arguments for transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig

from schemas.errors import ConfigError
from schemas.wording import known_names
from train.models.audio import tokens_of
from train.models.inputs import Grid, ModelInputs
from train.models.spec import ModelSpec
from train.ops.segments import Segments

TEXT_TOKENS = 11  # before, between and after media
IMAGES: tuple[Grid, ...] = ((1, 2, 3), (1, 4, 2))  # in merged patches
VIDEOS: tuple[Grid, ...] = ((3, 2, 2),)
SOUNDS = (931, 100, 37)  # log-mel frames: over a window of attention (800 in released models), a second, less
GRID_STEP = 6.5  # positions between the grids of a video, where they are positions of time and may be fractions
KINDS = ("text", "image", "video", "audio")


@dataclass(frozen=True)
class Case:
    """One document. arguments: of the forward call in transformers, which has a batch dimension of 1."""

    kind: str
    inputs: ModelInputs
    arguments: dict[str, Tensor]


def kinds_of(spec: ModelSpec) -> tuple[str, ...]:
    """The kinds of input that a family takes."""
    vision, audio = spec.names.visual is not None, spec.names.audio is not None
    return ("text", *(("image", "video") if vision else ()), *(("audio",) if audio else ()))


def make_case(
    kind: str, spec: ModelSpec, config: PreTrainedConfig, seed: int, device: torch.device | str = "cpu"
) -> Case:
    """Random tokens with random media between them. ConfigError: a kind that the family does not take."""
    if kind not in kinds_of(spec):
        raise ConfigError(f"a {spec.family} takes no input of the kind {kind!r}{known_names(kind, kinds_of(spec))}")
    row = _Row(config, spec, seed)
    row.text()
    if kind in ("image", "video"):
        for grid in IMAGES if kind == "image" else VIDEOS:
            row.vision(grid, video=kind == "video")
            row.text()
    if kind == "audio":
        for frames in SOUNDS:
            row.sound(frames)
            row.text()
    return row.case(kind, torch.device(device))


@dataclass
class _Row:
    """A document while it grows."""

    config: PreTrainedConfig
    spec: ModelSpec
    seed: int
    ids: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    patches: list[Tensor] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    sounds: list[Tensor] = field(default_factory=list)
    media_rows: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        names = ("image_token_id", "video_token_id", "audio_token_id")
        special = {getattr(self.config, name, None) for name in names}
        vocab = self.config.get_text_config().vocab_size
        self.plain = torch.tensor([token for token in range(vocab) if token not in special])

    def text(self) -> None:
        chosen = torch.randint(0, len(self.plain), (TEXT_TOKENS,), generator=self.generator)
        steps = torch.arange(TEXT_TOKENS)
        self._add(self.plain[chosen], steps.expand(3, -1).double())

    def vision(self, grid: Grid, *, video: bool) -> None:
        """A picture or clip of so many merged patches."""
        config = self.config.vision_config
        t, h, w = grid
        merge = config.spatial_merge_size
        axes = torch.meshgrid(*(torch.arange(size).double() for size in grid), indexing="ij")
        places = torch.stack([axis.flatten() for axis in axes])
        places[0] *= GRID_STEP if self.spec.names.audio is not None else 1
        token = self.config.video_token_id if video else self.config.image_token_id
        self._add(torch.full((t * h * w,), token), places, media=True)
        full = (t, h * merge, w * merge)
        width = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self.patches.append(torch.randn(math.prod(full), width, generator=self.generator))
        self.grids.append(full)

    def sound(self, frames: int) -> None:
        count = tokens_of(frames)
        self._add(torch.full((count,), self.config.audio_token_id), torch.arange(count).expand(3, -1).double(), True)
        self.sounds.append(torch.randn(self.config.audio_config.num_mel_bins, frames, generator=self.generator))

    def case(self, kind: str, device: torch.device) -> Case:
        ids = torch.cat(self.ids).to(device)
        positions = torch.cat(self.positions, 1)
        positions = (positions.float() if self.spec.names.audio is not None else positions.long()).to(device)
        rows = torch.cat(self.media_rows).to(device) if self.media_rows else None
        inputs = ModelInputs(
            ids=ids,
            position_ids=positions,
            segments=Segments.from_lengths([len(ids)], device),
            num_valid=len(ids),
            patches=torch.cat(self.patches).to(device) if self.patches else None,
            grids=self.grids,
            mel=torch.cat(self.sounds, 1).to(device) if self.sounds else None,
            mel_lengths=[sound.shape[1] for sound in self.sounds],
            vision_rows=rows if self.grids else None,
            audio_rows=rows if self.sounds else None,
        )
        return Case(kind, inputs, self._arguments(kind, inputs))

    def _arguments(self, kind: str, inputs: ModelInputs) -> dict[str, Tensor]:
        """transformers takes a first axis of text positions before the other three."""
        steps = torch.arange(len(inputs.ids), device=inputs.ids.device)
        found = {"input_ids": inputs.ids[None], "position_ids": steps[None]}
        if self.spec.names.visual is not None:
            every = torch.cat([steps[None].to(inputs.position_ids.dtype), inputs.position_ids])
            found["position_ids"] = every[:, None]
        if inputs.patches is not None:
            suffix = "_videos" if kind == "video" else ""
            found[f"pixel_values{suffix}"] = inputs.patches
            found[f"{kind}_grid_thw"] = torch.tensor(self.grids, device=inputs.ids.device)
        if self.sounds:
            frames = pad_sequence([sound.T for sound in self.sounds], batch_first=True).transpose(1, 2)
            lengths = torch.tensor(inputs.mel_lengths)
            mask = torch.arange(frames.shape[-1]) < lengths[:, None]
            found["input_features"] = frames.to(inputs.ids.device)
            found["feature_attention_mask"] = mask.long().to(inputs.ids.device)
        return found

    def _add(self, ids: Tensor, steps: Tensor, media: bool = False) -> None:
        """Tokens at these positions behind the greatest so far."""
        start = sum(len(part) for part in self.ids)
        base = float(self.positions[-1].max()) + 1 if self.positions else 0.0
        if media:
            self.media_rows.append(torch.arange(start, start + len(ids)))
        self.ids.append(ids)
        self.positions.append(base + steps)
