"""How many tokens each row of a data source takes, for one processor: from the rows tables alone, in parallel, cached.

lengths = load_lengths("packed", assets)       # computed once, then read from packed/lengths/
lengths.total                                  # int32 [rows], in the order of the dataset's index; 0 = unusable
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from itertools import groupby

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from schemas.chat import MediaCounts, TokenCounts, count_tokens
from schemas.conversation import Turn
from schemas.errors import IncompleteSourceError, RowError, SchemaError, UnsupportedError
from schemas.media_counts import media_counts
from schemas.rollouts import RolloutRow
from schemas.sample import SampleMeta
from train.data.lengths_cache import LengthsCache, joint_fingerprint, packed_cache, text_cache
from train.data.meta_check import meta_hash
from train.data.packed_files import INDEX_FILE, PackedIndex, read_file
from train.data.processor import ProcessorAssets
from train.data.response_layout import check_ids, check_prompt, prompt_layout
from train.data.rollout_files import Rollouts
from train.data.text_files import TextFiles
from train.data.text_rows import TextRows
from train.data.worker_context import worker_context

ROWS_FILE = "rows.parquet"
SERIAL_ROWS = 2000  # below this, starting worker processes takes longer than the work
BATCH_ROWS = 256
CALLS = 16  # per worker process
LENGTHS_VERSION = "2"  # raised whenever other arrays are kept
NO_ROLLOUT = "the rollouts have no response to it"


@dataclass(frozen=True)
class Lengths:
    """One number per row. total: int32 [rows], 0 for a row that cannot be used; text, video, audio, image: int32, its
    parts; labels: int32, trained tokens; patches: int64, vision patches; patch_pairs: int64, sum over temporal grids of
    patches squared (the vision tower's attention); mel: int32, log-mel frames; meta: int64, `meta_hash` of a packed
    row, 0 for text; faults: (row, why it cannot be used)."""

    total: np.ndarray
    text: np.ndarray
    video: np.ndarray
    audio: np.ndarray
    image: np.ndarray
    labels: np.ndarray
    patches: np.ndarray
    patch_pairs: np.ndarray
    mel: np.ndarray
    meta: np.ndarray
    faults: tuple[tuple[int, str], ...] = ()

    def __len__(self) -> int:
        return len(self.total)

    @property
    def without_labels(self) -> int:
        """Usable rows that train nothing."""
        return int(((self.total > 0) & (self.labels == 0)).sum())


COLUMNS = tuple(field.name for field in fields(Lengths) if field.name != "faults")
WIDE = ("patches", "patch_pairs", "meta")


def _nobody(count: int) -> None:
    """No progress wanted."""


class LengthsBuilder:
    """Collects rows one by one."""

    def __init__(self, assets: ProcessorAssets) -> None:
        self.assets = assets
        self.rows: list[tuple[int, ...]] = []
        self.faults: list[tuple[int, str]] = []

    def add(self, turns: Sequence[Turn], counts: MediaCounts, mel: int = 0, meta: int = 0) -> None:
        """One row; raises what `count_tokens` raises."""
        found = count_tokens(turns, self.assets.encode, self.assets.tokens, counts, self.assets.style)
        self._add(found, counts, mel, meta)

    def _add(self, found: TokenCounts, counts: MediaCounts, mel: int, meta: int, times: int = 1) -> None:
        """times: how often the media stand in the row."""
        grids = [video.grid for video in counts.videos] + list(counts.images)
        patches = sum(t * h * w for t, h, w in grids)
        pairs = sum(t * (h * w) ** 2 for t, h, w in grids)
        self.rows.append((*_columns(found), times * patches, times * pairs, times * mel, meta))

    def add_responses(
        self, row: RolloutRow, turns: Sequence[Turn], counts: MediaCounts, mel: int = 0, meta: int = 0
    ) -> None:
        """One row with recorded responses, all together; raises what `prompt_layout`, `check_prompt` and `check_ids`
        raise."""
        prompt, times = prompt_layout(turns, counts, self.assets), len(row.responses)
        check_prompt(row, prompt)
        check_ids(row, self.assets.vocab_size)
        taken = {"video": 0, "audio": 0, "image": 0}
        for slot in prompt.slots:
            taken[slot.kind] += times * len(slot.rows)
            taken["audio"] += times * len(slot.sound_rows)
        total = times * len(prompt.ids) + row.response_tokens
        found = TokenCounts(total=total, text=total - sum(taken.values()), labels=row.response_tokens, **taken)
        self._add(found, counts, mel, meta, times)

    def add_fault(self, reason: str) -> None:
        """A row that cannot be used."""
        self.faults.append((len(self.rows), reason))
        self.rows.append((0,) * len(COLUMNS))

    def lengths(self) -> Lengths:
        table = np.array(self.rows, np.int64).reshape(-1, len(COLUMNS))
        columns = {
            name: table[:, i] if name in WIDE else table[:, i].astype(np.int32) for i, name in enumerate(COLUMNS)
        }
        return Lengths(**columns, faults=tuple(self.faults))


def _columns(found: TokenCounts) -> tuple[int, ...]:
    return found.total, found.text, found.video, found.audio, found.image, found.labels


def load_lengths(
    dataset: str,
    assets: ProcessorAssets,
    *,
    workers: int | None = None,
    cache: str | None = None,
    advance: Callable[[int], None] = _nobody,
    rollouts: Rollouts | None = None,
) -> Lengths:
    """The lengths of a merged dataset (a folder or URL), from the cache when it has them.

    workers: processes, default one per core; cache: folder of the cache, default the dataset's own `lengths` folder, or
    the user's cache folder where that cannot be written; advance: told the number of rows done since the last call;
    rollouts: rows have these responses in the place of their last answers, and one without any cannot be used.
    IncompleteSourceError for a dataset without index or rows tables, SchemaError for damaged ones, and for rollouts of
    other prompts or tokens that the model does not have.
    """
    index = PackedIndex.read(dataset)
    # what was counted for one vocabulary is not checked for another
    responses = [] if rollouts is None else [rollouts.fingerprint, str(assets.vocab_size)]
    fingerprint = joint_fingerprint(LENGTHS_VERSION, index.fingerprint, assets.fingerprint, *responses)
    place = packed_cache(dataset, index.num_rows, fingerprint, cache, COLUMNS)
    parts = [(folder, sum(s.rows for s in shards)) for folder, shards in groupby(index.shards, lambda s: s.folder)]
    if len({folder for folder, _ in parts}) < len(parts):
        raise SchemaError(f"{dataset}/{INDEX_FILE} lists the shards of a partition in several places")
    tasks = [_Task(partial(_partition_lengths, dataset, folder, count, rollouts), count) for folder, count in parts]
    return _cached(place, tasks, assets, workers, advance)


def load_text_lengths(
    files: TextFiles,
    rows: TextRows,
    assets: ProcessorAssets,
    *,
    workers: int | None = None,
    cache: str | None = None,
    advance: Callable[[int], None] = _nobody,
) -> Lengths:
    """The lengths of text-only files; as `load_lengths`. cache: default the user's cache folder."""
    fingerprint = joint_fingerprint(LENGTHS_VERSION, files.fingerprint, rows.fingerprint, assets.fingerprint)
    place = text_cache(files.num_rows, fingerprint, cache, COLUMNS)
    counts = files.block_rows.tolist()
    tasks = [_Task(partial(_block_lengths, files, rows, block), count) for block, count in enumerate(counts)]
    return _cached(place, tasks, assets, workers, advance)


def join_lengths(parts: Sequence[Lengths]) -> Lengths:
    """The rows of all parts, one after the other."""
    starts = np.cumsum([0, *(len(part) for part in parts)])
    faults = [(int(start) + row, why) for start, part in zip(starts, parts, strict=False) for row, why in part.faults]
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts]) if parts else np.zeros(0, np.int32)
        for name in COLUMNS
    }
    return Lengths(**columns, faults=tuple(faults))


def packed_row_lengths(builder: LengthsBuilder, meta_json: str, rollouts: Rollouts | None = None) -> None:
    """Adds one row of a rows table by its `meta` column. SchemaError for a meta that is none, and for rollouts of
    another prompt."""
    try:
        meta = SampleMeta.model_validate_json(meta_json)
        checked = meta_hash(json.loads(meta_json))
    except ValidationError as error:
        raise SchemaError(f"meta: {error.errors()[0]['msg']}") from error
    if rollouts is not None and meta.id not in rollouts:
        builder.add_fault(f"{meta.id}: {NO_ROLLOUT}")
        return
    try:
        counts, mel = media_counts(meta, builder.assets.style), _mel_frames(meta, builder.assets)
        if rollouts is None:
            builder.add(meta.conversation, counts, mel, checked)
        else:
            builder.add_responses(rollouts[meta.id], meta.conversation, counts, mel, checked)
    except (RowError, UnsupportedError, ValueError) as error:
        said = str(error)
        builder.add_fault(said if said.startswith(f"row {meta.id}: ") else f"{meta.id}: {said}")


def _mel_frames(meta: SampleMeta, assets: ProcessorAssets) -> int:
    if assets.sound is None:
        return 0
    own = [video.audio for video in meta.videos if video.audio] if assets.style.use_audio_in_video else []
    return sum(sound.num_samples // assets.sound.hop_length for sound in [*own, *meta.audios])


@dataclass(frozen=True)
class _Task:
    """A picklable piece of work, and the number of rows that it gives."""

    run: Callable[[ProcessorAssets], Lengths]
    rows: int


def _cached(
    place: LengthsCache,
    tasks: Sequence[_Task],
    assets: ProcessorAssets,
    workers: int | None,
    advance: Callable[[int], None],
) -> Lengths:
    known = place.read()
    if known is not None:
        advance(len(known["total"]))
        return _from_arrays(known)
    lengths = join_lengths(list(_computed(tasks, assets, workers or os.cpu_count() or 1, advance)))
    place.write(_arrays(lengths))
    return lengths


def _computed(
    tasks: Sequence[_Task], assets: ProcessorAssets, workers: int, advance: Callable[[int], None]
) -> Iterator[Lengths]:
    """The lengths of each task, in order."""
    processes = min(workers, len(tasks))
    if processes <= 1 or sum(task.rows for task in tasks) < SERIAL_ROWS:
        for task in tasks:
            yield task.run(assets)
            advance(task.rows)
        return
    # few calls of many tasks: each call carries the tokenizer
    calls = np.array_split(np.arange(len(tasks)), min(len(tasks), processes * CALLS))
    with ProcessPoolExecutor(processes, mp_context=worker_context("spawn")) as pool:
        chunks = [[tasks[i] for i in call] for call in calls]
        futures = [pool.submit(_run_tasks, chunk, assets) for chunk in chunks]
        try:
            for future, chunk in zip(futures, chunks, strict=True):
                yield future.result()
                advance(sum(task.rows for task in chunk))
        finally:
            pool.shutdown(cancel_futures=True)


def _run_tasks(tasks: Sequence[_Task], assets: ProcessorAssets) -> Lengths:
    return join_lengths([task.run(assets) for task in tasks])


def _block_lengths(files: TextFiles, rows: TextRows, block: int, assets: ProcessorAssets) -> Lengths:
    builder = LengthsBuilder(assets)
    for row in files.read_block(block):
        try:
            builder.add(rows.turns(row.mapping(), row.file, row.number)[1], MediaCounts())
        except RowError as error:
            builder.add_fault(str(error))
    return builder.lengths()


def _partition_lengths(
    dataset: str, folder: str, count: int, rollouts: Rollouts | None, assets: ProcessorAssets
) -> Lengths:
    name = f"{folder}/{ROWS_FILE}" if folder else ROWS_FILE
    where = f"{dataset}/{name}"
    data = read_file(dataset, name)
    if data is None:
        raise IncompleteSourceError(f"{where} does not exist; lengths are made from the rows tables that pack writes")
    builder = LengthsBuilder(assets)
    try:
        table = pq.ParquetFile(io.BytesIO(data))
        for batch in table.iter_batches(BATCH_ROWS, columns=["meta"]):
            for meta in batch.column("meta").to_pylist():
                packed_row_lengths(builder, meta, rollouts)
    except (pa.ArrowException, KeyError, TypeError, OSError, SchemaError) as error:
        raise SchemaError(f"{where}, row {len(builder.rows)}: {error}") from error
    if len(builder.rows) != count:
        raise SchemaError(f"{where} has {len(builder.rows)} rows; the index counts {count} samples")
    return builder.lengths()


def _arrays(lengths: Lengths) -> dict[str, np.ndarray]:
    arrays = {name: getattr(lengths, name) for name in COLUMNS}
    arrays["fault_rows"] = np.array([row for row, _ in lengths.faults], np.int64)
    arrays["fault_reasons"] = np.array([why for _, why in lengths.faults], np.str_)
    return arrays


def _from_arrays(arrays: dict[str, np.ndarray]) -> Lengths:
    rows, reasons = arrays["fault_rows"].tolist(), arrays["fault_reasons"].tolist()
    return Lengths(**{name: arrays[name] for name in COLUMNS}, faults=tuple(zip(rows, reasons, strict=True)))
