"""Dumps of log-probabilities as tables: our own, and those of other engines.

A folder with `dump.json`, a folder of rollouts (what the engine that drew them recorded), a folder of Parquet or JSONL
files, or one file: Parquet, JSONL, or `.pt` (a dict of columns, read with weights_only). Columns are those of
`train.logprob_files.SCHEMA`; only id, index and logprob must be there. A token without a log-probability (null), as
engines give the first, is left out.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq
import torch

from schemas.errors import ConfigError, IncompleteSourceError, SchemaError, UnsafeInputError
from schemas.rollouts import ROLLOUTS_CARD
from schemas.wording import known_names, one_line
from train.data.collate import MODALITIES
from train.data.rollout_files import read_rollouts
from train.logprob_files import CARD, SCHEMA, read_card

REQUIRED = ("id", "index", "logprob")
SUFFIXES = (".parquet", ".jsonl", ".pt")
HIGHEST = 1e-3  # of a log-probability: what rounding can add to 0
BLOCK_BYTES = 1 << 24  # of JSONL that is parsed at once, at least
# types that lines of JSONL are read as: nothing is guessed, so that a text that looks like a date stays one
JSON_SCHEMA = pa.schema([(f.name, f.type if pa.types.is_string(f.type) else pa.float64()) for f in SCHEMA])


@dataclass(frozen=True)
class TokenTable:
    """Lines of a dump, one array entry each. ids: of the samples; sample: int32 [n], place in ids; index: int32 [n];
    logprob: float32 [n]; token: int32 [n], -1 where it is not told; source, modality, media: texts and the place of
    each line's in them, None where the dump has no such column; without: lines without a log-probability, which are
    left out; features: files of what the towers made."""

    path: Path
    ids: list[str]
    sample: np.ndarray
    index: np.ndarray
    logprob: np.ndarray
    token: np.ndarray
    source: tuple[list[str], np.ndarray] | None
    modality: tuple[list[str], np.ndarray] | None
    media: tuple[list[str], np.ndarray] | None
    without: int
    features: tuple[Path, ...] = ()

    def __len__(self) -> int:
        return len(self.index)

    def place(self, line: int) -> str:
        """`sample clip3, index 17`."""
        return f"sample {self.ids[self.sample[line]]}, index {self.index[line]}"


def read_dump(path: Path) -> TokenTable:
    """ConfigError: nothing that can be read; IncompleteSourceError: a dump that was not finished or lost a file;
    SchemaError: wrong columns or values, by name; UnsafeInputError: a `.pt` that wants to run code."""
    if (path / ROLLOUTS_CARD).exists():
        features: tuple[Path, ...] = ()
        table = _rollout_lines(path)
    else:
        files, features = _files(path)
        table = pa.concat_tables([_checked(_read(file), file) for file in files])
    lines = table.num_rows
    table = table.filter(pa.compute.is_valid(table["logprob"]))
    ids, sample = _texts(table["id"])
    token = table["token"].fill_null(-1).to_numpy().astype(np.int32)
    found = TokenTable(
        path=path,
        ids=ids,
        sample=sample,
        index=table["index"].to_numpy().astype(np.int32),
        logprob=table["logprob"].to_numpy().astype(np.float32),
        token=token,
        source=_optional(table["source"]),
        modality=_optional(table["modality"]),
        media=_optional(table["media"]),
        without=lines - table.num_rows,
        features=features,
    )
    _check_values(found)
    return found


def _files(path: Path) -> tuple[list[Path], tuple[Path, ...]]:
    """(files of lines, files of features)."""
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise ConfigError(f"{path}: is no dump; give a folder or a file that ends in {', '.join(SUFFIXES)}")
        return [path], ()
    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such file or folder")
    if (path / CARD).exists():
        card = read_card(path)
        names = [file["name"] for file in card["files"]]
        if not names:
            raise SchemaError(f"{path}: the dump has no token; were its rows without labels? (--tokens text or all)")
        return [path / name for name in names], tuple(path / name for name in card["features"])
    if any(path.glob("logprobs-dp*.parquet")) or any(path.glob(".logprobs-dp*")):
        raise IncompleteSourceError(f"{path}: has no {CARD}; the dump was not finished, make it again")
    found = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    if not found:
        raise ConfigError(f"{path}: holds no dump, neither a {CARD} nor a file that ends in {', '.join(SUFFIXES)}")
    return found, ()


def _rollout_lines(folder: Path) -> pa.Table:
    """Of all responses; a sample is `<id>#<number of the response>`, as in training."""
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for row in read_rollouts(folder):
        for number, response in enumerate(row.responses):
            count = len(response.ids)
            columns["id"] += [f"{row.id}#{number}"] * count
            columns["source"] += [row.source] * count
            columns["index"] += range(row.prompt_tokens, row.prompt_tokens + count)
            columns["token"] += response.ids
            columns["logprob"] += response.logprobs
            columns["modality"] += [MODALITIES[0]] * count
            columns["media"] += [None] * count
    return pa.table(columns, schema=SCHEMA)


def _read(file: Path) -> pa.Table:
    try:
        if file.suffix == ".parquet":
            return pq.ParquetFile(file).read()
        if file.suffix == ".jsonl":
            return _read_lines(file)
    except (pa.ArrowException, OSError, OverflowError) as error:
        raise SchemaError(f"{file}: cannot be read: {one_line(error)}") from error
    return _read_tensors(file)


def _read_lines(file: Path) -> pa.Table:
    """ids are texts, or whole numbers in every line."""
    with open(file, "rb") as lines:
        longest = max(map(len, lines), default=0)
    size = pyarrow.json.ReadOptions(block_size=max(BLOCK_BYTES, longest + 1))
    try:
        return pyarrow.json.read_json(file, size, pyarrow.json.ParseOptions(explicit_schema=JSON_SCHEMA))
    except pa.ArrowInvalid as error:
        numbered = JSON_SCHEMA.set(0, pa.field("id", pa.int64()))
        try:
            return pyarrow.json.read_json(file, size, pyarrow.json.ParseOptions(explicit_schema=numbered))
        except pa.ArrowInvalid:
            raise error from None


def _read_tensors(file: Path) -> pa.Table:
    try:
        values = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsafeInputError(f"{file}: holds more than tensors, lists and texts, and is not loaded") from error
    except Exception as error:  # bytes that are no pickle end in whatever the first of them means
        said = f"{type(error).__name__}: {one_line(error)}"
        raise SchemaError(f"{file}: cannot be read as what torch.save writes: {said}") from error
    if not isinstance(values, Mapping):
        raise SchemaError(f"{file}: holds a {type(values).__name__}; a dump is a dict of columns")
    columns = {str(name): _column(file, str(name), column) for name, column in values.items()}
    if len({len(column) for column in columns.values()}) > 1:
        raise SchemaError(f"{file}: columns of {', '.join(f'{len(c)} ({n})' for n, c in columns.items())} entries")
    return pa.table(columns)


def _column(file: Path, name: str, values: Any) -> pa.Array:
    if isinstance(values, torch.Tensor):
        return pa.array(_numbers(file, name, values))
    if not isinstance(values, Sequence) or isinstance(values, str | bytes | bytearray):
        raise SchemaError(f"{file}: column {name} is a {type(values).__name__}, no list and no tensor of one dimension")
    try:
        return pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise SchemaError(f"{file}: column {name} is no list of texts or of numbers: {one_line(error)}") from error


def _numbers(file: Path, name: str, values: torch.Tensor) -> np.ndarray:
    kind = "floating" if values.is_floating_point() else "whole"
    if values.is_complex() or values.is_quantized or values.dtype == torch.bool:
        kind = str(values.dtype)
    if values.ndim != 1 or values.layout != torch.strided or values.is_meta or kind not in ("floating", "whole"):
        layout = "meta" if values.is_meta else str(values.layout)
        raise SchemaError(
            f"{file}: column {name} is a tensor of shape {list(values.shape)}, {values.dtype}, {layout}; it must have "
            "one dimension and hold plain numbers"
        )
    wide = torch.float64 if kind == "floating" else torch.int64
    return np.asarray(values.detach().to(wide).resolve_neg().numpy())


def _checked(table: pa.Table, file: Path) -> pa.Table:
    """With every column of the schema, nulls where the file has none."""
    known = SCHEMA.names
    if twice := [name for name, count in Counter(table.column_names).items() if count > 1]:
        raise SchemaError(f"{file}: has the column {twice[0]!r} more than once")
    for name in table.column_names:
        if name not in known:
            raise SchemaError(f"{file}: unknown column {name!r}{known_names(name, known)}")
    if missing := [name for name in REQUIRED if name not in table.column_names]:
        raise SchemaError(f"{file}: has no column {missing[0]}; it needs {', '.join(REQUIRED)}")
    columns = []
    for field in SCHEMA:
        if field.name not in table.column_names:
            columns.append(pa.nulls(table.num_rows, field.type))
            continue
        try:
            # a log-probability may have more digits than are kept; a place or an id may not
            columns.append(table[field.name].cast(field.type, safe=field.name != "logprob"))
        except pa.ArrowException as error:
            raise SchemaError(f"{file}: column {field.name} is no {field.type}: {one_line(error)}") from error
        if field.name in ("id", "index") and columns[-1].null_count:
            raise SchemaError(f"{file}: column {field.name} has {columns[-1].null_count} empty entries")
    return pa.table(columns, schema=SCHEMA)


def _texts(column: pa.ChunkedArray) -> tuple[list[str], np.ndarray]:
    """(different texts, int32 place of each line's)."""
    encoded = column.combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy(zero_copy_only=False).astype(np.int32)


def _optional(column: pa.ChunkedArray) -> tuple[list[str], np.ndarray] | None:
    """None where any line lacks it."""
    return None if column.null_count or not len(column) else _texts(column)


def _check_values(table: TokenTable) -> None:
    wrong = np.flatnonzero(~np.isfinite(table.logprob) | (table.logprob > HIGHEST))
    if len(wrong):
        line = int(wrong[0])
        raise SchemaError(
            f"{table.path}: {table.place(line)}: log-probability {table.logprob[line]}; it must be the natural "
            "logarithm of a probability, 0 at most"
        )
    wrong = np.flatnonzero(table.index < 0)
    if len(wrong):
        raise SchemaError(f"{table.path}: {table.place(int(wrong[0]))}: places in a sample count from 0")
