"""One partition from rows to commit, in this process."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from streaming.base.format.mds.reader import MDSReader

from pack.config import PackConfig
from pack.guard import CrumbWriter, attempt_name, new_crumb, read_crumbs
from pack.partition import write_partition
from pack.reader import PackedDataset
from pack.row import MediaLoader
from pack.storage import LocalStorage
from schemas.dataset import PartitionCommit, Reject
from schemas.errors import ConfigError, ManifestError, RowError
from schemas.sample import PackedVideo, VideoMeta, from_columns
from schemas.sources import FileSource
from tests.pack.job_fakes import MEDIA, VERSIONS, job_config, row, tasks_of, tree_bytes, write_clips, write_manifest
from tests.pack.job_fakes import load_video as fake_video


def _commit(folder: Path) -> PartitionCommit:
    return PartitionCommit.from_json((folder / "_COMMIT").read_bytes())


def _rejects(folder: Path) -> list[Reject]:
    return [Reject.from_json(line) for line in (folder / "rejects.jsonl").read_text().splitlines()]


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    write_clips(tmp_path, 12)
    return tmp_path


def _manifest(clips: Path, rows: list[dict]) -> Path:
    return write_manifest(clips / "m.jsonl", rows)


def test_rows_become_samples_and_rejects_and_each_is_counted_once(clips: Path) -> None:
    rows = [row(i) for i in range(6)]
    rows[1]["do"] = "raise"
    rows[2]["videos"] = []
    rows[3]["videos"] = ["gone.txt"]
    rows[4] = {"id": "r0", "videos": ["4.txt"], "conversations": "the id of row 0"}
    config = job_config(_manifest(clips, rows), clips / "out", partition={"target_mb": 100})
    (clips / "m.jsonl").open("a").write("{broken\n")
    (task,) = tasks_of(config)
    receipt = write_partition(task, MEDIA)
    assert (receipt.rows, receipt.packed, receipt.rejected, receipt.won) == (7, 3, 4, True)
    folder = clips / "out/parts" / task.partition.name
    found = [(r.id, r.row, r.stage, r.reason) for r in _rejects(folder)]
    assert found == [
        ("r1", 1, "preprocess", "preprocessor_failed"),
        ("r3", 3, "fetch", "missing_file"),
        ("r0", 4, "row", "duplicate_id"),
        ("m.jsonl#row6", 6, "row", "bad_row"),
    ]
    assert "ZeroDivisionError: one over nothing" in _rejects(folder)[0].detail
    assert _rejects(folder)[1].media == [str(clips / "gone.txt")]
    commit = _commit(folder)
    assert commit.totals.rejected == {r[3]: 1 for r in found}
    assert (commit.totals.rows_in, commit.totals.rows_packed, commit.totals.frames) == (7, 3, 4)
    assert [s.meta.id for s in PackedDataset(str(folder))] == ["r0", "r2", "r5"]
    assert set(commit.files) == {p.name for p in folder.iterdir()} - {"_COMMIT"}
    assert list((clips / "out/_tmp").iterdir()) == []


def test_samples_are_what_the_loader_gave_through_streamings_own_reader(clips: Path) -> None:
    config = job_config(_manifest(clips, [row(i) for i in range(3)]), clips / "out", partition={"target_mb": 100})
    (task,) = tasks_of(config)
    write_partition(task, MEDIA)
    folder = clips / "out/parts" / task.partition.name
    (entry,) = json.loads((folder / "index.json").read_text())["shards"]
    reader = MDSReader.from_json(str(folder), "", entry)
    for i in range(3):
        sample = from_columns(reader[i])
        video, meta = fake_video(_source(clips, i), config)
        assert sample.videos == [video]
        assert sample.meta.videos == [meta]
        assert sample.meta.source == "test_poison"
        assert (sample.meta.provenance.manifest, sample.meta.provenance.row) == (str(clips / "m.jsonl"), i)
        assert sample.meta.provenance.versions == VERSIONS
        assert sample.meta.conversation[0] == ["user", ("video", None), ("text", f"q{i}")]
        assert PackedDataset(str(folder))[i] == sample
        assert PackedDataset(str(folder)).meta(i) == sample.meta


def _source(clips: Path, i: int) -> FileSource:
    return FileSource(str(clips / f"{i}.txt"))


def test_direct_isolated_and_repeated_attempts_give_the_same_bytes(clips: Path) -> None:
    rows = [row(i, do="raise" if i == 2 else "") for i in range(8)]
    results = []
    for name, isolated in (("a", False), ("b", True), ("c", False)):
        config = job_config(_manifest(clips, rows), clips / name, shard={"size_mb": 0.12}, source_name="test_poison")
        for task in tasks_of(config, isolated=isolated):
            assert write_partition(task, MEDIA).isolated == isolated
        kept = (".mds", ".parquet", "index.json", "rejects.jsonl", "_COMMIT")
        results.append(tree_bytes(clips / name / "parts", kept))
    assert len([n for n in results[0] if n.endswith(".mds")]) >= 3
    assert results[0] == results[1] == results[2]


def test_a_committed_partition_is_not_written_again(clips: Path) -> None:
    config = job_config(_manifest(clips, [row(0)]), clips / "out")
    (task,) = tasks_of(config)
    first, second = write_partition(task, MEDIA), write_partition(task, MEDIA)
    assert (first.won, second.won) == (True, False)
    assert (second.rows, second.packed, second.bytes) == (first.rows, first.packed, first.bytes)


def test_long_video_is_split_on_one_row(clips: Path) -> None:
    (clips / "long.txt").write_text("5.5")
    rows = [{"id": "long", "videos": ["long.txt"], "conversations": "q"}, row(1)]
    config = job_config(_manifest(clips, rows), clips / "out", video={"split_s": 2.0}, partition={"target_mb": 100})
    (task,) = tasks_of(config)
    receipt = write_partition(task, MEDIA)
    folder = clips / "out/parts" / task.partition.name
    assert (receipt.rows, receipt.packed) == (2, 2)
    found = list(PackedDataset(str(folder)))
    assert [s.meta.id for s in found] == ["long#000", "long#001", "long#002", "r1"]
    assert [s.meta.videos[0].duration_s for s in found] == [2.0, 2.0, 1.5, 1.0]
    totals = _commit(folder).totals
    assert (totals.rows_in, totals.rows_packed, totals.samples) == (2, 2, 4)


def _fails_late(source: FileSource, config: PackConfig) -> tuple[PackedVideo, VideoMeta]:
    if source.start_s:
        raise RowError("empty_video", "nothing in the second span", "video")
    return fake_video(source, config)


def test_a_later_span_that_fails_rejects_the_whole_row(clips: Path) -> None:
    (clips / "long.txt").write_text("3")
    rows = [{"id": "long", "videos": ["long.txt"], "conversations": "q"}, row(1)]
    config = job_config(_manifest(clips, rows), clips / "out", video={"split_s": 2.0}, partition={"target_mb": 100})
    (task,) = tasks_of(config)
    receipt = write_partition(task, replace(MEDIA, load_video=_fails_late))
    assert (receipt.packed, receipt.rejected) == (1, 1)
    folder = clips / "out/parts" / task.partition.name
    assert [s.meta.id for s in PackedDataset(str(folder))] == ["r1"]


def test_a_sample_larger_than_a_shard_is_rejected_before_anything_is_written(clips: Path) -> None:
    (clips / "big.txt").write_text("6")
    rows = [row(0), {"id": "big", "videos": ["big.txt"], "conversations": "q"}, row(1)]
    config = job_config(_manifest(clips, rows), clips / "out", shard={"size_mb": 0.125}, partition={"target_mb": 100})
    (task,) = tasks_of(config)
    write_partition(task, MEDIA)
    folder = clips / "out/parts" / task.partition.name
    (reject,) = _rejects(folder)
    assert (reject.id, reject.reason) == ("big", "too_large")
    assert "raise pack.shard.size_mb" in reject.detail
    sizes = [p.stat().st_size for p in folder.glob("*.mds")]
    assert sizes
    assert max(sizes) <= 0.125 * 2**20


@pytest.mark.parametrize("spare", [0, 1])
def test_the_limit_of_a_shard_is_exact(clips: Path, spare: int) -> None:
    config = job_config(_manifest(clips, [row(0)]), clips / "a")
    (task,) = tasks_of(config)
    write_partition(task, MEDIA)
    (shard,) = (clips / "a/parts").rglob("*.mds")
    size = shard.stat().st_size
    # the size limit itself stands in the header, so its digits count
    limit = next(n for n in range(size - 40, size + 40) if n == size - len("134217728") + len(str(n))) - spare
    config = job_config(clips / "m.jsonl", clips / "b", shard={"size_mb": limit / 2**20})
    (task,) = tasks_of(config)
    assert write_partition(task, MEDIA).packed == 1 - spare


def test_a_changed_manifest_is_an_error_and_leaves_nothing(clips: Path) -> None:
    config = job_config(_manifest(clips, [row(i) for i in range(4)]), clips / "out")
    (task,) = tasks_of(config)
    text = (clips / "m.jsonl").read_text()
    (clips / "m.jsonl").write_text(text.replace('"q2"', '"Q2"'))
    with pytest.raises(ManifestError, match=r"rows 0 to 3 are others now; run `omniloom pack plan`"):
        write_partition(task, MEDIA)
    assert not (clips / "out/parts").exists()
    assert list((clips / "out/_tmp").iterdir()) == []
    (clips / "m.jsonl").write_text(text + json.dumps(row(9)) + "\n")
    assert write_partition(task, MEDIA).packed == 4  # it only grew


def _full_disk(source: FileSource, config: PackConfig) -> tuple[PackedVideo, VideoMeta]:
    raise OSError(28, "No space left on device")


def _unexpected(source: FileSource, config: PackConfig) -> tuple[PackedVideo, VideoMeta]:
    raise KeyError("inner")


def test_a_fault_of_the_machine_is_not_blamed_on_the_row(clips: Path) -> None:
    config = job_config(_manifest(clips, [row(0)]), clips / "out")
    (task,) = tasks_of(config)
    with pytest.raises(Exception, match=r"No space left on device.*free some space"):
        write_partition(task, replace(MEDIA, load_video=_full_disk))
    assert not (clips / "out/parts").exists()
    receipt = write_partition(task, replace(MEDIA, load_video=_unexpected))
    assert receipt.rejected == 1
    (reject,) = _rejects(clips / "out/parts" / task.partition.name)
    assert (reject.reason, reject.detail) == ("unexpected", "KeyError: 'inner'")


def test_other_library_versions_than_the_plans_are_refused(clips: Path) -> None:
    config = job_config(_manifest(clips, [row(0)]), clips / "out")
    (task,) = tasks_of(config)
    with pytest.raises(ConfigError, match=r"fake 2.*not those the plan was made with"):
        write_partition(task, replace(MEDIA, versions={**VERSIONS, "fake": "2"}))


def test_what_a_preprocessor_leaves_in_metadata_is_kept_and_the_rng_is_the_rows_own(clips: Path) -> None:
    draws = []
    for rows in ([row(0), row(1)], [row(1)]):
        config = job_config(_manifest(clips, rows), clips / f"out{len(rows)}", source_name="test_plain")
        (task,) = tasks_of(config)
        write_partition(task, MEDIA)
        folder = clips / f"out{len(rows)}/parts" / task.partition.name
        draws.append({s.meta.id: s.meta.extra["draw"] for s in PackedDataset(str(folder))})
    assert draws[0]["r0"] != draws[0]["r1"]
    assert draws[0]["r1"] == draws[1]["r1"]


def test_a_dead_attempt_is_buried_and_its_row_gets_one_try_alone(clips: Path) -> None:
    config = job_config(_manifest(clips, [row(0), row(1)]), clips / "out")
    (task,) = tasks_of(config)
    storage = LocalStorage(clips / "out")
    for pid, job in ((2**22 - 7, "other"), (1, "job")):
        crumb = replace(new_crumb(job, task.partition.name, 2, False), pid=pid, offset=1, row=1)
        CrumbWriter(storage.new_staging(attempt_name(crumb)), crumb)
    running = new_crumb("another", task.partition.name, 2, False)  # of another job that runs now
    alive = storage.new_staging(attempt_name(running))
    CrumbWriter(alive, running)
    assert write_partition(task, MEDIA).isolated
    assert [folder for folder, _, _ in read_crumbs(storage.staging_root)] == [alive]


def test_the_fake_loader_is_picklable() -> None:
    assert isinstance(pickle.loads(pickle.dumps(MEDIA)), MediaLoader)


def test_half_a_surrogate_pair_costs_its_own_row_only(clips: Path) -> None:
    rows = [row(0), row(1) | {"id": "bad\ud800"}, row(2) | {"source": "bad\udfff"}, row(3)]
    path = clips / "m.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    (task,) = tasks_of(job_config(path, clips / "out", partition={"target_mb": 100}))
    receipt = write_partition(task, MEDIA)
    assert (receipt.packed, receipt.rejected) == (2, 2)
    assert [r.id for r in _rejects(clips / "out/parts" / task.partition.name)] == ["bad\\ud800", "r2"]
