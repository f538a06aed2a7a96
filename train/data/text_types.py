"""A text file as blocks of rows, which take the place of shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from schemas.errors import RowError

Format = Literal["jsonl", "parquet"]


class TextRow(NamedTuple):
    """One row as it stands in its file. number: in the file, from 0, blank lines not counted; value: the row, or why
    it is none."""

    file: str
    number: int
    value: dict[str, Any] | str

    def mapping(self) -> dict[str, Any]:
        """The row; RowError `bad_row`."""
        if isinstance(self.value, str):
            raise RowError("bad_row", f"{self.file}, row {self.number}: {self.value}")
        return self.value


@dataclass(frozen=True)
class TextFile:
    """rows: int64 [blocks]; spans: int64 [blocks, 2], the bytes that a block is read from: its own (JSONL), or those of
    its row group (Parquet); hashes: uint64 [blocks], of these bytes; groups, firsts: int64 [blocks], row group of each
    block and its first row there (Parquet); size: bytes of the file; content: changes when the rows do; kept: where
    this is cached, or empty."""

    path: str
    format: Format
    rows: np.ndarray
    spans: np.ndarray
    hashes: np.ndarray
    groups: np.ndarray
    firsts: np.ndarray
    size: int
    content: str
    kept: str = ""


class Block(Protocol):
    """Rows of one block, parsed one by one."""

    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...
    def value(self, index: int) -> dict[str, Any] | str:
        """The row, or why it is none."""
