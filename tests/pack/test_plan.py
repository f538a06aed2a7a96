"""Partitions: independent of everything but rows and configuration, keep what is unchanged, find changes."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pack.config import PackConfig
from pack.fingerprint import fingerprint
from pack.plan import Plan, make_plan, with_retries
from pack.plan_file import load_plan, save_plan
from pack.scan import repeats
from pack.storage import LocalStorage
from schemas.errors import ManifestError, VerificationError

VERSIONS = {"av": "1"}


def _config(manifest: Path | list[str], **changes: object) -> PackConfig:
    names = [str(manifest)] if isinstance(manifest, Path) else manifest
    return PackConfig.model_validate({"manifest": names, "output": "out", "partition": {"target_mb": 40}, **changes})


def _plan(config: PackConfig, old: Plan | None = None) -> Plan:
    return make_plan(config, VERSIONS, fingerprint(config, VERSIONS), old)[0]


def _write(path: Path, rows: list[dict], end: str = "\n") -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + end)
    return path


def _video(i: int, **fields: object) -> dict:
    return {"id": f"r{i}", "videos": [{"path": f"{i}.mp4", **fields}], "conversations": "?"}


def _rows_of(plan: Plan) -> list[tuple[str, int]]:
    """(file, row) of every row that some base partition packs, in plan order."""
    return [
        (plan.files[s.file].path, s.row_start + k)
        for p in plan.partitions
        if not p.generation
        for s in p.segments
        for k in range(s.rows)
    ]


_media = st.lists(
    st.one_of(
        st.just("a.mp4"),
        st.fixed_dictionaries({"path": st.just("b.mp4"), "duration_s": st.floats(0, 4000)}),
        st.fixed_dictionaries({"path": st.just("c.mp4"), "bytes": st.integers(0, 10**9)}),
    ),
    max_size=3,
)
_row = st.fixed_dictionaries(
    {"conversations": st.text(max_size=3)},
    optional={"id": st.sampled_from(["a", "b", "c", 7, "7"]), "videos": _media, "images": _media},
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(_row, min_size=1, max_size=40), more=st.lists(_row, max_size=10), target=st.floats(1, 400))
def test_every_row_is_planned_once_and_growth_keeps_what_is_there(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict], more: list[dict], target: float
) -> None:
    path = _write(tmp_path_factory.mktemp("plan") / "m.jsonl", rows)
    config = _config(path, partition={"target_mb": target})
    plan = _plan(config)
    assert _rows_of(plan) == [(str(path), i) for i in range(len(rows))]
    assert _plan(config) == plan
    assert len({p.name for p in plan.partitions}) == len(plan.partitions)
    # duplicates and occurrences against a plain count over the rows
    explicit, equal = Counter(), Counter()
    for partition in plan.partitions:
        (segment,) = partition.segments
        for k in range(segment.rows):
            row = rows[segment.row_start + k]
            if "id" in row:
                assert (k in segment.duplicates) == (explicit[str(row["id"])] > 0)
                assert k not in dict(segment.occurrences)
                explicit[str(row["id"])] += 1
            else:
                text = json.dumps(row, sort_keys=True)
                assert dict(segment.occurrences).get(k, 0) == equal[text]
                equal[text] += 1
    _write(path, rows + more)
    grown = _plan(config, plan)
    assert grown.partitions[: len(plan.partitions)] == plan.partitions
    assert _rows_of(grown) == [(str(path), i) for i in range(len(rows) + len(more))]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 2)), max_size=60))
def test_repeats_equals_a_plain_count(rows: list[tuple[bool, int, int]]) -> None:
    named, high, low = (np.array([r[i] for r in rows], t) for i, t in enumerate((bool, np.uint64, np.uint64)))
    duplicate, occurrence = repeats(named, high, low)
    seen: Counter[tuple[bool, int, int]] = Counter()
    for i, row in enumerate(rows):
        assert duplicate[i] == (row[0] and seen[row] > 0)
        assert occurrence[i] == (0 if row[0] else seen[row])
        seen[row] += 1


def test_cuts_by_duration_then_bytes_then_count(tmp_path: Path) -> None:
    long = _plan(_config(_write(tmp_path / "a.jsonl", [_video(i, duration_s=600) for i in range(10)])))
    short = _plan(_config(_write(tmp_path / "b.jsonl", [_video(i, duration_s=6) for i in range(10)])))
    assert len(long.partitions) == 10
    assert len(short.partitions) == 1
    by_bytes = _plan(_config(_write(tmp_path / "c.jsonl", [_video(i, bytes=15 * 2**20) for i in range(10)])))
    assert [p.rows for p in by_bytes.partitions] == [2] * 5
    plain = _plan(_config(_write(tmp_path / "d.jsonl", [_video(i) for i in range(10)])))
    assert len({p.rows for p in plain.partitions[:-1]}) == 1


def test_the_span_counts_not_the_file(tmp_path: Path) -> None:
    spans = [_video(i, start=100.0, end=101.0, duration_s=7200) for i in range(10)]
    assert len(_plan(_config(_write(tmp_path / "a.jsonl", spans))).partitions) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"executor": {"kind": "local", "workers": 7}},
        {"output": "elsewhere"},
        {"preview": {"samples": 1}},
        {"rows": {"timeout_s": 5, "max_memory_gb": 1, "max_bad_ratio": 1}},
    ],
)
def test_what_changes_no_byte_changes_no_plan(tmp_path: Path, change: dict) -> None:
    path = _write(tmp_path / "m.jsonl", [_video(i) for i in range(9)])
    assert _plan(_config(path, **change)).partitions == _plan(_config(path)).partitions


@pytest.mark.parametrize(
    "change",
    [
        {"video": {"fps": 1.0}},
        {"video": {"quality": 94}},
        {"audio": {"codec": "flac"}},
        {"image": {"resize": "model"}},
        {"rows": {"truncated": "reject"}},
        {"shard": {"size_mb": 64}},
        {"source_name": "other"},
        {"preprocessor_args": {"a": 1}},
        {"seed": 1},
    ],
)
def test_what_changes_bytes_changes_every_key(tmp_path: Path, change: dict) -> None:
    path = _write(tmp_path / "m.jsonl", [_video(i) for i in range(9)])
    before, after = _plan(_config(path)), _plan(_config(path, **change))
    assert not {p.key for p in before.partitions} & {p.key for p in after.partitions}
    assert _plan(_config(path, **change), before).partitions == after.partitions


def test_a_default_that_is_written_out_is_the_same_configuration() -> None:
    config = _config(Path("m.jsonl"))
    written = PackConfig.model_validate_json(config.model_dump_json())
    assert fingerprint(written, VERSIONS) == fingerprint(config, VERSIONS)
    assert fingerprint(_config(Path("m.jsonl"), shard={"size_mb": 128}), VERSIONS) == fingerprint(config, VERSIONS)


def test_another_library_version_is_another_fingerprint() -> None:
    config = _config(Path("m.jsonl"))
    assert fingerprint(config, {"av": "1"}) != fingerprint(config, {"av": "2"})


def test_growth_of_one_file_of_several_keeps_the_others(tmp_path: Path) -> None:
    a = _write(tmp_path / "a.jsonl", [_video(i) for i in range(9)])
    b = _write(tmp_path / "b.jsonl", [_video(i + 100) for i in range(9)])
    config = _config([str(a), str(b)])
    plan = _plan(config)
    _write(a, [_video(i) for i in range(12)])
    grown = _plan(config, plan)
    assert grown.partitions[: len(plan.partitions)] == plan.partitions
    assert sum(p.rows for p in grown.partitions[len(plan.partitions) :]) == 3
    c = _write(tmp_path / "c.jsonl", [_video(i + 200) for i in range(4)])
    wider = _config([str(c), str(a), str(b)])
    more, change = make_plan(wider, VERSIONS, fingerprint(wider, VERSIONS), grown)
    assert (change.kept, change.dropped) == (len(grown.partitions), 0)
    assert {p.name for p in grown.partitions} <= {p.name for p in more.partitions}
    assert sorted(_rows_of(more)) == sorted((str(f), i) for f, n in ((a, 12), (b, 9), (c, 4)) for i in range(n))


def test_growth_behind_a_last_line_without_a_line_break(tmp_path: Path) -> None:
    path = _write(tmp_path / "m.jsonl", [_video(i) for i in range(5)], end="")
    config = _config(path)
    plan = _plan(config)
    _write(path, [_video(i) for i in range(8)])
    grown = _plan(config, plan)
    assert grown.partitions[: len(plan.partitions)] == plan.partitions
    assert _rows_of(grown) == [(str(path), i) for i in range(8)]


def test_an_edit_keeps_only_what_stands_before_it(tmp_path: Path) -> None:
    rows = [_video(i) for i in range(20)]
    path = _write(tmp_path / "m.jsonl", rows)
    config = _config(path)
    plan = _plan(config)
    assert len(plan.partitions) > 3
    place = plan.partitions[2].segments[0].row_start
    rows[place] = _video(999)
    _write(path, rows)
    after, change = make_plan(config, VERSIONS, plan.fingerprint, plan)
    assert change.kept == 2
    assert after.partitions[:2] == plan.partitions[:2]
    assert not {p.name for p in plan.partitions[2:]} & {p.name for p in after.partitions}
    assert sorted(_rows_of(after)) == [(str(path), i) for i in range(20)]


def test_a_shrunken_manifest_drops_the_tail(tmp_path: Path) -> None:
    path = _write(tmp_path / "m.jsonl", [_video(i) for i in range(20)])
    config = _config(path)
    plan = _plan(config)
    _write(path, [_video(i) for i in range(3)])
    assert sorted(_rows_of(_plan(config, plan))) == [(str(path), i) for i in range(3)]


def test_no_row_at_all_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("\n\n")
    with pytest.raises(ManifestError, match=r"not one row in .*m\.jsonl"):
        _plan(_config(path))


def test_saved_plan_is_loaded_as_it_was_and_damage_is_found(tmp_path: Path) -> None:
    rows = [_video(i) for i in range(20)] + [_video(3), {"conversations": "x"}, {"conversations": "x"}]
    path = _write(tmp_path / "m.jsonl", rows)
    storage = LocalStorage(tmp_path / "out")
    plan = with_retries(_plan(_config(path)), {0: [1, 0], 2: [0]})
    save_plan(storage, plan)
    assert load_plan(storage) == plan
    assert any(s.duplicates for p in plan.partitions for s in p.segments)
    assert any(s.occurrences for p in plan.partitions for s in p.segments)
    (table,) = (tmp_path / "out/plan").glob("*.parquet")
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 1
    table.write_bytes(data)
    with pytest.raises(VerificationError, match="damaged"):
        load_plan(storage)


def test_retries_hold_the_rejected_rows_and_outlive_growth(tmp_path: Path) -> None:
    path = _write(tmp_path / "m.jsonl", [_video(i) for i in range(20)])
    config = _config(path)
    plan = _plan(config)
    retried = with_retries(plan, {1: [0, 2], 3: [1]})
    (extra,) = retried.partitions[len(plan.partitions) :]
    assert extra.rows == 3
    assert [s.only for s in extra.segments] == [(0, 2), (1,)]
    assert extra.key != with_retries(retried, {1: [0, 2], 3: [1]}).partitions[-1].key
    _write(path, [_video(i) for i in range(23)])
    grown = _plan(config, retried)
    assert {p.name for p in retried.partitions} <= {p.name for p in grown.partitions}


def test_planning_keeps_no_object_per_row(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    sizes = []
    for count in (2000, 12000):
        _write(path, [_video(i) for i in range(count)])
        tracemalloc.start()
        make_plan(_config(path, partition={"target_mb": 4000}), VERSIONS, "x")
        sizes.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (sizes[1] - sizes[0]) / 10000 < 250  # bytes per row, arrays and sorting included
