"""Whole jobs over fake media: resume, growth, retries, isolation, kills and races."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from streaming import StreamingDataset

from pack.config import PackConfig
from pack.gc import collect_garbage
from pack.guard import attempt_name, new_crumb
from pack.job import check_threshold, retry_job, run_job
from pack.merge import merge
from pack.plan_file import load_plan
from pack.reader import PackedDataset
from pack.rejects import final_rejects, read_plan_commits
from pack.report import read_events
from pack.standing import Standing
from pack.status import read_status, status_lines
from pack.storage import LocalStorage
from schemas.dataset import Reject
from schemas.errors import ConfigError, DataThresholdError, IncompleteSourceError
from schemas.sample import from_columns
from tests.pack.job_fakes import MEDIA, job_config, row, tree_bytes, write_clips, write_manifest

ROOT = Path(__file__).parents[2]


def _rejects(config: PackConfig) -> list[Reject]:
    storage = LocalStorage(Path(config.output))
    plan = load_plan(storage)
    return list(final_rejects(storage, plan, read_plan_commits(storage, plan)))


def _start(config: PackConfig, folder: Path, before: Callable[[], Any] | None = None) -> subprocess.Popen[str]:
    path = folder / "config.json"
    path.write_text(config.model_dump_json())
    command = [sys.executable, "-m", "tests.pack.job_driver", str(path)]
    return subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=before
    )


def _clean_tmp(config: PackConfig) -> bool:
    tmp = Path(config.output, "_tmp")
    return not tmp.exists() or list(tmp.iterdir()) == []


def test_a_job_from_manifest_to_dataset_then_nothing_to_do_then_growth(tmp_path: Path) -> None:
    write_clips(tmp_path, 90)
    rows = [row(i, do="raise" if i == 5 else "") for i in range(40)]
    config = job_config(write_manifest(tmp_path / "m.jsonl", rows), tmp_path / "out")
    done, change = run_job(config, MEDIA)
    assert (done.nothing_to_do, change.kept) == (False, 0)
    totals = done.card.totals
    assert (totals.rows_in, totals.rows_packed, totals.rejected) == (40, 39, {"preprocessor_failed": 1})
    assert done.card.partitions > 3
    assert totals.video_s == 39
    before = tree_bytes(tmp_path / "out", (".mds", "index.json", "dataset.json", "README.md", ".html"))
    again, change = run_job(config, MEDIA)
    assert (again.nothing_to_do, change, again.card) == (True, None, done.card)
    assert tree_bytes(tmp_path / "out", (".mds", "index.json", "dataset.json", "README.md", ".html")) == before
    # MosaicML's own reader takes the merged index
    dataset = StreamingDataset(local=str(tmp_path / "out"), batch_size=1)
    samples = [from_columns(dataset[i]) for i in range(len(dataset))]
    assert [s.meta.id for s in samples] == [f"r{i}" for i in range(40) if i != 5]
    assert samples == list(PackedDataset(str(tmp_path / "out")))
    # a partition that was removed is packed again, alone
    victim = load_plan(LocalStorage(tmp_path / "out")).partitions[2].name
    shutil.rmtree(tmp_path / "out/parts" / victim)
    restored, _ = run_job(config, MEDIA)
    assert restored.card == done.card
    packed = [e["partition"] for e in read_events(LocalStorage(tmp_path / "out")) if e["event"] == "partition_done"]
    assert packed[done.card.partitions :] == [victim]
    assert tree_bytes(tmp_path / "out", (".mds", "index.json", "dataset.json", "README.md")).items() <= before.items()
    # fifty more rows: only those are packed
    write_manifest(tmp_path / "m.jsonl", rows + [row(i) for i in range(40, 90)])
    grown, change = run_job(config, MEDIA)
    assert (change.kept, change.dropped) == (done.card.partitions, 0)
    packed = [e for e in read_events(LocalStorage(tmp_path / "out")) if e["event"] == "partition_done"]
    assert len({e["partition"] for e in packed}) == grown.card.partitions
    assert sum(e["rows"] for e in packed[done.card.partitions + 1 :]) == 50
    assert (grown.card.totals.rows_in, grown.card.totals.rows_packed) == (90, 89)
    after = tree_bytes(tmp_path / "out" / "parts")
    assert {k: after[k] for k in after if k.split("/")[0] in {n.split("/")[1] for n in before if "parts/" in n}}.items()
    assert all(after[n.removeprefix("parts/")] == data for n, data in before.items() if n.endswith(".mds"))
    assert _clean_tmp(config)


def test_poison_rows_lose_only_themselves(tmp_path: Path) -> None:
    write_clips(tmp_path, 24)
    deeds = {1: "exit", 4: "segv", 7: "sleep", 9: "eat", 10: "raise", 15: "spin", 16: "exit", 17: "quit"}
    rows = [row(i, do=deeds.get(i, "")) for i in range(24)]
    config = job_config(
        write_manifest(tmp_path / "m.jsonl", rows),
        tmp_path / "out",
        rows={"timeout_s": 4, "max_memory_gb": 0.4, "max_bad_ratio": 1.0},
        partition={"target_mb": 3},
    )
    done, _ = run_job(config, MEDIA)
    assert (done.card.totals.rows_in, done.card.totals.rows_packed) == (24, 16)
    found = {r.id: (r.reason, r.detail) for r in _rejects(config)}
    assert {name: reason for name, (reason, _) in found.items()} == {
        "r1": "crashed",
        "r4": "crashed",
        "r7": "timeout",
        "r9": "oom",
        "r10": "preprocessor_failed",
        "r15": "timeout",
        "r16": "crashed",
        "r17": "preprocessor_failed",
    }
    assert "exit code 7" in found["r1"][1]
    assert "SIGSEGV" in found["r4"][1]
    assert "rows.timeout_s = 4" in found["r7"][1]
    assert [s.meta.id for s in PackedDataset(config.output)] == [f"r{i}" for i in range(24) if i not in deeds]
    deaths = [e for e in read_events(LocalStorage(Path(config.output))) if e["event"] == "worker_died"]
    assert len(deaths) <= done.card.partitions  # once per partition, however many poison rows it has
    with pytest.raises(DataThresholdError, match=r"8 of 24 rows were rejected \(33\.3%\).*allows 5\.0%"):
        check_threshold(done.card, job_config(tmp_path / "m.jsonl", tmp_path / "out", rows={"max_bad_ratio": 0.05}))


def test_two_workers_work_at_the_same_time(tmp_path: Path) -> None:
    write_clips(tmp_path, 2)
    rows = [row(i, do="meet", at=str(tmp_path), who=f"here{i}", whom=f"here{1 - i}") for i in range(2)]
    config = job_config(write_manifest(tmp_path / "m.jsonl", rows), tmp_path / "out", partition={"target_mb": 0.01})
    done, _ = run_job(config, MEDIA)
    assert (done.card.partitions, done.card.totals.rows_packed) == (2, 2)


def test_a_job_of_nothing_but_bad_rows_ends_and_says_so(tmp_path: Path) -> None:
    write_manifest(tmp_path / "m.jsonl", [row(i) for i in range(3)])
    config = job_config(tmp_path / "m.jsonl", tmp_path / "out")
    done, _ = run_job(config, MEDIA)
    assert (done.card.totals.samples, done.card.totals.rejected) == (0, {"missing_file": 3})
    assert len(PackedDataset(config.output)) == 0
    assert run_job(config, MEDIA)[0].nothing_to_do


def _where_it_stood(config: PackConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """(rows done, rejected) when the last run began, and now, as the progress line tells them."""
    storage = LocalStorage(Path(config.output))
    started = [event for event in read_events(storage) if event["event"] == "started"][-1]
    now = Standing(storage, load_plan(storage), "").now()
    return (started["rows"], started["rejects"]), (now.rows, now.rejects)


def test_retry_takes_only_rejected_rows_and_none_twice(tmp_path: Path) -> None:
    write_clips(tmp_path, 20)
    for i in (3, 8, 15):
        (tmp_path / f"{i}.txt").unlink()
    rows = [row(i) for i in range(20)] + [{**row(2), "conversations": "again"}]
    config = job_config(write_manifest(tmp_path / "m.jsonl", rows), tmp_path / "out")
    first, _ = run_job(config, MEDIA)
    assert first.card.totals.rejected == {"duplicate_id": 1, "missing_file": 3}
    for i in (3, 15):
        (tmp_path / f"{i}.txt").write_text("1")
    second, count = retry_job(config, media=MEDIA)
    assert count == 3
    assert _where_it_stood(config) == ((18, 1), (21, 2))
    totals = second.card.totals
    assert (totals.rows_in, totals.rows_packed, totals.rejected) == (21, 19, {"duplicate_id": 1, "missing_file": 1})
    assert [(r.id, r.attempts) for r in _rejects(config)] == [("r8", 2), ("r2", 1)]
    ids = [s.meta.id for s in PackedDataset(config.output)]
    assert sorted(ids) == sorted(f"r{i}" for i in range(20) if i != 8)
    (tmp_path / "8.txt").write_text("1")
    assert retry_job(config, ["crashed"], MEDIA)[1] == 0
    status = read_status(LocalStorage(tmp_path / "out"))
    card = second.card.totals
    assert (status.rows_planned, status.rows_done) == (card.rows_in, card.rows_in)
    assert status.rejected == sum(card.rejected.values())
    third, count = retry_job(config, ["missing_file"], MEDIA)
    assert _where_it_stood(config) == ((20, 1), (21, 1))
    assert (count, third.card.totals.rows_packed, third.card.totals.rejected) == (1, 20, {"duplicate_id": 1})
    again, change = run_job(config, MEDIA)
    assert (again.nothing_to_do, change) == (True, None)
    # growth keeps what the retries packed
    write_clips(tmp_path, 25)
    write_manifest(tmp_path / "m.jsonl", rows + [row(i) for i in range(20, 25)])
    grown, change = run_job(config, MEDIA)
    assert change.dropped == 0
    assert (grown.card.totals.rows_in, grown.card.totals.rows_packed) == (26, 25)
    with pytest.raises(ConfigError, match="other bytes"):
        retry_job(job_config(tmp_path / "m.jsonl", tmp_path / "out", seed=1), media=MEDIA)


def test_another_configuration_is_a_new_plan_and_gc_removes_the_old(tmp_path: Path) -> None:
    write_clips(tmp_path, 6)
    manifest = write_manifest(tmp_path / "m.jsonl", [row(i) for i in range(6)])
    config = job_config(manifest, tmp_path / "out")
    first, _ = run_job(config, MEDIA)
    second, change = run_job(job_config(manifest, tmp_path / "out", video={"fps": 3.0}), MEDIA)
    assert (change.kept, change.dropped) == (0, first.card.partitions)
    assert second.card.fingerprint != first.card.fingerprint
    assert [s.meta.videos[0].video_fps for s in PackedDataset(config.output)] == [3.0] * 6
    storage = LocalStorage(tmp_path / "out")
    told = collect_garbage(storage, 24, dry_run=True)
    assert len(told) == first.card.partitions
    assert collect_garbage(storage, 24, dry_run=False) == told
    assert collect_garbage(storage, 24, dry_run=False) == []
    assert len(storage.committed_names()) == second.card.partitions
    assert len(PackedDataset(config.output)) == 6


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A folder with a manifest of 40 slow rows, 3 of them bad, and the bytes of an undisturbed run."""
    folder = tmp_path_factory.mktemp("job")
    write_clips(folder, 40)
    deeds = {4: "raise", 17: "exit", 33: "raise"}
    manifest = write_manifest(folder / "m.jsonl", [row(i, do=deeds.get(i, "slow")) for i in range(40)])
    run_job(job_config(manifest, folder / "calm"), MEDIA)
    return folder, tree_bytes(folder / "calm", (".mds", ".parquet", "rejects.jsonl", "index.json"))


def _wait_for_events(config: PackConfig, count: int, process: subprocess.Popen[str], seconds: float = 60) -> None:
    """Until breadcrumbs or commits show that rows are being packed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if len(list(Path(config.output).glob("_tmp/*/crumb.json"))) >= count:
            return
        time.sleep(0.02)
    assert process.poll() is not None, "no row was packed in time"


def test_killed_at_random_moments_the_job_ends_as_if_undisturbed(undisturbed: tuple[Path, dict[str, bytes]]) -> None:
    folder, calm = undisturbed
    config = job_config(folder / "m.jsonl", folder / "killed")
    chance = random.Random(7)
    for _ in range(3):
        process = _start(config, folder)
        _wait_for_events(config, 1, process)
        time.sleep(chance.uniform(0, 0.4))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    # killed before the first breadcrumb of an attempt, or while its folder was being removed
    name = load_plan(LocalStorage(Path(config.output))).partitions[0].name
    bare = attempt_name(replace(new_crumb("gone", name, 2, False), pid=2**22 - 7))
    Path(config.output, "_tmp", bare).mkdir()
    out, err = _start(config, folder).communicate(timeout=120)
    assert json.loads(out.splitlines()[-1])[:3] == [40, 37, {"crashed": 1, "preprocessor_failed": 2}], err
    assert tree_bytes(folder / "killed", (".mds", ".parquet", "rejects.jsonl", "index.json")) == calm
    dead = [p for p in Path(config.output, "_tmp").iterdir()]
    assert dead == []


def test_two_runners_on_one_output_are_harmless(undisturbed: tuple[Path, dict[str, bytes]]) -> None:
    folder, calm = undisturbed
    config = job_config(folder / "m.jsonl", folder / "raced", executor={"kind": "local", "workers": 1})
    racers = [_start(config, folder) for _ in range(2)]
    for process in racers:
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        assert json.loads(out.splitlines()[-1])[:3] == [40, 37, {"crashed": 1, "preprocessor_failed": 2}]
    assert tree_bytes(folder / "raced", (".mds", ".parquet", "rejects.jsonl", "index.json")) == calm
    assert _clean_tmp(config)


def test_sigterm_stops_cleanly_and_says_how_to_go_on(undisturbed: tuple[Path, dict[str, bytes]]) -> None:
    folder, calm = undisturbed
    config = job_config(folder / "m.jsonl", folder / "stopped")
    process = _start(config, folder)
    _wait_for_events(config, 1, process)
    status = read_status(LocalStorage(folder / "stopped"))  # from another process, while it runs
    assert status.state == "running"
    assert status.attempts[0].alive
    assert "rows, at row" in status_lines(status)[-1]
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 5, err
    assert err.splitlines()[-1] == "error: stopped by SIGTERM; the same command goes on from here"
    assert _clean_tmp(config)
    assert "goes on from here" in read_status(LocalStorage(folder / "stopped")).state
    with pytest.raises(IncompleteSourceError, match="are not committed"):
        merge(LocalStorage(folder / "stopped"), load_plan(LocalStorage(folder / "stopped")))
    run_job(config, MEDIA)
    assert tree_bytes(folder / "stopped", (".mds", ".parquet", "rejects.jsonl", "index.json")) == calm
    assert read_status(LocalStorage(folder / "stopped")).state == "finished"


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(undisturbed: tuple[Path, dict[str, bytes]]) -> None:
    folder, calm = undisturbed
    config = job_config(folder / "m.jsonl", folder / "full")
    limit = 150_000  # bytes of a file: enough for the plan and the crumbs, not for a shard

    def smaller_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    process = _start(config, folder, smaller_disk)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    assert "File too large; free some space" in err.splitlines()[-1]
    assert _clean_tmp(config)
    assert not (folder / "full/index.json").exists()
    run_job(config, MEDIA)
    assert tree_bytes(folder / "full", (".mds", ".parquet", "rejects.jsonl", "index.json")) == calm


def test_partial_merge_only_when_allowed(undisturbed: tuple[Path, dict[str, bytes]]) -> None:
    folder, _ = undisturbed
    storage = LocalStorage(folder / "calm")
    plan = load_plan(storage)
    victim = folder / "calm/parts" / plan.partitions[1].name
    aside = folder / "aside"
    os.rename(victim, aside)
    try:
        with pytest.raises(IncompleteSourceError, match=rf"1 of {len(plan.partitions)} .*{plan.partitions[1].name}"):
            merge(storage, plan)
        card = merge(storage, plan, allow_partial=True)
        assert not card.complete
        assert card.totals.rows_in == 40 - plan.partitions[1].rows
    finally:
        os.rename(aside, victim)
    whole = merge(storage, plan)
    assert whole.complete
    first = (folder / "calm/index.json").read_bytes(), (folder / "calm/dataset.json").read_bytes()
    assert merge(storage, plan) == whole
    assert ((folder / "calm/index.json").read_bytes(), (folder / "calm/dataset.json").read_bytes()) == first
