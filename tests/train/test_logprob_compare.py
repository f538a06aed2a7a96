"""Comparing dumps: the numbers, what does not belong together, and what other engines write."""

from __future__ import annotations

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from schemas.errors import (
    ConfigError,
    IncompleteSourceError,
    OmniloomError,
    SchemaError,
    UnsafeInputError,
    VerificationError,
)
from schemas.rollouts import Response, RolloutAbout, RolloutRow, prompt_digest
from train.data.rollout_files import write_rollouts
from train.logprob_compare import LogprobAgreement, compare_tables
from train.logprob_features import ENTRIES, FeatureKey, FeatureWriter, compare_features
from train.logprob_files import CARD, SCHEMA, DumpWriter, SampleLogprobs
from train.logprob_read import read_dump
from train.logprob_report import LETTER, TOP, WIDTH, _legend, agreement_lines, histogram_svg

ROW = {"id": "a", "source": "s", "index": 1, "token": 7, "logprob": -1.0, "modality": "text", "media": "text"}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Parquet with the columns of the first row."""
    fields = [SCHEMA.field(name) for name in rows[0]]
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(fields)), path)
    return path


def compared(first: Path, second: Path) -> LogprobAgreement:
    return compare_tables(read_dump(first), read_dump(second))


def row(**changes: Any) -> dict[str, Any]:
    return ROW | changes


FIRST = [
    row(id="a", index=1, logprob=-1.0),
    row(id="a", index=2, token=8, logprob=-2.0, modality="video", media="text"),
    row(id="b", index=1, logprob=-3.0, media="video"),
    row(id="b", index=2, token=9, logprob=-4.0, media="video"),
    row(id="c", index=5, logprob=-1.0),
]
SECOND = [
    row(id="b", index=2, token=9, logprob=-4.25, media="video"),
    row(id="b", index=1, logprob=-2.0, media="video"),
    row(id="a", index=2, token=8, logprob=-2.0, modality="video"),
    row(id="a", index=1, logprob=-1.5),
    row(id="b", index=3, logprob=-1.0),
]


def test_the_numbers(tmp_path: Path) -> None:
    found = compared(write(tmp_path / "a.parquet", FIRST), write(tmp_path / "b.parquet", SECOND))
    groups = {(group.by, group.name): group for group in found.groups}
    assert list(groups) == [
        ("all", "all"),
        ("modality", "text"),
        ("modality", "video"),
        ("media", "text"),
        ("media", "video"),
    ]
    every = groups["all", "all"]  # d: 0.5, 0, -1, 0.25
    assert (every.count, every.mean_abs, every.max_abs, every.mean) == (4, 0.4375, 1.0, -0.0625)
    assert (every.worst_sample, every.worst_sample_mean_abs) == ("b", 0.625)
    place = every.largest
    assert (place.id, place.index, place.token, place.first, place.second) == ("b", 1, 7, -3.0, -2.0)
    text = groups["modality", "text"]
    assert (text.count, text.max_abs) == (3, 1.0) and text.mean == pytest.approx(-0.25 / 3)
    assert groups["modality", "video"].max_abs == 0.0 and groups["media", "text"].mean_abs == 0.25
    assert found.only_first == (1, 1) and found.only_second == (1, 0) and found.untold == 0
    told = json.loads(json.dumps(found.as_json()))
    assert told["groups"][0]["largest"]["id"] == "b" and told["only_first"] == {"tokens": 1, "samples": 1}
    assert "differences" not in told


def test_what_is_allowed(tmp_path: Path) -> None:
    found = compared(write(tmp_path / "a.parquet", FIRST), write(tmp_path / "b.parquet", SECOND))
    found.check()
    found.check(mean_tolerance=0.625, max_tolerance=1.0)
    with pytest.raises(VerificationError) as error:
        found.check(mean_tolerance=0.5, max_tolerance=0.9)
    said = str(error.value).splitlines()
    assert said[1:] == [
        "all all: max |d| 1 is over 0.9, most in b at 1 (-3 and -2)",
        "modality text: mean |d| 0.583 is over 0.5, most in b",
        "modality text: max |d| 1 is over 0.9, most in b at 1 (-3 and -2)",
        "media video: mean |d| 0.625 is over 0.5, most in b",
        "media video: max |d| 1 is over 0.9, most in b at 1 (-3 and -2)",
    ]
    assert error.value.exit_code == 4


def test_other_tokens_are_an_error_that_names_the_place(tmp_path: Path) -> None:
    first = write(tmp_path / "a.parquet", FIRST)
    second = write(tmp_path / "b.parquet", [{**SECOND[0], "token": 10}, *SECOND[1:]])
    with pytest.raises(VerificationError, match=r"sample b, index 2: token 9 in .*a.parquet, 10 in .*; 1 of 4 common"):
        compared(first, second)


def test_nothing_in_common(tmp_path: Path) -> None:
    first = write(tmp_path / "a.parquet", [row(id="x")])
    with pytest.raises(VerificationError, match=r"no token in common; ids are such as 'x' and 'a'"):
        compared(first, write(tmp_path / "b.parquet", FIRST))


def test_ids_that_two_sources_share(tmp_path: Path) -> None:
    """Told apart by the source, where both dumps have it."""
    rows = [row(source="s", logprob=-1.0), row(source="t", logprob=-2.0)]
    first = write(tmp_path / "a.parquet", rows)
    second = write(tmp_path / "b.parquet", [{**rows[1], "logprob": -2.5}, rows[0]])
    found = compared(first, second)
    assert found.groups[0].count == 2 and found.groups[0].mean == 0.25
    bare = [{name: line[name] for name in ("id", "index", "logprob")} for line in rows]
    with pytest.raises(SchemaError, match=r"a.parquet: sample a, index 1 stands there twice.*column source"):
        compared(first, write(tmp_path / "c.parquet", bare[:1] * 2))
    with pytest.raises(SchemaError, match=r"d.parquet: sample a, index 1 stands there twice"):
        compared(second, write(tmp_path / "d.parquet", [rows[0], rows[0]]))


def test_what_another_engine_may_leave_out(tmp_path: Path) -> None:
    """Only id, index and log-probability; a first token without one."""
    lines = [{"id": "a", "index": 0, "logprob": None}, *({k: r[k] for k in ("id", "index", "logprob")} for r in SECOND)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "engine.jsonl").write_text(text)
    one, other = read_dump(write(tmp_path / "a.parquet", FIRST)), read_dump(tmp_path / "engine.jsonl")
    for found in (compare_tables(one, other), compare_tables(other, one)):
        assert found.groups[0].count == 4 and found.untold == 4 and found.groups[0].largest.token in (7, None)
        assert [group.name for group in found.groups if group.by == "modality"] == ["text", "video"]
    said = "\n".join(agreement_lines(compare_tables(one, other), one, other))
    assert "engine.jsonl: 1 tokens have no log-probability" in said and "4 tokens were matched by their place" in said
    alone = compare_tables(other, other)
    assert {group.name for group in alone.groups} == {"all", "unknown"}


def test_tensors_are_read_without_running_anything(tmp_path: Path) -> None:
    columns = {"id": ["a", "b"], "index": torch.tensor([1, 2]), "logprob": torch.tensor([-1.0, -4.5]), "token": [7, 9]}
    torch.save(columns, tmp_path / "dump.pt")
    found = compared(write(tmp_path / "a.parquet", FIRST), tmp_path / "dump.pt")
    assert (found.groups[0].count, found.groups[0].max_abs) == (2, 0.5)
    torch.save({**columns, "id": _Evil()}, tmp_path / "evil.pt")
    with pytest.raises(UnsafeInputError, match=r"evil.pt: holds more than"):
        read_dump(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()
    torch.save({**columns, "index": torch.tensor([1, 2, 3])}, tmp_path / "uneven.pt")
    with pytest.raises(SchemaError, match=r"3 \(index\)"):
        read_dump(tmp_path / "uneven.pt")


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("touch ran",))


WRONG: list[tuple[list[dict[str, Any]], str]] = [
    ([row(logprob=float("nan"))], "sample a, index 1: log-probability nan"),
    ([row(logprob=float("-inf"))], "sample a, index 1: log-probability -inf"),
    ([row(logprob=0.3)], r"log-probability 0\.3.*0 at most"),
    ([row(index=-1)], "sample a, index -1: places in a sample count from 0"),
    ([{"id": "a", "index": 1}], "has no column logprob"),
    ([row(id=None)], "column id has 1 empty entries"),
]


@pytest.mark.parametrize(("rows", "said"), WRONG)
def test_values_that_are_none(tmp_path: Path, rows: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        read_dump(write(tmp_path / "a.parquet", rows))


def test_columns_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": "a", "index": 1, "logprob": -1.0, "tokens": 3}) + "\n")
    with pytest.raises(SchemaError, match=r"unknown column 'tokens'; did you mean 'token'\?"):
        read_dump(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text(json.dumps({"id": "a", "index": 1.5, "logprob": -1.0}) + "\n")
    with pytest.raises(SchemaError, match="column index is no int32"):
        read_dump(tmp_path / "b.jsonl")
    (tmp_path / "c.parquet").write_bytes(b"PAR1")
    with pytest.raises(SchemaError, match=r"c.parquet: cannot be read"):
        read_dump(tmp_path / "c.parquet")


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_folders(tmp_path: Path) -> None:
    """Files side by side are one dump; ours needs its card and all that it lists."""
    folder = _folder(tmp_path / "engine")
    write(folder / "1.parquet", FIRST[:2])
    write(folder / "2.parquet", FIRST[2:])
    assert len(read_dump(folder)) == 5
    cut = _folder(tmp_path / "cut")
    write(cut / "logprobs-dp00000.parquet", FIRST)
    with pytest.raises(IncompleteSourceError, match="was not finished"):
        read_dump(cut)
    card = {"version": 1, "files": [{"name": "logprobs-dp00001.parquet"}], "features": []}
    (cut / CARD).write_text(json.dumps(card))
    with pytest.raises(IncompleteSourceError, match=r"logprobs-dp00001.parquet is gone"):
        read_dump(cut)
    (cut / CARD).write_text(json.dumps({**card, "version": 9}))
    with pytest.raises(SchemaError, match="version 9; this omniloom reads 1"):
        read_dump(cut)
    for path, said in ((_folder(tmp_path / "empty"), "holds no dump"), (tmp_path / "none", "no such file")):
        with pytest.raises(ConfigError, match=said):
            read_dump(path)


def test_rollouts_are_a_dump_of_the_engine_that_drew_them(tmp_path: Path) -> None:
    about = RolloutAbout(
        dataset="d", dataset_fingerprint="f", model="m", engine="sglang", scorer="exact", sampling={"temperature": 1.0}
    )
    responses = [
        Response([7, 8], [-1.0, -2.0], 1.0, "x", "stop"),
        Response([9], [-0.5], 0.0, "y", "length"),
    ]
    rows = [RolloutRow("a", "s", 3, prompt_digest([1, 2, 3]), responses)]
    write_rollouts(tmp_path / "rollouts", rows, about)
    found = read_dump(tmp_path / "rollouts")
    places = [
        (found.ids[s], i, t, p)
        for s, i, t, p in zip(found.sample, found.index, found.token, found.logprob, strict=True)
    ]
    assert places == [("a#0", 3, 7, -1.0), ("a#0", 4, 8, -2.0), ("a#1", 3, 9, -0.5)]


def test_lines_are_written_in_groups_that_are_sorted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.logprob_files.GROUP_TOKENS", 5)
    writer = DumpWriter(tmp_path, 3)
    samples = {"d": 3, "b": 2, "a": 0, "c": 4, "e": 1}
    for key, count in samples.items():
        numbers = np.arange(1, count + 1, dtype=np.int32)
        kinds = (numbers % 4).astype(np.int8)
        writer.add(SampleLogprobs(key, "s", "audio+video", numbers, numbers + 100, -numbers.astype(np.float32), kinds))
    assert [path.name[:5] for path in tmp_path.iterdir()] == [".logp"]
    done = writer.finish()
    assert done is not None and (done.name, done.samples, done.tokens) == ("logprobs-dp00003.parquet", 5, 10)
    file = pq.ParquetFile(tmp_path / done.name)
    groups = [file.read_row_group(number).to_pylist() for number in range(file.num_row_groups)]
    assert [[line["id"] for line in group] for group in groups] == [["b", "b", "d", "d", "d"], ["c"] * 4 + ["e"]]
    assert groups[1][3] == {
        "id": "c", "source": "s", "index": 4, "token": 104, "logprob": -4.0, "modality": "text", "media": "audio+video",
    }  # fmt: skip
    assert [line["modality"] for line in groups[1][:3]] == ["video", "audio", "image"]
    empty = DumpWriter(tmp_path, 4)
    assert empty.finish() is None and len(list(tmp_path.iterdir())) == 1


def _features(folder: Path, pieces: dict[tuple[str, int, int], torch.Tensor], ranks: int = 1) -> list[Path]:
    """Pieces (id, start, stop) -> rows, dealt to so many ranks."""
    folder.mkdir()
    writers = [FeatureWriter(folder, 0, rank) for rank in range(ranks)]
    for number, ((key, start, stop), rows) in enumerate(pieces.items()):
        writers[number % ranks].add(FeatureKey("s", key, 0, "video", "rows", start, stop), rows.clone())
    for writer in writers:
        writer.flush()
    return sorted(folder.iterdir())


def test_features_in_pieces_and_whole(tmp_path: Path) -> None:
    rows = torch.arange(12.0).view(6, 2)
    whole = _features(tmp_path / "a", {("x", 0, 3): rows, ("y", 0, 1): rows[:2], ("z", 0, 1): rows[:1]})
    cut = _features(tmp_path / "b", {("x", 0, 1): rows[:2], ("x", 1, 3): rows[2:] + 0.5, ("y", 0, 1): rows[:2]}, 2)
    assert len(cut) == 2
    (found,) = compare_features(whole, cut)
    assert (found.kind, found.part, found.count, found.alone, found.worst) == ("video", "rows", 2, 1, "s/x/0.video")
    assert found.max_abs == 0.5 and found.relative == 0.5 / 11.5 and found.mean_abs == pytest.approx(0.5 * 8 / 16)
    lost = _features(tmp_path / "c", {("x", 1, 3): rows[2:]})
    with pytest.raises(SchemaError, match="does not follow the piece before it, which ends at 0"):
        compare_features(whole, lost)
    other = _features(tmp_path / "d", {("x", 0, 3): rows[:, :1].clone()})
    with pytest.raises(VerificationError, match=r"s/x/0.video, rows: \(6, 2\) in one dump, \(6, 1\) in the other"):
        compare_features(whole, other)
    save_file({"x": rows}, tmp_path / "other.safetensors", {ENTRIES: "[{}]"})
    with pytest.raises(SchemaError, match="no file of features"):
        compare_features(whole, [tmp_path / "other.safetensors"])
    found = LogprobAgreement("a", "b", (), (0, 0), (0, 0), 0, np.zeros(0), ([], np.zeros(0)), (found,))
    found.check(feature_tolerance=0.05)
    with pytest.raises(VerificationError, match=r"features of video rows: 0\.0435 of the greatest value is over 0\.01"):
        found.check(feature_tolerance=0.01)


def test_the_histogram(tmp_path: Path) -> None:
    found = compared(write(tmp_path / "a.parquet", FIRST), write(tmp_path / "<b>.parquet", SECOND))
    picture = histogram_svg(found)
    assert picture.startswith("<svg") and picture.count("<path") == 2 and "&lt;b&gt;.parquet" in picture
    assert "text, mean 0.58" in picture and "video, mean 0" in picture
    same = compared(tmp_path / "a.parquet", tmp_path / "a.parquet")
    assert histogram_svg(same).count("<path") == 2  # all are equal


def test_the_histogram_has_round_axes_and_room_for_its_legend(tmp_path: Path) -> None:
    found = compared(write(tmp_path / "a.parquet", FIRST), write(tmp_path / "b.parquet", SECOND))
    root = ElementTree.fromstring(histogram_svg(found))
    name = "{http://www.w3.org/2000/svg}"
    texts = [(element.text or "", element) for element in root.iter(f"{name}text")]
    ticks = [text for text, _ in texts if text.endswith("%")]
    assert ticks == ["0%", "20%", "40%", "60%", "80%", "100%"]
    assert "|d|, nats" in [text for text, _ in texts]
    (video,) = [path for path in root.iter(f"{name}path")][1:]  # every token is equal: the bar at 0 is full
    (zero,) = [element for text, element in texts if text == "0"]
    first = [float(x) for x in re.findall(r"[ML]([\d.]+) ", video.attrib["d"])][:4]
    assert (first[0] + first[2]) / 2 == pytest.approx(float(zero.attrib["x"]), abs=0.1)
    assert f" {TOP}.0 " in video.attrib["d"]
    legend, height = _legend([f"{kind}, mean 1.2e-07" for kind in ("text", "audio", "video", "image", "other")])
    found_texts = re.findall(r'<text x="([\d.]+)" y="(\d+)">(.*?)<', "".join(legend))
    places = [(float(x), int(y), text) for x, y, text in found_texts]
    assert len(places) == 5 and max(y for _, y, _ in places) < height
    for (x, y, text), (after, row, _) in pairwise(places):
        assert row > y or x + LETTER * len(text) < after
    assert all(x + LETTER * len(text) <= WIDTH for x, _, text in places)


@pytest.mark.parametrize("error", [ConfigError, SchemaError, VerificationError, UnsafeInputError])
def test_exit_codes(error: type[OmniloomError]) -> None:
    assert error.exit_code == {ConfigError: 2, SchemaError: 4, VerificationError: 4, UnsafeInputError: 6}[error]
