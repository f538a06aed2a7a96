"""What the towers make of each medium, beside the log-probabilities: kept during the forward pass, written as
safetensors, compared between two dumps.

A rank writes the pieces that it encodes itself: under sequence parallelism the grids of a clip, or the windows of a
sound, are in the files of several ranks. The header of a file says what each tensor is (`FeatureKey`).
"""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from schemas.errors import SchemaError, VerificationError
from train.data.batch import Batch
from train.data.route import Tower

FILE_BYTES = 1 << 30  # of features in one file
ROWS, DEEPSTACK = "rows", "deepstack"
ENTRIES = "omniloom.features"  # key of a file's header


@dataclass(frozen=True)
class FeatureKey:
    """One tensor [n, H]. medium: number among the sample's media, in the order of their tokens; kind: image, video or
    audio; part: rows, or deepstack0, ...; start, stop: which temporal grids of a clip (0 and 1 of an image) or log-mel
    frames of a sound."""

    source: str
    id: str
    medium: int
    kind: str
    part: str
    start: int
    stop: int

    @property
    def name(self) -> str:
        """Of the tensor in its file."""
        return f"{self.source}/{self.id}/{self.medium}.{self.kind}/{self.part}/{self.start}-{self.stop}"

    @property
    def unit(self) -> tuple[str, str, int, str, str]:
        """What all pieces of a medium have in common."""
        return self.source, self.id, self.medium, self.kind, self.part


class TowerCapture:
    """Keeps what towers give while it is open. towers: by kind."""

    def __init__(self, towers: Mapping[Tower, nn.Module]) -> None:
        self._calls: dict[Tower, list[tuple[Tensor, ...]]] = {tower: [] for tower in towers}
        self._handles = [
            module.register_forward_hook(lambda _m, _a, output, kept=self._calls[tower]: kept.append(_parts(output)))
            for tower, module in towers.items()
        ]

    def take(self) -> dict[Tower, list[tuple[Tensor, ...]]]:
        """(rows, deepstack levels) of each call since the last time."""
        found: dict[Tower, list[tuple[Tensor, ...]]] = {tower: list(calls) for tower, calls in self._calls.items()}
        for calls in self._calls.values():
            calls.clear()
        return found

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _parts(output: Any) -> tuple[Tensor, ...]:
    """Of our towers (rows, or rows and levels) and of transformers' (an output with fields)."""
    if isinstance(output, Tensor):
        return (output,)
    rows = getattr(output, "pooler_output", None)
    levels = getattr(output, "deepstack_features", None)
    if rows is None:
        rows, levels = (output[0], output[1] if len(output) > 1 else None)
    return (rows, *(levels or ()))


def batch_features(
    batch: Batch, calls: Mapping[Tower, Sequence[tuple[Tensor, ...]]], *, images_first: bool = False
) -> Iterator[tuple[FeatureKey, Tensor]]:
    """What this rank's towers made of a micro-batch, piece by piece, on the CPU. images_first: the calls were sample by
    sample, each sample's images before its clips, as transformers makes them."""
    seen = iter(batch.vision)
    kinds = ["audio" if p.tower == "audio" else "image" if next(seen).is_image else "video" for p in batch.route.pieces]
    for tower, made in calls.items():
        numbers = [n for n, piece in enumerate(batch.route.pieces) if piece.tower == tower]
        if not numbers:
            continue  # what was called was a dummy unit
        if images_first:
            numbers.sort(key=lambda n: (batch.route.pieces[n].sample, kinds[n] == "video"))
        sizes = [len(batch.route.pieces[n].rows) for n in numbers]
        for level, values in enumerate(zip(*made, strict=True)):
            rows = torch.cat(values)
            if len(rows) != sum(sizes):
                raise ValueError(f"the {tower} tower gave {len(rows)} rows for {sum(sizes)} tokens")
            for n, part in zip(numbers, rows.split(sizes), strict=True):
                piece = batch.route.pieces[n]
                key = FeatureKey(
                    source=batch.sources[piece.sample],
                    id=batch.keys[piece.sample],
                    medium=piece.unit,
                    kind=kinds[n],
                    part=f"{DEEPSTACK}{level - 1}" if level else ROWS,
                    start=piece.start,
                    stop=piece.stop,
                )
                yield key, part.detach().to("cpu", copy=True)


@dataclass
class FeatureWriter:
    """Writes files of about `FILE_BYTES` for one rank, each whole or not at all."""

    folder: Path
    dp_rank: int
    sp_rank: int
    names: list[str] = field(default_factory=list)
    _tensors: dict[str, Tensor] = field(default_factory=dict)
    _keys: list[FeatureKey] = field(default_factory=list)
    _bytes: int = 0

    def add(self, key: FeatureKey, rows: Tensor) -> None:
        """SchemaError: the same piece twice, of two rows with one id."""
        if key.name in self._tensors:
            raise SchemaError(f"data source {key.source}: two rows have the id {key.id}; ids are of one sample each")
        self._tensors[key.name] = rows
        self._keys.append(key)
        self._bytes += rows.nbytes
        if self._bytes >= FILE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what waits."""
        if not self._keys:
            return
        name = f"features-dp{self.dp_rank:05d}-sp{self.sp_rank:05d}-{len(self.names):05d}.safetensors"
        beside = self.folder / f".{name}.{uuid.uuid4().hex[:8]}"
        entries = json.dumps([asdict(key) for key in self._keys])
        try:
            save_file(self._tensors, beside, {"format": "pt", ENTRIES: entries})
            os.replace(beside, self.folder / name)
        finally:
            beside.unlink(missing_ok=True)
        self.names.append(name)
        self._tensors, self._keys, self._bytes = {}, [], 0


@dataclass(frozen=True)
class FeatureRow:
    """Media of one kind in two dumps. part: rows of the tower, or of a deepstack level; count: media; mean_abs,
    max_abs: of the differences; relative: max_abs / greatest value; worst: the medium with the greatest difference;
    alone: media that one dump alone has."""

    kind: str
    part: str
    count: int
    mean_abs: float
    max_abs: float
    relative: float
    worst: str
    alone: int


@dataclass
class _Sum:
    media: int = 0
    numbers: int = 0
    total: float = 0.0
    largest: float = 0.0
    greatest: float = 0.0
    worst: str = ""


def compare_features(first: Sequence[Path], second: Sequence[Path]) -> list[FeatureRow]:
    """By kind and part. VerificationError: a medium of other shapes; SchemaError: files that are no features, or a
    medium of which pieces are missing."""
    one, other = _index(first), _index(second)
    sums: dict[tuple[str, str], _Sum] = {}
    for unit in sorted(one.keys() & other.keys()):
        ours, theirs = _whole(one[unit]), _whole(other[unit])
        named = f"{unit[0]}/{unit[1]}/{unit[2]}.{unit[3]}"
        if ours.shape != theirs.shape:
            raise VerificationError(
                f"features of {named}, {unit[4]}: {tuple(ours.shape)} in one dump, {tuple(theirs.shape)} in the other"
            )
        found = sums.setdefault(unit[3:], _Sum())
        d = (ours - theirs).abs()
        found.media += 1
        found.numbers += d.numel()
        found.total += float(d.sum())
        found.greatest = max(found.greatest, float(theirs.abs().max()))
        if (largest := float(d.max())) > found.largest or not found.worst or largest != largest:
            found.largest, found.worst = largest, named
    alone = Counter(unit[3:] for unit in one.keys() ^ other.keys())
    every = sorted({*sums, *alone})
    return [_row(kind, part, sums.get((kind, part), _Sum()), alone[kind, part]) for kind, part in every]


def _row(kind: str, part: str, found: _Sum, alone: int) -> FeatureRow:
    relative = found.largest / found.greatest if found.greatest else found.largest
    mean = found.total / max(found.numbers, 1)
    return FeatureRow(kind, part, found.media, mean, found.largest, relative, found.worst, alone)


_Piece = tuple[FeatureKey, Path]


def _index(files: Sequence[Path]) -> dict[tuple[str, str, int, str, str], list[_Piece]]:
    """Unit -> its pieces, in order."""
    found: dict[tuple[str, str, int, str, str], list[_Piece]] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                entries = json.loads((opened.metadata() or {})[ENTRIES])
            keys = [FeatureKey(**entry) for entry in entries]
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise SchemaError(f"{file}: is no file of features: {error}") from error
        for key in keys:
            found.setdefault(key.unit, []).append((key, file))
    for pieces in found.values():
        pieces.sort(key=lambda piece: piece[0].start)
        ends = [0, *(key.stop for key, _ in pieces)]
        for (key, file), before in zip(pieces, ends, strict=False):
            if key.start != before:
                raise SchemaError(f"{file}: {key.name} does not follow the piece before it, which ends at {before}")
    return found


def _whole(pieces: Sequence[_Piece]) -> Tensor:
    """float64 [n, H] of all pieces of a medium."""
    rows = []
    for key, file in pieces:
        with safe_open(file, "pt") as opened:
            rows.append(opened.get_tensor(key.name))
    return torch.cat(rows).double()
