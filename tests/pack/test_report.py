"""Counters, histograms, card text, progress lines and events."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pack.readme import human_bytes, plural, readme_text
from pack.report import Counts, Events, bad_ratio, bar, clock, job_line, job_progress, read_events, summary_table
from pack.rows_table import HISTOGRAMS, add_histograms, histogram
from pack.storage import LocalStorage, open_storage
from schemas.dataset import DatasetCard, Totals
from schemas.sample import COLUMNS


def _card(**changes: object) -> DatasetCard:
    values = {
        "shard_version": 1,
        "name": "clips",
        "created": "2026-01-01T00:00:00+00:00",
        "fingerprint": "f" * 32,
        "totals": Totals(
            rows_in=1000,
            rows_packed=990,
            samples=995,
            rejected={"missing_file": 8, "timeout": 2},
            video_s=7200.0,
            audio_s=3600.0,
            frames=14400,
            videos=990,
        ),
        "bytes": 3_400_000,
        "shards": 1,
        "partitions": 3,
        "partitions_planned": 3,
        "sources": {"web": 995},
        "histograms": {"video_s": histogram("video_s", [3.0] * 30 + [45.0] * 15)},
        "versions": {"av": "1"},
        "columns": dict(COLUMNS),
        "config": {},
    }
    return DatasetCard.model_validate(values | changes)


def test_readme_has_the_numbers_the_reasons_and_the_bars() -> None:
    text = readme_text(_card())
    for piece in ("| manifest rows | 1,000 |", "| packed | 990 |", "2.00 h", "3.4 MB in 1 shard |", "| web | 995 |"):
        assert piece in text
    assert "| missing_file | 8 | the file does not exist |" in text
    assert "Incomplete" not in text
    assert "Incomplete" in readme_text(_card(partitions=2))
    bars = {line.split()[0]: line.count("#") for line in text.splitlines() if line.strip().startswith(("2 ", "30 "))}
    assert bars == {"2": 30, "30": 15}


def test_summary_and_ratio() -> None:
    screen = Console(file=io.StringIO(), width=100)
    screen.print(summary_table(_card(), "/data/packed"))
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "1,000 in, 990 packed, 10 rejected" in text
    assert "8 missing_file" in text
    assert "2.000 h video (14,400 frames), 1.000 h sound" in text
    assert "/data/packed" in text
    assert bad_ratio(_card()) == 0.01


@given(st.lists(st.floats(0, 2e5), max_size=50), st.lists(st.floats(0, 2e5), max_size=50))
def test_histograms_add_up(a: list[float], b: list[float]) -> None:
    for name, (_, edges) in HISTOGRAMS.items():
        whole = histogram(name, [*a, *b])
        expected, _ = np.histogram(np.minimum([*a, *b], edges[-1]), edges)
        assert whole.counts == expected.tolist()
        assert sum(whole.counts) == len(a) + len(b)
        assert add_histograms([{name: histogram(name, a)}, {name: histogram(name, b)}]) == {name: whole}


def test_the_line_of_a_running_job() -> None:
    before = Counts(rows=100, rejects=1, media_s=3600, bytes=10**6)
    now = Counts(rows=150, rejects=3, media_s=7200, bytes=3 * 10**6)
    assert job_line(now, before, 200, 10.0) == "150 of 200 rows, 2.00 h, 0.1000 h/s, 3.0 MB, 3 rejected, 0:10 left"
    assert "left" not in job_line(before, before, 200, 10.0)
    assert before.plus([now, now]).rows == 400


@pytest.mark.parametrize(("seconds", "said"), [(5, "0:05"), (65, "1:05"), (3725, "1:02:05")])
def test_clock(seconds: float, said: str) -> None:
    assert clock(seconds) == said


@pytest.mark.parametrize(("size", "said"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2e15, "2000.0 TB")])
def test_human_bytes(size: float, said: str) -> None:
    assert human_bytes(size) == said
    assert (plural(1, "row"), plural(2000, "row")) == ("1 row", "2,000 rows")


def test_progress_is_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with bar("reading", 1000, line_every_s=0.02) as told:
        told.advance(400)
        time.sleep(0.1)
        told.expect(2000)
        time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("reading: 400 B of 1.0 kB, ")
    assert lines[-1].startswith("reading: 400 B of 2.0 kB, ")
    with job_progress(10, lambda: Counts(rows=4), Counts(rows=2), line_every_s=0.02):
        time.sleep(0.1)
    assert capsys.readouterr().err.splitlines()[-1].startswith("packing: 4 of 10 rows, ")
    with job_progress(10, lambda: Counts(rows=2), Counts(rows=2), lambda: False, line_every_s=0.02):
        time.sleep(0.1)
    assert capsys.readouterr().err.splitlines()[-1] == "packing: 2 of 10 rows, workers are starting"


@pytest.mark.parametrize("location", ["local", "memory"])
def test_events_are_lines_in_order_and_a_torn_one_is_left_out(location: str, tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path) if location == "local" else open_storage(f"memory://{tmp_path}")
    events = Events(storage)
    events.add("planned", rows=3)
    events.add("finished")
    events.flush()
    storage.append("events.jsonl", '{"event": "to')
    assert [e["event"] for e in read_events(storage)] == ["planned", "finished"]
    assert read_events(storage)[0]["rows"] == 3
    assert all(set(json.loads(line)) >= {"time", "event"} for line in storage.read("events.jsonl").splitlines()[:2])
