"""JSONL: a block is 256 lines, and its bytes are hashed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
import xxhash

from train.data.text_types import TextFile

BLOCK_ROWS = 256
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class JsonlBlock:
    """The lines of a block as bytes."""

    lines: list[bytes]
    nbytes: int

    def __len__(self) -> int:
        return len(self.lines)

    def value(self, index: int) -> dict[str, Any] | str:
        try:
            value = json.loads(self.lines[index].removeprefix(_BOM))
        except ValueError as error:
            return f"is no JSON: {error}"
        except RecursionError:
            return "is nested too deeply"
        return value if isinstance(value, dict) else f"is a JSON {type(value).__name__}, not an object"


def scan_jsonl(path: str, advance: Callable[[int], None] | None) -> TextFile:
    """Reads the file once. advance: told the bytes read since the last call."""
    content, block = xxhash.xxh3_128(), xxhash.xxh3_64()
    spans: list[tuple[int, int]] = []
    rows, hashes = [], []
    start = place = inside = 0

    def close_block() -> None:
        spans.append((start, place))
        rows.append(inside)
        hashes.append(block.intdigest())
        block.reset()

    with fsspec.open(path, "rb") as file:
        for line in file:
            if is_row(line):
                if inside == BLOCK_ROWS:
                    close_block()
                    start, inside = place, 0
                inside += 1
            content.update(line)
            block.update(line)
            place += len(line)
            if advance is not None:
                advance(len(line))
    if inside:
        close_block()
    none = np.zeros(len(rows), np.int64)
    return TextFile(
        path=path,
        format="jsonl",
        rows=np.array(rows, np.int64),
        spans=np.array(spans, np.int64).reshape(-1, 2),
        hashes=np.array(hashes, np.uint64),
        groups=none,
        firsts=none,
        size=place,
        content=content.hexdigest(),
    )


def is_row(line: bytes) -> bool:
    """Whether a line is one: blank ones are not."""
    stripped = line.strip()
    return bool(stripped) and stripped != _BOM


def read_jsonl(file: TextFile, place: int) -> JsonlBlock | None:
    """None when its bytes are not those that were scanned."""
    start, stop = file.spans[place].tolist()
    with fsspec.open(file.path, "rb") as opened:
        opened.seek(start)
        data = opened.read(stop - start)
    if xxhash.xxh3_64_intdigest(data) != int(file.hashes[place]):
        return None
    return JsonlBlock([line for line in data.split(b"\n") if is_row(line)], len(data))
