"""Parquet files that are in memory, read by this thread alone."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq


def read_parquet(data: bytes) -> pa.Table:
    """The table of a small Parquet file.

    Not `pq.read_table`: it starts Arrow's thread pool, whose threads now and then abort a process that ends.
    """
    with pq.ParquetFile(io.BytesIO(data), pre_buffer=False) as file:
        return file.read(use_threads=False)
