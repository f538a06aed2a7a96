"""Samples -> one packed micro-batch, and this rank's slice and media of it.

labels are shifted inside each sample, then everything is joined, padded and sliced by the table of
`DataCollateInfo`; the pad tail is a segment of its own; cu_seqlens are of the full sequence
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from schemas.errors import SchemaError
from train.data.batch import Batch, BatchPlace, DeadSample, SoundSamples, VisionPixels
from train.data.route import MediaPiece, MediaRoute, RouteSpec, make_route
from train.data.sample import IGNORE, TrainSample
from train.data.transform import decode_unit


@dataclass(frozen=True)
class DataCollateInfo:
    """How one key of the samples is packed.

    pack_dim: dimension along which samples are joined; sp_slice: each sequence-parallel rank gets its share of it;
    sp_pad_value: what fills it up, None = it is not padded; sp_pad_scale: rows that must stay together on one rank (a
    key with one entry per token is padded to the length of the sequence instead); per_token: it has one entry per
    token.
    """

    pack_dim: int = -1
    sp_slice: bool = False
    sp_pad_value: float | None = None
    sp_pad_scale: int = 1
    per_token: bool = True

    def __post_init__(self) -> None:
        if (self.sp_slice or self.per_token) and self.sp_pad_value is None:
            raise ValueError("a key that is sliced or has one entry per token needs an sp_pad_value")


COLLATE_INFO: dict[str, DataCollateInfo] = {
    "ids": DataCollateInfo(sp_slice=True, sp_pad_value=0),
    "labels": DataCollateInfo(sp_slice=True, sp_pad_value=IGNORE),
    "position_ids": DataCollateInfo(sp_slice=True, sp_pad_value=0),
}
MODALITIES = ("text", "video", "audio", "image")
ExtraArrays = Callable[[TrainSample], Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Collator:
    """Packs the samples of one micro-batch for one rank. Picklable when `extra_arrays` is.

    sp_rank, sp_size: of this rank; pad_multiple: the length of each rank's slice is a multiple of it; temporal_patch:
    frames per temporal grid; position_dtype: of the samples' position_ids; extra_arrays: what a model wants beside the
    table, with `extra_info` to pack it by.
    """

    sp_rank: int = 0
    sp_size: int = 1
    pad_multiple: int = 8
    temporal_patch: int = 2
    position_dtype: Literal["float32", "int64"] = "float32"
    route_spec: RouteSpec = field(default_factory=RouteSpec)
    extra_arrays: ExtraArrays | None = None
    extra_info: Mapping[str, DataCollateInfo] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if clash := sorted(COLLATE_INFO.keys() & self.extra_info.keys()):
            raise ValueError(f"extra collate entries {clash} stand in the common table")

    def layout(self, samples: Sequence[TrainSample]) -> tuple[int, MediaRoute]:
        """(tokens of the padded sequence, route), before anything is decoded."""
        unit = self.sp_size * self.pad_multiple
        length = max(1, math.ceil(sum(map(len, samples)) / unit)) * unit
        return length, make_route(samples, length, self.sp_rank, self.sp_size, self.route_spec)

    def __call__(self, samples: Sequence[TrainSample], place: BatchPlace, dead: Sequence[DeadSample] = ()) -> Batch:
        """The batch, with this rank's media decoded; no samples give a sequence of padding. DecodeError: a medium is
        not what its sample says."""
        length, route = self.layout(samples)
        tokens = [len(sample) for sample in samples]
        num_pad = length - sum(tokens)
        bounds = np.cumsum([0, *tokens, *([num_pad] if num_pad else [])])
        parts = samples or [self._nothing()]
        shifted = [shift_labels(sample.labels) for sample in parts]
        labels = self._pack("labels", shifted, length)
        pixels, vision = _decode_vision(route.pieces, samples, self.temporal_patch)
        sound, audio = _decode_sound(route.pieces, samples)
        return Batch(
            place=place,
            ids=self._pack("ids", [sample.ids for sample in parts], length)[None],
            labels=labels[None],
            position_ids=self._pack("position_ids", [sample.position_ids for sample in parts], length)[:, None],
            cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
            length=length,
            max_seqlen=int(np.diff(bounds).max()),
            num_pad=num_pad,
            sources=[sample.source for sample in samples],
            keys=[sample.key for sample in samples],
            sample_tokens=torch.tensor(tokens, dtype=torch.int64),
            label_tokens=torch.tensor([(labels != IGNORE).sum() for labels in shifted[: len(samples)]]).long(),
            modality_tokens={kind: sum(getattr(sample, f"num_{kind}") for sample in samples) for kind in MODALITIES},
            route=route,
            pixels=pixels,
            sound=sound,
            vision=vision,
            audio=audio,
            dead=list(dead),
            extra=self._extra(parts, length),
            label_rows=(labels != IGNORE).nonzero()[:, 0],
        )

    def _nothing(self) -> TrainSample:
        """A sample of no tokens: gives the arrays of an empty sequence their shapes."""
        none = np.zeros(0, np.int64)
        return TrainSample(none, none, np.zeros((3, 0), self.position_dtype), [], "", "", 0, 0)

    def _extra(self, samples: Sequence[TrainSample], length: int) -> dict[str, torch.Tensor]:
        if self.extra_arrays is None:
            return {}
        made = [self.extra_arrays(sample) for sample in samples]
        wrong = sorted({name for arrays in made for name in arrays.keys() ^ self.extra_info.keys()})
        if wrong:
            raise ValueError(f"extra arrays {wrong} are not those of extra_info {sorted(self.extra_info)}")
        return {name: self._pack(name, [arrays[name] for arrays in made], length) for name in self.extra_info}

    def _pack(self, name: str, parts: Sequence[np.ndarray], length: int) -> torch.Tensor:
        """Joined, padded and sliced, by the table."""
        info = COLLATE_INFO[name] if name in COLLATE_INFO else self.extra_info[name]
        joined = np.concatenate(parts, info.pack_dim)
        if info.sp_pad_value is not None:
            unit = self.sp_size * info.sp_pad_scale
            size = joined.shape[info.pack_dim]
            whole = length if info.per_token else math.ceil(size / unit) * unit
            if size > whole:
                raise ValueError(f"{name} has {size} entries for a sequence of {whole} tokens")
            shape = list(joined.shape)
            shape[info.pack_dim] = whole - size
            joined = np.concatenate([joined, np.full(shape, info.sp_pad_value, joined.dtype)], info.pack_dim)
        if info.sp_slice:
            joined = np.split(joined, self.sp_size, info.pack_dim)[self.sp_rank]
        return torch.from_numpy(np.ascontiguousarray(joined))


class DecodeError(Exception):
    """A medium of one sample cannot be decoded. sample: number in the micro-batch; reason: one line."""

    def __init__(self, sample: int, reason: str) -> None:
        super().__init__(reason)
        self.sample, self.reason = sample, reason


def shift_labels(labels: np.ndarray) -> np.ndarray:
    """int64 [L]: the label of each token is the next token's; the last has none."""
    shifted = np.full_like(labels, IGNORE)
    shifted[:-1] = labels[1:]
    return shifted


def _decode_vision(
    pieces: Sequence[MediaPiece], samples: Sequence[TrainSample], temporal_patch: int
) -> tuple[torch.Tensor, list[VisionPixels]]:
    """uint8 [bytes] of all pictures of this rank, and where those of each piece lie."""
    flat: list[np.ndarray] = []
    found: list[VisionPixels] = []
    start = 0
    for piece in pieces:
        if piece.tower != "vision":
            continue
        unit = samples[piece.sample].media[piece.unit]
        grids = (piece.start, piece.stop) if unit.kind == "video" else None
        try:
            decoded = decode_unit(unit, temporal_patch, grids)
        except SchemaError as error:
            raise DecodeError(piece.sample, str(error)) from error
        values, grid, size = decoded.values, decoded.grid, decoded.size
        assert values is not None and grid is not None and size is not None  # what decode_unit gives for pictures
        frames, height, width, channels = values.shape
        found.append(VisionPixels(unit.kind == "image", start, (frames, height, width, channels), grid, size))
        flat.append(values.reshape(-1))
        start += values.size
    return torch.from_numpy(np.concatenate([*flat, np.zeros(0, np.uint8)])), found


def _decode_sound(
    pieces: Sequence[MediaPiece], samples: Sequence[TrainSample]
) -> tuple[torch.Tensor, list[SoundSamples]]:
    """int16 [samples] of all sounds that this rank has a piece of, whole, because the log-mel of a sound depends on its
    loudest part; and where that of each piece lies."""
    flat: list[np.ndarray] = []
    found: list[SoundSamples] = []
    start = 0
    for piece in pieces:
        if piece.tower != "audio":
            continue
        unit = samples[piece.sample].media[piece.unit]
        try:
            values = decode_unit(unit).values
        except SchemaError as error:
            raise DecodeError(piece.sample, str(error)) from error
        assert values is not None  # what decode_unit gives for sound
        found.append(SoundSamples(start, len(values), piece.start, piece.stop))
        flat.append(values)
        start += len(values)
    return torch.from_numpy(np.concatenate([*flat, np.zeros(0, np.int16)])), found
