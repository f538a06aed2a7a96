"""One micro-batch on its way to the model."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from train.data.route import MediaRoute


@dataclass(frozen=True)
class BatchPlace:
    """Which micro-batch it is: `micro` counts those of this rank within the step."""

    epoch: int
    step: int
    micro: int


@dataclass(frozen=True)
class DeadSample:
    """A row that could not be read, and trains on zeros without labels."""

    source: str
    key: str
    reason: str


@dataclass(frozen=True)
class VisionPixels:
    """Pictures of one vision piece, inside `Batch.pixels`: uint8 [frames, height, width, 3] from `start` on. is_image:
    a standalone image; grid: (t, h, w) of the piece in patches; size: (height, width) that the model sees."""

    is_image: bool
    start: int
    shape: tuple[int, int, int, int]
    grid: tuple[int, int, int]
    size: tuple[int, int]


@dataclass(frozen=True)
class SoundSamples:
    """The whole sound that an audio piece is a part of, inside `Batch.sound`: int16 [samples] from `start` on.
    mel_start, mel_stop: log-mel frames of the piece."""

    start: int
    samples: int
    mel_start: int
    mel_stop: int


@dataclass(frozen=True)
class MediaFeatures:
    """What the towers of this rank take, made on the device.

    patches: [P, channels * temporal_patch * patch_size ** 2], piece after piece; grids: (t, h, w) of each vision piece;
    mel: [num_mel, M], piece after piece; mel_lengths: frames of each audio piece, adding up to M. Patches and mel are
    float32, or of the dtype that the model computes in.
    """

    patches: torch.Tensor
    grids: list[tuple[int, int, int]]
    mel: torch.Tensor
    mel_lengths: list[int]


@dataclass(frozen=True)
class Batch:
    """Samples packed into one sequence of `length` tokens, the pad tail included; under sequence parallelism this
    rank's slice of it, of S = length / sp_size tokens (S = length without).

    ids, labels: int64 [1, S]; labels are shifted inside each sample: the label of a token is the next one, and that of
    a sample's last is -100; position_ids: [3, 1, S], float32 or int64;
    cu_seqlens: int32 [segments + 1] of the FULL sequence, from 0 to `length`; the last segment is the pad tail when
    num_pad > 0; max_seqlen: longest segment; num_pad: tokens of the tail;
    sources, keys: name of the source and id of the row, per sample; sample_tokens, label_tokens: int64 [samples],
    tokens and (shifted) labels of each whole sample; modality_tokens: tokens of text, video, audio and image;
    route: who encodes what; pixels: uint8 [bytes], sound: int16 [samples], of this rank's pieces only;
    vision, audio: where those of each piece lie; features: None until they are made on the device;
    extra: what a model's own collate entries added; label_rows: int64 [n], rows of this slice that have a label.
    """

    place: BatchPlace
    ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    length: int
    max_seqlen: int
    num_pad: int
    sources: list[str]
    keys: list[str]
    sample_tokens: torch.Tensor
    label_tokens: torch.Tensor
    modality_tokens: dict[str, int]
    route: MediaRoute
    pixels: torch.Tensor
    sound: torch.Tensor
    vision: list[VisionPixels]
    audio: list[SoundSamples]
    features: MediaFeatures | None = None
    dead: list[DeadSample] = field(default_factory=list)
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    label_rows: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by field name, `extra.<name>` for those of a model."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        named = {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}
        return named | {f"extra.{name}": value for name, value in self.extra.items()}

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory."""
        return self._replaced({name: tensor.pin_memory() for name, tensor in self.tensors().items()})

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on a device; the copies do not wait. Counts stay on the CPU."""
        stay = {"sample_tokens", "label_tokens"}
        moved = {n: t if n in stay else t.to(device, non_blocking=True) for n, t in self.tensors().items()}
        return self._replaced(moved)

    def owned(self) -> Batch:
        """The same batch in this process's own memory: what a worker sent holds a file descriptor per tensor."""
        return self._replaced({name: t.clone() if t.is_shared() else t for name, t in self.tensors().items()})

    def _replaced(self, tensors: dict[str, torch.Tensor]) -> Batch:
        own: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if not name.startswith("extra.")}
        extra = {name.removeprefix("extra."): t for name, t in tensors.items() if name.startswith("extra.")}
        return replace(self, **own, extra=extra)
