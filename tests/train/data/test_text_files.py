from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.errors import ConfigError, IncompleteSourceError, RowError, VerificationError
from train.data import text_files, text_parquet
from train.data.text_files import TextReader, scan_text
from train.data.text_jsonl import BLOCK_ROWS


def lines(count: int, first: int = 0) -> str:
    return "".join(json.dumps({"n": i, "text": "é" * (i % 7)}) + "\n" for i in range(first, first + count))


def test_every_row_is_found_by_block_and_place(tmp_path: Path) -> None:
    count = BLOCK_ROWS * 2 + 10
    (tmp_path / "a.jsonl").write_text(lines(count).replace('{"n": 5,', '\n \n{"n": 5,'), encoding="utf-8")
    files = scan_text(str(tmp_path / "a.jsonl"))
    assert files.block_rows.tolist() == [BLOCK_ROWS, BLOCK_ROWS, 10]
    assert files.num_rows == count
    assert [row.mapping()["n"] for row in files] == list(range(count))
    reader = TextReader(pickle.loads(pickle.dumps(files)))
    for number in (count - 1, 0, 5, BLOCK_ROWS, 300):
        row = reader.read(*divmod(number, BLOCK_ROWS))
        assert (row.number, row.mapping()["n"]) == (number, number)


def test_a_folder_is_its_files_by_name_of_both_kinds(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(lines(3))
    (tmp_path / "sub").mkdir()
    table = pa.table({"n": list(range(10, 20)), "messages": [[{"role": "user", "content": str(i)}] for i in range(10)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    (tmp_path / "sub" / "c.ndjson").write_text("\ufeff" + lines(2, 30).rstrip("\n"), encoding="utf-8")
    (tmp_path / "notes.txt").write_text("no rows")
    files = scan_text(str(tmp_path))
    assert files.block_rows.tolist() == [4, 4, 2, 3, 2]
    assert [row.mapping()["n"] for row in files] == [*range(10, 20), 0, 1, 2, 30, 31]
    assert TextReader(files).read(1, 2).mapping() == {"n": 16, "messages": [{"role": "user", "content": "6"}]}
    assert TextReader(files).read(1, 2).number == 6


def test_rows_that_are_none_say_why(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": \n[1, 2]\n')
    good, broken, wrong = scan_text(str(tmp_path / "a.jsonl"))
    assert good.mapping() == {"n": 1}
    with pytest.raises(RowError, match=r"a\.jsonl, row 1: is no JSON"):
        broken.mapping()
    with pytest.raises(RowError, match=r"a\.jsonl, row 2: is a JSON list, not an object"):
        wrong.mapping()


def test_the_fingerprint_follows_the_content_not_the_place(tmp_path: Path) -> None:
    prints = []
    for name, text in (("x", lines(5)), ("y", lines(5)), ("z", lines(6))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text(text)
        prints.append(scan_text(str(tmp_path / name)).fingerprint)
    assert prints[0] == prints[1] != prints[2]
    for name, rows in (("p", 5), ("q", 5), ("r", 6)):
        pq.write_table(pa.table({"n": list(range(rows))}), tmp_path / f"{name}.parquet")
    found = [scan_text(str(tmp_path / f"{name}.parquet")).fingerprint for name in "pqr"]
    assert found[0] == found[1] != found[2]


def test_a_file_that_changes_under_the_run_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines(4))
    files = scan_text(str(path))
    path.write_text(lines(4).replace('"n": 2', '"n": 7'))
    with pytest.raises(VerificationError, match="was changed while it was in use: rows 0 to 3 are others now"):
        files.read_block(0)
    table = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": list(range(4))}), table)
    files = scan_text(str(table))
    pq.write_table(pa.table({"n": list(range(5))}), table)
    with pytest.raises(VerificationError, match="was changed while it was in use"):
        files.read_block(0)


def test_what_was_found_is_kept_until_the_file_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines(BLOCK_ROWS + 4))
    pq.write_table(pa.table({"n": list(range(4))}), tmp_path / "b.parquet")
    read: list[int] = []
    first = scan_text(str(tmp_path), read.append, tmp_path / "cache")
    assert sum(read) == os.path.getsize(path)
    again = scan_text(str(tmp_path), lambda _: pytest.fail("read again"), tmp_path / "cache")
    assert again.fingerprint == first.fingerprint
    assert [row.value for row in again] == [row.value for row in first]
    path.write_text(lines(BLOCK_ROWS + 5))
    assert scan_text(str(tmp_path), cache=tmp_path / "cache").num_rows == first.num_rows + 1


def test_paths_without_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(IncompleteSourceError, match="does not exist"):
        scan_text(str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match=r"has no file that ends in \.jsonl"):
        scan_text(str(tmp_path))
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(ConfigError, match="has no rows"):
        scan_text(str(tmp_path))
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        scan_text(str(tmp_path / "a.parquet"))


def test_text_in_an_object_store(s3: str) -> None:
    url = f"{s3}/text/a.jsonl"
    fsspec.filesystem("s3").pipe_file(url, lines(BLOCK_ROWS + 3).encode())
    files = scan_text(url)
    assert TextReader(files).read(1, 2).mapping()["n"] == BLOCK_ROWS + 2
    assert TextReader(files).read(1, 2).file == url


def test_large_row_groups_are_cut_into_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_parquet, "BLOCK_ROWS", 3)
    pq.write_table(pa.table({"n": list(range(10)), "m": [[{"t": str(i)}] for i in range(10)]}), tmp_path / "a.parquet")
    files = scan_text(str(tmp_path))
    assert files.block_rows.tolist() == [3, 3, 3, 1]
    assert [row.mapping()["n"] for row in files] == list(range(10))
    assert TextReader(files).read(2, 1) == (files.files[0].path, 7, {"n": 7, "m": [{"t": "7"}]})


def test_parquet_of_equal_shape_is_told_apart(tmp_path: Path) -> None:
    path, other = tmp_path / "a.parquet", tmp_path / "b"
    pq.write_table(pa.table({"n": [1, 2, 3]}), path)
    pq.write_table(pa.table({"n": [1, 7, 3]}), other)
    files = scan_text(str(path))
    stamp = path.stat()
    path.write_bytes(other.read_bytes())
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    with pytest.raises(VerificationError, match="was changed while it was in use: rows 0 to 2"):
        files.read_block(0)


def test_a_start_after_an_unseen_change_finds_the_file_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines(4))
    stamp = path.stat()
    scan_text(str(path), cache=tmp_path / "cache")
    path.write_text(lines(4).replace('"n": 2', '"n": 7'))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # as rsync -t and tar do
    files = scan_text(str(path), cache=tmp_path / "cache")
    with pytest.raises(VerificationError, match="was changed"):
        files.read_block(0)
    assert [row.mapping()["n"] for row in scan_text(str(path), cache=tmp_path / "cache")] == [0, 1, 7, 3]


def test_a_damaged_cache_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.jsonl").write_text(lines(4))
    first = scan_text(str(tmp_path / "a.jsonl"), cache=tmp_path / "cache")
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_bytes(kept.read_bytes()[:100])
    assert scan_text(str(tmp_path / "a.jsonl"), cache=tmp_path / "cache").fingerprint == first.fingerprint
    assert "is damaged and is made again" in caplog.text
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [kept.name]


def test_hidden_and_unfinished_files_are_no_rows(tmp_path: Path) -> None:
    for name in ("a.jsonl", ".a.jsonl", "_temporary/0/b.jsonl", ".cache/c.jsonl", "d.jsonl.tmp", "sub/e.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(lines(1))
    names = [Path(file.path.removeprefix("file://")).relative_to(tmp_path) for file in scan_text(str(tmp_path)).files]
    assert [str(name) for name in names] == ["a.jsonl", "sub/e.jsonl"]


def test_a_row_that_is_nested_too_deeply_is_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(1) + "[" * 100_000 + "\n" + '{"a":' * 100_000 + "\n")
    _, *deep = scan_text(str(tmp_path / "a.jsonl"))
    for number, row in enumerate(deep, start=1):
        with pytest.raises(RowError, match=rf"a\.jsonl, row {number}: is nested too deeply"):
            row.mapping()


def test_a_reader_keeps_blocks_by_number_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text(lines(BLOCK_ROWS * 4))
    files = scan_text(str(tmp_path / "a.jsonl"))
    read: list[int] = []
    opened = type(files).open_block
    monkeypatch.setattr(type(files), "open_block", lambda self, block: (read.append(block), opened(self, block))[1])

    def reads(reader: TextReader) -> list[int]:
        read.clear()
        for block in (0, 1, 2, 3, 0, 1, 2, 3):
            reader.read(block, 0)
        return list(read)

    assert reads(TextReader(files, kept=4)) == [0, 1, 2, 3]
    assert reads(TextReader(files, kept=2)) == [0, 1, 2, 3, 0, 1, 2, 3]
    monkeypatch.setattr(text_files, "KEPT_BYTES", 1)
    assert reads(TextReader(files, kept=4)) == [0, 1, 2, 3, 0, 1, 2, 3]
