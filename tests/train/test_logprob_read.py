"""Dumps of other engines, read as they are written or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from schemas.errors import IncompleteSourceError, SchemaError, UnsafeInputError
from train.logprob_compare import compare_tables
from train.logprob_files import CARD
from train.logprob_read import BLOCK_BYTES, TokenTable, read_dump

LINE = {"id": "a", "index": 1, "logprob": -1.0}
COLUMNS = {"id": ["a"], "index": torch.tensor([1]), "logprob": torch.tensor([-1.0])}


def lines(path: Path, rows: list[dict[str, Any]]) -> TokenTable:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_dump(path)


@pytest.mark.parametrize(
    "key", ["2024-01-01", "2024-01-01T00:00:00Z", "2024-01-01 10:20:30", "12:30:00", "007", "1e5", "true", "null", ""]
)
def test_ids_of_jsonl_stay_as_they_are(key: str, tmp_path: Path) -> None:
    """Also where each looks like something that is no text."""
    rows = [{**LINE, "id": key, "source": key, "index": index, "logprob": -index} for index in (1, 2)]
    found = lines(tmp_path / "a.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert found.ids == [key] and found.source is not None and found.source[0] == [key]
    both = compare_tables(found, read_dump(tmp_path / "a.parquet"))
    assert (both.groups[0].count, both.groups[0].max_abs) == (2, 0.0)


def test_ids_may_be_numbers_in_every_line(tmp_path: Path) -> None:
    assert lines(tmp_path / "a.jsonl", [{**LINE, "id": 7}, {**LINE, "id": 10**12}]).ids == ["7", "1000000000000"]
    with pytest.raises(SchemaError, match=r"b\.jsonl: cannot be read: .*id. changed from string to number in row 1"):
        lines(tmp_path / "b.jsonl", [LINE, {**LINE, "id": 7}])


@pytest.mark.parametrize("size", [3_000_000, BLOCK_BYTES + 10])
def test_a_line_may_be_long(size: int, tmp_path: Path) -> None:
    key = "x" * size
    assert lines(tmp_path / "a.jsonl", [LINE, {**LINE, "id": key}, {**LINE, "id": "b"}]).ids == ["a", key, "b"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"index": 1.5}, "column index is no int32"),
        ({"index": 2**40}, "column index is no int32"),
        ({"token": -(2**40)}, "column token is no int32"),
        ({"index": "1"}, "index. changed from number to string"),
        ({"logprob": "2024-01-01"}, "logprob. changed from number to string"),
        ({"logprob": True}, "logprob. changed from number to boolean"),
        ({"id": 1.5}, "id. changed from string to number"),
        ({"id": {"a": 1}}, "id. changed from string to object"),
    ],
)
def test_lines_with_other_values(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=said):
        lines(tmp_path / "a.jsonl", [LINE | changes])


@pytest.mark.parametrize("names", [["id", "id", "logprob", "index"], ["id", "index", "logprob", "source", "source"]])
def test_a_column_twice(names: list[str], tmp_path: Path) -> None:
    values = {"id": ["a"], "index": [1], "logprob": [-1.0], "source": ["s"]}
    pq.write_table(pa.Table.from_arrays([pa.array(values[name]) for name in names], names), tmp_path / "a.parquet")
    with pytest.raises(SchemaError, match=r"a\.parquet: has the column '(id|source)' more than once"):
        read_dump(tmp_path / "a.parquet")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"logprob": torch.tensor([-1.0 + 1j])}, "column logprob is a tensor of shape .1., torch.complex64"),
        ({"index": torch.tensor([True])}, "column index is a tensor of shape .1., torch.bool"),
        ({"index": torch.tensor([1]).to_sparse()}, "column index is a tensor .* torch.sparse_coo"),
        ({"logprob": torch.empty(1, device="meta")}, "column logprob is a tensor .* meta"),
        ({"logprob": torch.tensor([[-1.0]])}, r"column logprob is a tensor of shape \[1, 1\]"),
        ({"id": ["a", 1]}, "column id is no list of texts or of numbers"),
        ({"logprob": [torch.tensor(-1.0)]}, "column logprob is no list of texts or of numbers"),
        ({"index": [2**70]}, "column index is no list of texts or of numbers"),
        ({"id": "a"}, "column id is a str"),
        ({"id": {"a": 1}}, "column id is a dict"),
    ],
)
def test_columns_of_tensors_that_are_no_numbers(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    torch.save(COLUMNS | changes, tmp_path / "a.pt")
    with pytest.raises(SchemaError, match=said):
        read_dump(tmp_path / "a.pt")


def test_tensors_of_a_training_are_numbers(tmp_path: Path) -> None:
    logprob = torch.tensor([-1.5], dtype=torch.bfloat16, requires_grad=True)
    torch.save(COLUMNS | {"logprob": logprob, "index": torch.tensor([2], dtype=torch.uint8)}, tmp_path / "a.pt")
    found = read_dump(tmp_path / "a.pt")
    assert (found.index.tolist(), found.logprob.tolist()) == ([2], [-1.5])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("data", [b"", b"hello world" * 10, b"\x80\x02", b"PK\x03\x04 no more", bytes(range(256))])
def test_bytes_that_torch_did_not_save(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises((SchemaError, UnsafeInputError), match=r"a\.pt: (cannot be read|holds more than)"):
        read_dump(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ({"version": 1}, "files and features are lists, not None and None"),
        ({"files": None, "features": []}, "files and features are lists, not None"),
        ({"files": {}, "features": []}, "files and features are lists, not {}"),
        ({"files": [], "features": "a"}, "files and features are lists"),
        ({"files": [5], "features": []}, "lists 5; a file has a name"),
        ({"files": [{}], "features": []}, "lists None; a file has a name"),
        ({"files": [{"name": 5}], "features": []}, "lists 5; a file has a name"),
        ({"files": [{"name": ""}], "features": []}, "lists ''; a file has a name"),
        ({"files": [], "features": [None]}, "lists None; a file has a name"),
    ],
)
def test_damaged_cards(card: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / CARD).write_text(json.dumps({"version": 1} | card))
    with pytest.raises(SchemaError, match=said):
        read_dump(tmp_path)


@pytest.mark.parametrize("text", [b"", b"\xff", b"[" * 100_000, b"[]", b"5"])
def test_cards_that_are_none(text: bytes, tmp_path: Path) -> None:
    (tmp_path / CARD).write_bytes(text)
    with pytest.raises(SchemaError, match=r"dump\.json: (is no JSON|version)"):
        read_dump(tmp_path)


def test_a_card_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist([LINE]), tmp_path / "x.parquet")
    for name in ("../x.parquet", str(tmp_path / "x.parquet"), "..", "."):
        for card in ({"files": [{"name": name}], "features": []}, {"files": [], "features": [name]}):
            (folder / CARD).write_text(json.dumps({"version": 1} | card))
            with pytest.raises(UnsafeInputError, match="the files of a dump lie beside"):
                read_dump(folder)
    (folder / CARD).write_text(json.dumps({"version": 1, "files": [{"name": "x.parquet"}], "features": []}))
    with pytest.raises(IncompleteSourceError, match="is gone"):
        read_dump(folder)
