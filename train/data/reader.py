"""What a worker process does: the rows of one micro-batch -> a packed batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from schemas.errors import OmniloomError, RowError, SchemaError, UnsupportedError, VerificationError
from train.data.batch import Batch, BatchPlace, DeadSample
from train.data.collate import Collator, DecodeError
from train.data.processor import ProcessorAssets
from train.data.sample import IGNORE, TrainSample, dead_copy
from train.data.store import PackedPart, TextPart, hollow
from train.data.text_rows import TextRows
from train.data.transform import SampleTransform

log = logging.getLogger("omniloom.train")


@dataclass(frozen=True)
class BatchRequest:
    """The rows of one micro-batch, sequence after sequence: number of the source, number of the shard in it, index in
    the shard, and planned tokens, int64 [rows] each; lost: (source, shard, why) of shards that cannot be had."""

    place: BatchPlace
    source: np.ndarray
    shard: np.ndarray
    index: np.ndarray
    tokens: np.ndarray
    lost: tuple[tuple[int, int, str], ...] = ()


@dataclass(frozen=True)
class Failure:
    """An error that a worker hands back instead of a batch: its class, and one line."""

    kind: type[OmniloomError]
    message: str

    def error(self) -> OmniloomError:
        return self.kind(self.message)


@dataclass
class SourceReader:
    """How the rows of one source are read. name: of the source; text: of a text source."""

    name: str
    part: PackedPart | TextPart
    text: TextRows | None = None


@dataclass
class RowReader:
    """Reads and lays out rows. sources: by number, those that this rank serves; mask_dead: a row that cannot be read
    becomes zeros without labels, instead of an error."""

    sources: Mapping[int, SourceReader]
    transform: SampleTransform
    mask_dead: bool

    def lose(self, source: int, shard: int, reason: str) -> None:
        """That shard of a packed source cannot be had."""
        part = self.sources[source].part
        if isinstance(part, PackedPart):
            part.lose(shard, reason)

    def load(self, source: int, shard: int, index: int, tokens: int) -> tuple[TrainSample, DeadSample | None]:
        """The sample of a row, and what is wrong with it if it is dead. VerificationError: it is dead and may not be,
        or it takes another number of tokens than planned."""
        reader = self.sources[source]
        try:
            sample, dead = self._read(reader, shard, index), None
        except (SchemaError, OSError, RowError, UnsupportedError) as error:
            if not self.mask_dead:
                raise VerificationError(
                    f"{error}; remove or repack that row, or set data.dead_samples: mask to train on zeros in its place"
                ) from error
            sample = self.stand_in(source, shard, index, tokens)
            dead = DeadSample(reader.name, sample.key, str(error))
        if len(sample) != tokens:
            raise VerificationError(
                f"data source {reader.name}: row {sample.key} takes {len(sample)} tokens, but the plan counts on "
                f"{tokens}; the processor or the data are others than when the lengths were made: run "
                "`omniloom train lengths` again"
            )
        return sample, dead

    def _read(self, reader: SourceReader, shard: int, index: int) -> TrainSample:
        if isinstance(reader.part, PackedPart):
            return self.transform.packed(reader.part.read(shard, index), reader.name)
        row = reader.part.read(shard, index)
        assert reader.text is not None  # of a text source
        key, turns = reader.text.turns(row.mapping(), row.file, row.number)
        return self.transform.text(turns, reader.name, key)

    def stand_in(self, source: int, shard: int, index: int, tokens: int) -> TrainSample:
        """What takes the place of a dead row: its geometry from the rows table, with zeros and without labels; where
        even that cannot be had, as many padding tokens."""
        reader = self.sources[source]
        if isinstance(reader.part, PackedPart):
            try:
                sample = self.transform.packed(hollow(reader.part.meta(shard, index)), reader.name)
                if len(sample) == tokens:
                    return dead_copy(sample)
            except (SchemaError, OSError, RowError, UnsupportedError) as error:
                log.warning("%s, shard %d, sample %d: its geometry is lost, too: %s", reader.name, shard, index, error)
        ids = np.full(tokens, self.transform.assets.tokens.pad)
        positions = np.broadcast_to(np.arange(tokens), (3, tokens)).astype(position_dtype(self.transform.assets))
        return TrainSample(
            ids=ids,
            labels=np.full(tokens, IGNORE),
            position_ids=positions,
            media=[],
            source=reader.name,
            key=f"shard {shard}, sample {index}",
            num_label_tokens=0,
            num_text=tokens,
        )


@dataclass
class BatchMaker(torch.utils.data.Dataset[Batch | Failure]):
    """Makes batches on request, in a worker process or in the trainer's own."""

    reader: RowReader
    collator: Collator

    def __getitem__(self, request: BatchRequest) -> Batch | Failure:
        try:
            return self.make(request)
        except OmniloomError as error:
            kind = SchemaError if isinstance(error, RowError) else type(error)
            return Failure(kind, f"step {request.place.step} of epoch {request.place.epoch}: {error}")

    def make(self, request: BatchRequest) -> Batch:
        """The batch, or an OmniloomError."""
        for source, shard, reason in request.lost:
            self.reader.lose(source, shard, reason)
        samples: list[TrainSample] = []
        dead: list[DeadSample] = []
        for row in zip(
            request.source.tolist(),
            request.shard.tolist(),
            request.index.tolist(),
            request.tokens.tolist(),
            strict=True,
        ):
            sample, fault = self.reader.load(*row)
            samples.append(sample)
            dead += [fault] if fault else []
        for _ in range(len(samples)):
            try:
                return self.collator(samples, request.place, dead)
            except DecodeError as error:
                dead.append(self._bury(samples, error))
        return self.collator(samples, request.place, dead)

    def _bury(self, samples: list[TrainSample], error: DecodeError) -> DeadSample:
        """Replaces a sample whose media cannot be decoded, though their crc is right; VerificationError where that is
        not allowed."""
        sample = samples[error.sample]
        said = f"data source {sample.source}: row {sample.key}: {error.reason}"
        if not self.reader.mask_dead:
            raise VerificationError(
                f"{said}; repack that row, or set data.dead_samples: mask to train on zeros in its place"
            ) from error
        samples[error.sample] = dead_copy(sample)
        return DeadSample(sample.source, sample.key, error.reason)


def position_dtype(assets: ProcessorAssets) -> Literal["float32", "int64"]:
    """Of the position ids that the transform makes."""
    return "float32" if assets.style.form == "qwen3_omni" else "int64"
