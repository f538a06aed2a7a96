"""All rows of a manifest as numpy arrays: what planning needs of 10 million rows, in some 40 bytes each."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from pack.cost import CostModel
from pack.manifest_files import ManifestFile, scan_file
from schemas.errors import RowError
from schemas.manifest import content_key

Advance = Callable[[int, int], None]  # (bytes done, rows done) since the last call
_EVERY_ROWS = 8192
_LOW = 2**64 - 1


@dataclass(frozen=True)
class FileScan:
    """One file, arrays [rows]. content: row hashes; cost: estimated bytes; start: byte offset of the line (0 except in
    JSONL); named: the row has an explicit id; key_high, key_low: 128 bits of that id, else of the row's content."""

    file: ManifestFile
    content: np.ndarray  # uint64
    cost: np.ndarray  # float32
    start: np.ndarray  # int64
    named: np.ndarray  # bool
    key_high: np.ndarray  # uint64
    key_low: np.ndarray  # uint64

    @property
    def rows(self) -> int:
        return len(self.content)

    def byte_at(self, row: int) -> int:
        """Offset at which a row begins; the file's size behind the last (JSONL), else 0."""
        if self.file.format != "jsonl":
            return 0
        return int(self.start[row]) if row < self.rows else self.file.size


def scan(file: ManifestFile, cost: CostModel, advance: Advance) -> FileScan:
    """Reads every row once; a row that cannot be parsed counts as a row of the least cost."""
    content, costs, starts = array("Q"), array("f"), array("q")
    named, high, low = bytearray(), array("Q"), array("Q")
    done = 0
    for number, digest, value, start in scan_file(file):
        content.append(digest)
        starts.append(start)
        is_row = isinstance(value, Mapping)
        costs.append(cost(value) if is_row else 0.0)  # type: ignore[arg-type]
        key, has_id = _key(value) if is_row else (digest, False)
        named.append(has_id)
        high.append(key >> 64)
        low.append(key & _LOW)
        if number % _EVERY_ROWS == _EVERY_ROWS - 1:
            advance(start - done, _EVERY_ROWS)
            done = start
    advance(file.size - done, len(content) % _EVERY_ROWS)
    return FileScan(
        file,
        np.frombuffer(content, np.uint64),
        np.frombuffer(costs, np.float32),
        np.frombuffer(starts, np.int64),
        np.frombuffer(named, np.bool_),
        np.frombuffer(high, np.uint64),
        np.frombuffer(low, np.uint64),
    )


def _key(row: Any) -> tuple[int, bool]:
    """(128 bits, whether they are of an explicit id) as `parse_row` names the row."""
    given = row.get("id")
    if isinstance(given, int) and not isinstance(given, bool):
        given = str(given)
    if isinstance(given, str) and given:
        return xxhash.xxh3_128_intdigest(given.encode("utf-8", "surrogatepass")), True
    try:
        return content_key(row), False
    except RowError:
        return 0, False  # rejected as bad_row when its partition is packed


def repeats(named: np.ndarray, high: np.ndarray, low: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(duplicate, occurrence) of rows in plan order.

    duplicate [rows] bool: an earlier row has the same explicit id; occurrence [rows] int64: how many rows before have
    the same content and no id either.
    """
    size = len(named)
    order = np.lexsort((low, high, named))
    same = np.zeros(size, bool)
    if size > 1:
        a, b = order[:-1], order[1:]
        same[1:] = (named[a] == named[b]) & (high[a] == high[b]) & (low[a] == low[b])
    position = np.arange(size)
    first = np.maximum.accumulate(np.where(same, 0, position))
    occurrence = np.zeros(size, np.int64)
    occurrence[order] = position - first
    duplicate = named & (occurrence > 0)
    occurrence[named] = 0
    return duplicate, occurrence
