"""Parquet: a block is at most 2048 rows of a row group, whose bytes are hashed. A block is kept as an Arrow table, and
only the rows that are asked for become Python objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from schemas.errors import ConfigError
from train.data.packed_files import is_remote, local_path
from train.data.text_types import TextFile

BLOCK_ROWS = 2048
_READ_BYTES = 16 << 20
_TAIL = 8  # length of the footer and the mark, at the end of a file


@dataclass(frozen=True)
class ParquetBlock:
    """The rows of a block."""

    table: pa.Table

    @property
    def nbytes(self) -> int:
        return int(self.table.nbytes)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def value(self, index: int) -> dict[str, Any] | str:
        found: dict[str, Any] = self.table.slice(index, 1).to_pylist()[0]
        return found


def scan_parquet(path: str) -> TextFile:
    """Hashes the row groups of a file. ConfigError for one that is no Parquet."""
    try:
        with fsspec.open(path, "rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(0)
            meta = pq.ParquetFile(opened).metadata
            spans = [_span(meta.row_group(group)) for group in range(meta.num_row_groups)]
            hashes = [_hash_of(opened, *span) for span in spans]
            tail = _hash_of(opened, size - _TAIL - meta.serialized_size, size)
    except (pa.ArrowException, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as Parquet: {error}") from error
    blocks = [
        (group, first, min(BLOCK_ROWS, count - first))
        for group, count in enumerate(meta.row_group(group).num_rows for group in range(meta.num_row_groups))
        for first in range(0, count, BLOCK_ROWS)
    ]
    groups, firsts, rows = np.array(blocks, np.int64).reshape(-1, 3).T
    return TextFile(
        path=path,
        format="parquet",
        rows=rows,
        spans=np.array(spans, np.int64).reshape(-1, 2)[groups],
        hashes=np.array(hashes, np.uint64)[groups],
        groups=groups,
        firsts=firsts,
        size=size,
        content=xxhash.xxh3_128_hexdigest(str([*hashes, tail]).encode()),
    )


def _span(group: Any) -> tuple[int, int]:
    """(start, stop): bytes of a row group in its file."""
    starts, stops = [], []
    for number in range(group.num_columns):
        column = group.column(number)
        first = column.data_page_offset
        if column.has_dictionary_page and column.dictionary_page_offset is not None:
            first = min(first, column.dictionary_page_offset)
        starts.append(first)
        stops.append(first + column.total_compressed_size)
    return min(starts, default=0), max(stops, default=0)


def _hash_of(opened: Any, start: int, stop: int) -> int:
    found = xxhash.xxh3_64()
    opened.seek(start)
    while start < stop and (data := opened.read(min(_READ_BYTES, stop - start))):
        found.update(data)
        start += len(data)
    return int(found.intdigest())


def read_parquet(file: TextFile, place: int) -> ParquetBlock | None:
    """None when the bytes of its row group are not those that were scanned."""
    start, stop = file.spans[place].tolist()
    data = _remote(file, start, stop) if is_remote(file.path) else pa.memory_map(str(local_path(file.path)))
    with data:
        if data.size() < stop:
            return None
        if xxhash.xxh3_64_intdigest(memoryview(data.read_at(stop - start, start))) != int(file.hashes[place]):
            return None
        try:
            return ParquetBlock(_rows(pq.ParquetFile(data), file, place))
        except (pa.ArrowException, IndexError):
            return None


def _remote(file: TextFile, start: int, stop: int) -> pa.BufferReader:
    """A file of which only the row group and the footer are there; the rest takes no memory."""
    buffer = np.zeros(file.size, np.uint8)
    with fsspec.open(file.path, "rb") as opened:
        for low, high in ((start, stop), (max(stop, file.size - _TAIL), file.size)):
            opened.seek(low)
            buffer[low:high] = np.frombuffer(opened.read(high - low), np.uint8)
        footer = int(buffer[-_TAIL:-4].view("<u4")[0])
        low = max(0, file.size - _TAIL - footer)
        opened.seek(low)
        buffer[low:] = np.frombuffer(opened.read(file.size - low), np.uint8)
    return pa.BufferReader(pa.py_buffer(buffer))


def _rows(reader: pq.ParquetFile, file: TextFile, place: int) -> pa.Table:
    """Batch by batch, so that a large row group never is in memory as a whole."""
    first, count = int(file.firsts[place]), int(file.rows[place])
    seen, taken = 0, []
    for batch in reader.iter_batches(BLOCK_ROWS, row_groups=[int(file.groups[place])], use_threads=False):
        low, high = max(first - seen, 0), min(first + count - seen, len(batch))
        if low < high:
            taken.append(batch.slice(low, high - low))
        seen += len(batch)
        if seen >= first + count:
            break
    return pa.Table.from_batches(taken, reader.schema_arrow)
