"""Manifest files of every form: rows, places and hashes, the same when scanned whole and when read by range."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from pack.manifest_files import current_stamp, find_manifests, read_range, scan_file
from schemas.errors import ManifestError, UnsupportedError
from schemas.manifest import content_key

ROWS = [{"id": f"r{i}", "videos": [f"{i}.mp4"], "conversations": [{"from": "human", "value": "é\n"}]} for i in range(7)]


def _datasets_folder(folder: Path, rows: list[dict], files: int = 2) -> Path:
    """What `Dataset.save_to_disk` writes: Arrow streams and state.json."""
    folder.mkdir()
    names = [f"data-{i:05d}-of-{files:05d}.arrow" for i in range(files)]
    for name, part in zip(names, (rows[: len(rows) // 2], rows[len(rows) // 2 :]), strict=True):
        table = pa.Table.from_pylist(part)
        with pa.ipc.new_stream(str(folder / name), table.schema) as out:
            out.write_table(table, max_chunksize=2)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(json.dumps(r) for r in ROWS),
        "\r\n".join(json.dumps(r) for r in ROWS) + "\r\n",
        "\ufeff" + "\n\n".join(json.dumps(r, ensure_ascii=False) for r in ROWS) + "\n\n\n",
    ],
    ids=["no last break", "crlf", "bom and blank lines"],
)
def test_jsonl_rows(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(text.encode())
    (file,) = find_manifests(str(path))
    found = list(scan_file(file))
    assert [row.value for row in found] == ROWS
    assert [row.number for row in found] == list(range(7))
    lines = [line for line in text.removeprefix("\ufeff").split("\n") if line.strip()]
    assert [row.hash for row in found] == [xxhash.xxh3_64_intdigest(line.strip().encode()) for line in lines]
    ends = [row.start for row in found[1:]] + [file.size]
    for a in range(7):
        for b in range(a + 1, 8):
            part = list(read_range(file, a, b - a, found[a].start, ends[b - 1]))
            assert part == found[a:b]


@settings(max_examples=50, deadline=None)
@given(lines=st.lists(st.one_of(st.text(max_size=30), st.sampled_from(["", "  ", "{", '{"a":1}', "[1]", "null"]))))
def test_any_text_gives_a_row_per_line_that_is_not_blank(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    path = tmp_path_factory.mktemp("m") / "m.jsonl"
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    (file,) = find_manifests(str(path))
    expected = [line for line in path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
    found = list(scan_file(file))
    assert len(found) == len(expected)
    for row, line in zip(found, expected, strict=True):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            assert row.value == value
        else:
            assert isinstance(row.value, str)
            assert "JSON" in row.value


def test_parquet_and_arrow_give_the_same_rows_and_hashes(tmp_path: Path) -> None:
    path = tmp_path / "m.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=3)
    (parquet,) = find_manifests(str(path))
    folder = _datasets_folder(tmp_path / "ds", ROWS)
    arrow = find_manifests(str(folder))
    assert [f.path.rsplit("/", 1)[1] for f in arrow] == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    whole = list(scan_file(parquet))
    assert [row.value for row in whole] == ROWS
    assert [row.hash for row in whole] == [content_key(row) for row in ROWS]
    pieces = [row for file in arrow for row in scan_file(file)]
    assert [(row.value, row.hash) for row in pieces] == [(row.value, row.hash) for row in whole]
    for start in range(7):
        for count in range(1, 8 - start):
            assert list(read_range(parquet, start, count, 0, 0)) == whole[start : start + count]
    assert [row.value for row in read_range(arrow[1], 1, 2, 0, 0)] == ROWS[4:6]


def test_a_folder_of_manifests_is_taken_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl"):
        (tmp_path / name).write_text(json.dumps({"conversations": name}) + "\n")
    (tmp_path / "notes.txt").write_text("no manifest")
    assert [Path(f.path).name for f in find_manifests(str(tmp_path))] == ["a.jsonl", "b.jsonl"]


def test_urls_are_read_like_files(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    (local,), (url,) = find_manifests(str(path)), find_manifests(f"local://{path}")
    assert "://" in url.path
    assert list(scan_file(url)) == list(scan_file(local))
    assert url.stamp == current_stamp(url)
    assert find_manifests(f"file://{path}") == [local]


def test_a_written_file_has_another_stamp(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("{}\n")
    (before,) = find_manifests(str(path))
    assert current_stamp(before) == before.stamp
    path.write_text("{}\n{}\n")
    assert current_stamp(before) != before.stamp
    path.unlink()
    with pytest.raises(ManifestError, match="gone"):
        current_stamp(before)


@pytest.mark.parametrize(
    ("name", "content", "kind", "said"),
    [
        ("none.jsonl", None, ManifestError, "there is no"),
        ("m.csv", "a,b", ManifestError, "is none of .jsonl"),
        ("m.jsonl.gz", "x", UnsupportedError, "unpack it"),
        ("m.json", " [ {} ]", UnsupportedError, "one object per line"),
    ],
)
def test_what_is_no_manifest_says_so(
    tmp_path: Path, name: str, content: str | None, kind: type[Exception], said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(kind, match=said):
        find_manifests(str(tmp_path / name))


def test_damaged_parquet_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "m.parquet").write_bytes(b"PAR1 but not more")
    (file,) = find_manifests(str(tmp_path / "m.parquet"))
    with pytest.raises(ManifestError, match=r"m\.parquet is not a readable parquet"):
        list(scan_file(file))


def test_dataset_dict_and_index_mapping_are_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ManifestError, match=r"train, test; name one: .*/train"):
        find_manifests(str(tmp_path))
    folder = _datasets_folder(tmp_path / "ds", ROWS)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"_indices_files": [{"filename": "i.arrow"}]}))
    with pytest.raises(UnsupportedError, match="flatten_indices"):
        find_manifests(str(folder))


def test_empty_folder_and_double_names_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"no state\.json"):
        find_manifests(str(tmp_path))
    (tmp_path / "m.jsonl").write_text("{}\n")
    with pytest.raises(ManifestError, match="twice"):
        find_manifests([str(tmp_path / "m.jsonl")] * 2)
