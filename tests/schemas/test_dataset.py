"""Records of a dataset: strict JSON both ways, sums that must add up, and the row of the rows table."""

import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas.dataset import (
    ROWS_COLUMNS,
    DatasetCard,
    FileEntry,
    Histogram,
    PartitionCommit,
    Reject,
    Totals,
    add_totals,
    rows_record,
    totals_of,
)
from schemas.errors import SchemaError
from schemas.sample import COLUMNS, SampleMeta
from tests.schemas.test_sample import make

TOTALS = Totals(
    rows_in=3, rows_packed=2, samples=4, rejected={"bad_row": 1}, video_s=7200.0, audio_s=1800.0, flags={"vfr": 2}
)
REJECT = Reject(
    id="a", source="s", manifest="m", row=3, stage="fetch", reason="missing_file", detail="no a.mp4", media=["/a.mp4"]
)
COMMIT = PartitionCommit(
    partition=7,
    key="k",
    fingerprint="f",
    totals=TOTALS,
    files={"shard.00000.mds": FileEntry(bytes=12, xxh3_64="0123456789abcdef")},
    versions={"av": "18.1"},
)
CARD = DatasetCard(
    shard_version=1,
    name="clips",
    created="2026-11-29T00:00:00Z",
    fingerprint="f",
    totals=TOTALS,
    bytes=12,
    shards=1,
    partitions=1,
    partitions_planned=2,
    histograms={"duration_s": Histogram(unit="s", edges=[0.0, 1.0, 2.0], counts=[3, 1])},
    versions={},
    columns=COLUMNS,
    config={"pack": {"video": {"fps": 2.0}, "imports": []}},
)
RECORDS = [TOTALS, REJECT, COMMIT, CARD]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_json_both_ways(record):
    text = record.to_json()
    assert type(record).from_json(text) == record
    assert type(record).from_json(record.to_json(indent=2).encode()) == record
    assert type(record).from_json(text).to_json() == text
    assert "\n" not in text


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_unknown_missing_and_mistyped_fields_are_refused(record):
    data = json.loads(record.to_json())
    with pytest.raises(SchemaError, match=r"^f\.json: colour: Extra inputs"):
        type(record).from_json(json.dumps({**data, "colour": 1}), "f.json")
    with pytest.raises(SchemaError, match=r"^f\.json: text: Invalid JSON"):
        type(record).from_json(record.to_json()[:-2], "f.json")
    for key, value in data.items():
        wrong = [] if isinstance(value, str | dict) else "text"
        with pytest.raises(SchemaError, match=f"{key}: "):
            type(record).from_json(json.dumps({**data, key: wrong}))


def test_another_version_is_refused():
    for record in (COMMIT, CARD):
        with pytest.raises(SchemaError, match="version: Input should be 1"):
            type(record).from_json(json.dumps({**json.loads(record.to_json()), "version": 2}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rows_in": 4}, "4 rows in, but 2 packed and 1 rejected"),
        ({"rejected": {"nonsense": 1}}, "unknown reject reasons or flags: nonsense"),
        ({"flags": {"nonsense": 1}}, "nonsense"),
        ({"samples": 1}, "2 rows packed, but only 1 samples"),
        ({"frames": -1}, "greater than or equal to 0"),
        ({"video_s": float("nan")}, "finite"),
    ],
)
def test_totals_must_add_up(changes, says):
    with pytest.raises(ValidationError, match=says):
        Totals(**{**TOTALS.model_dump(), **changes})


def test_hours():
    assert (TOTALS.video_hours, TOTALS.audio_hours) == (2.0, 0.5)


@pytest.mark.parametrize(
    ("edges", "counts"), [([0.0], [1]), ([0.0, 1.0], []), ([1.0, 0.0], [1]), ([0.0, 1.0, 2.0], [1])]
)
def test_histograms_have_one_edge_more_than_counts(edges, counts):
    with pytest.raises(ValidationError, match="rising edges"):
        Histogram(unit="s", edges=edges, counts=counts)


def test_rejects_know_their_reasons():
    with pytest.raises(ValidationError, match="unknown reject reason 'odd'"):
        Reject(**{**REJECT.model_dump(), "reason": "odd"})
    with pytest.raises(ValidationError, match="stage"):
        Reject(**{**REJECT.model_dump(), "stage": "odd"})


def test_a_card_knows_whether_it_is_complete():
    assert not CARD.complete
    assert CARD.model_copy(update={"partitions": 2}).complete


META = make([(b"a0", b"a1"), (b"b0",)], [b"as", None], [b"x"], [b"i"]).meta


def test_rows_record_has_exactly_the_columns_and_fits_their_types():
    record = rows_record(META, "parts/7/shard.00000.mds", 5)
    assert list(record) == list(ROWS_COLUMNS)
    types = {
        name: pa.list_(pa.string()) if t.startswith("list") else pa.type_for_alias(t)
        for name, t in ROWS_COLUMNS.items()
    }
    table = pa.Table.from_pylist([record], schema=pa.schema(list(types.items())))
    assert table.to_pylist() == [record]


def test_rows_record_values():
    record = rows_record(META, "shard.00000.mds", 5)
    meta = record.pop("meta")
    assert record == {
        "id": "row1",
        "source": "clips",
        "shard": "shard.00000.mds",
        "index_in_shard": 5,
        "manifest": "m.jsonl",
        "row": 3,
        "num_videos": 2,
        "num_audios": 1,
        "num_images": 1,
        "num_frames": 3,
        "video_s": 1.5,
        "audio_s": 0.02,
        "text_chars": len("Who?") + len("A cat."),
        "media_bytes": META.media_bytes,
        "media_crc32": META.media_crc32,
        "flags": ["vfr"],
    }
    assert SampleMeta.model_validate_json(meta) == META


def test_totals_of_a_partition():
    totals = totals_of([META, META], rows_packed=1, rejects=[REJECT, REJECT])
    assert totals == Totals(
        rows_in=3,
        rows_packed=1,
        samples=2,
        rejected={"missing_file": 2},
        media_bytes=2 * META.media_bytes,
        video_s=3.0,
        audio_s=0.04,
        frames=6,
        videos=4,
        audios=2,
        images=2,
        flags={"vfr": 4},
    )


counts = st.integers(0, 50)
totals = st.builds(
    lambda packed, more, bad, crashed, vfr, hours: Totals(
        rows_in=packed + bad + crashed,
        rows_packed=packed,
        samples=packed + more,
        rejected={k: v for k, v in {"bad_row": bad, "crashed": crashed}.items() if v},
        frames=vfr * 3,
        video_s=hours * 0.5,
        flags={"vfr": vfr} if vfr else {},
    ),
    *[counts] * 6,
)


@given(st.lists(totals, max_size=5))
def test_totals_add_field_by_field(parts):
    total = add_totals(parts)
    for name in ("rows_in", "rows_packed", "samples", "frames", "video_s"):
        assert getattr(total, name) == sum(getattr(part, name) for part in parts)
    for name in ("rejected", "flags"):
        for key in {k for part in parts for k in getattr(part, name)}:
            assert getattr(total, name)[key] == sum(getattr(part, name).get(key, 0) for part in parts)
    assert add_totals([total]) == total
