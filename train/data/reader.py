"""What a worker process does: the rows of one micro-batch -> a packed batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from schemas.errors import OmniloomError, RowError, SchemaError, UnsupportedError, VerificationError
from schemas.sample import PackedSample
from train.data.batch import Batch, BatchPlace, DeadSample
from train.data.collate import Collator, DecodeError
from train.data.processor import ProcessorAssets
from train.data.rollout_files import Rollouts
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
    """How the rows of one source are read. name: of the source; text: of a text source; rollouts: recorded responses to
    its rows."""

    name: str
    part: PackedPart | TextPart
    text: TextRows | None = None
    rollouts: Rollouts | None = None


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

    def load(self, source: int, shard: int, index: int, tokens: int) -> tuple[list[TrainSample], DeadSample | None]:
        """The sample of a row, or one for each recorded response to it, and what is wrong with the row if it is dead.
        VerificationError: it is dead and may not be, or it takes another number of tokens than planned."""
        reader = self.sources[source]
        try:
            samples, dead = self._read(reader, shard, index), None
        except (SchemaError, OSError, RowError, UnsupportedError) as error:
            if not self.mask_dead:
                raise VerificationError(
                    f"{error}; remove or repack that row, or set data.dead_samples: mask to train on zeros in its place"
                ) from error
            samples = self.stand_in(source, shard, index, tokens)
            dead = DeadSample(reader.name, samples[0].key, str(error))
        if (found := sum(map(len, samples))) != tokens:
            raise VerificationError(
                f"data source {reader.name}: row {samples[0].key} takes {found} tokens, but the plan counts on "
                f"{tokens}; the processor or the data are others than when the lengths were made: run "
                "`omniloom train lengths` again"
            )
        return samples, dead

    def _read(self, reader: SourceReader, shard: int, index: int) -> list[TrainSample]:
        if isinstance(reader.part, PackedPart):
            return self._lay_out(reader, reader.part.read(shard, index))
        row = reader.part.read(shard, index)
        assert reader.text is not None  # of a text source
        key, turns = reader.text.turns(row.mapping(), row.file, row.number)
        return [self.transform.text(turns, reader.name, key)]

    def _lay_out(self, reader: SourceReader, sample: PackedSample) -> list[TrainSample]:
        if reader.rollouts is None:
            return [self.transform.packed(sample, reader.name)]
        return self.transform.responses(sample, reader.rollouts[sample.meta.id], reader.name)

    def stand_in(self, source: int, shard: int, index: int, tokens: int) -> list[TrainSample]:
        """What takes the place of a dead row: its geometry from the rows table, with zeros and without labels; where
        even that cannot be had, as many padding tokens."""
        reader = self.sources[source]
        if isinstance(reader.part, PackedPart):
            try:
                samples = self._lay_out(reader, hollow(reader.part.meta(shard, index)))
                if sum(map(len, samples)) == tokens:
                    return [dead_copy(sample) for sample in samples]
            except (SchemaError, OSError, RowError, UnsupportedError) as error:
                log.warning("%s, shard %d, sample %d: its geometry is lost, too: %s", reader.name, shard, index, error)
        ids = np.full(tokens, self.transform.assets.tokens.pad)
        positions = np.broadcast_to(np.arange(tokens), (3, tokens)).astype(position_dtype(self.transform.assets))
        stuffing = TrainSample(
            ids=ids,
            labels=np.full(tokens, IGNORE),
            position_ids=positions,
            media=[],
            source=reader.name,
            key=f"shard {shard}, sample {index}",
            num_label_tokens=0,
            num_text=tokens,
        )
        return [stuffing]


@dataclass
class BatchMaker(torch.utils.data.Dataset[Batch | Failure]):
    """Makes batches on request, in a worker process or in the trainer's own. relabel: changes the labels of samples
    that are alive; picklable."""

    reader: RowReader
    collator: Collator
    relabel: Callable[[TrainSample], TrainSample] | None = None

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
            found, fault = self.reader.load(*row)
            samples += found if fault or self.relabel is None else map(self.relabel, found)
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
