"""rows.parquet of a partition, and the histograms of the dataset card."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pack.parquet import read_parquet
from schemas.dataset import ROWS_COLUMNS, Histogram, rows_record
from schemas.errors import SchemaError
from schemas.sample import SampleMeta

ROWS_FILE = "rows.parquet"
_TYPES = {
    "string": pa.string(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "list<string>": pa.list_(pa.string()),
}
ROWS_SCHEMA = pa.schema({name: _TYPES[kind] for name, kind in ROWS_COLUMNS.items()})

# name of the histogram -> (unit, edges); what lies beyond the last edge counts into the last bin
HISTOGRAMS: dict[str, tuple[str, list[float]]] = {
    "video_s": ("s", [0, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600, 7200, 86400]),
    "audio_s": ("s", [0, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600, 7200, 86400]),
    "video_fps": ("Hz", [0, 0.25, 0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 8, 10, 15, 25, 30, 60, 240]),
    "frames": ("frames", [0, 2, 4, 8, 16, 32, 64, 128, 256, 512, 769, 4096]),
    "width": ("px", [0, 64, 128, 256, 384, 512, 640, 768, 1024, 1280, 1920, 3840, 16384]),
    "height": ("px", [0, 64, 128, 256, 384, 512, 640, 768, 1024, 1280, 1920, 3840, 16384]),
    "text_chars": ("characters", [0, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536, 1048576]),
    "media_bytes": ("bytes", [0, 2**14, 2**16, 2**18, 2**20, 2**21, 2**22, 2**23, 2**24, 2**25, 2**26, 2**27, 2**32]),
}


class RowsTable:
    """Collects the rows of one partition's samples."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {name: [] for name in ROWS_COLUMNS}
        self.values: dict[str, list[float]] = {name: [] for name in HISTOGRAMS}
        self.sources: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.columns["id"])

    def add(self, meta: SampleMeta, shard: str, index_in_shard: int) -> None:
        record = rows_record(meta, shard, index_in_shard)
        for name, values in self.columns.items():
            values.append(record[name])
        self.sources[meta.source] = self.sources.get(meta.source, 0) + 1
        for video in meta.videos:
            self._count(video_s=video.duration_s, video_fps=video.video_fps, frames=video.num_frames)
            self._count(width=video.width, height=video.height)
        for sound in [*(video.audio for video in meta.videos if video.audio), *meta.audios]:
            self._count(audio_s=sound.duration_s)
        self._count(text_chars=record["text_chars"], media_bytes=record["media_bytes"])

    def _count(self, **values: float) -> None:
        for name, value in values.items():
            self.values[name].append(value)

    def to_parquet(self) -> bytes:
        """The file's bytes; the same rows give the same bytes."""
        sink = io.BytesIO()
        pq.write_table(pa.table(self.columns, schema=ROWS_SCHEMA), sink, compression="zstd")
        return sink.getvalue()

    def histograms(self) -> dict[str, Histogram]:
        return {name: histogram(name, values) for name, values in self.values.items() if values}


def histogram(name: str, values: Iterable[float]) -> Histogram:
    """Counts of `values` in the bins of `HISTOGRAMS[name]`."""
    unit, edges = HISTOGRAMS[name]
    clipped = np.clip(np.fromiter(values, float), edges[0], edges[-1])
    counts, _ = np.histogram(clipped, edges)
    return Histogram(unit=unit, edges=[float(edge) for edge in edges], counts=counts.tolist())


def add_histograms(parts: Iterable[dict[str, Histogram]]) -> dict[str, Histogram]:
    """The sum per name, bin by bin."""
    sums: dict[str, list[int]] = {}
    for part in parts:
        for name, found in part.items():
            before = sums.get(name)
            sums[name] = found.counts if before is None else [a + b for a, b in zip(before, found.counts, strict=True)]
    built = {}
    for name in HISTOGRAMS:
        if name in sums:
            unit, edges = HISTOGRAMS[name]
            built[name] = Histogram(unit=unit, edges=[float(edge) for edge in edges], counts=sums[name])
    return built


def read_rows(data: bytes, where: str) -> pa.Table:
    """The rows table of a partition. SchemaError when it cannot be read or has other columns."""
    try:
        table = read_parquet(data)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SchemaError(f"{where} cannot be read: {error}") from error
    if table.schema != ROWS_SCHEMA:
        raise SchemaError(f"{where} has columns {table.schema.names}; a rows table has {ROWS_SCHEMA.names}")
    return table
