"""A whole job with manifest, media and output in an object store (a local S3 server)."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import fsspec
import pytest

from pack.extract import extract
from pack.gc import collect_garbage
from pack.job import check_verified, retry_job, run_job, verify_job
from pack.partition import write_partition
from pack.plan_file import load_plan
from pack.reader import PackedDataset
from pack.status import read_status
from pack.storage import open_storage
from schemas.errors import VerificationError
from tests.pack.job_fakes import MEDIA, job_config, row, tasks_of, write_clips


@pytest.fixture
def place(s3: str) -> str:
    return f"{s3}/{uuid.uuid4().hex}"


def test_a_job_in_an_object_store(place: str, tmp_path: Path) -> None:
    write_clips(tmp_path, 12)
    rows = [row(i, do={2: "raise", 5: "exit"}.get(i, "")) for i in range(12)]
    for entry in rows:
        entry["videos"] = [{"path": str(tmp_path / entry["videos"][0]["path"]), "duration_s": 1.0}]
    fs = fsspec.filesystem("s3")
    fs.pipe_file(f"{place}/m.jsonl", "".join(json.dumps(r) + "\n" for r in rows).encode())
    config = job_config(Path("x"), f"{place}/out").model_copy(update={"manifest": f"{place}/m.jsonl"})
    done, _ = run_job(config, MEDIA)
    assert (done.card.totals.rows_in, done.card.totals.rows_packed) == (12, 10)
    assert done.card.totals.rejected == {"crashed": 1, "preprocessor_failed": 1}
    assert run_job(config, MEDIA)[0].nothing_to_do
    dataset = PackedDataset(config.output)
    assert [s.meta.id for s in dataset] == [f"r{i}" for i in range(12) if i not in (2, 5)]
    assert dataset.meta(3) == dataset[3].meta
    assert extract(dataset, tmp_path / "x", ["r7"]) == 1
    assert (tmp_path / "x/r7/video0/00000_0.000.jpg").read_bytes() == dataset[5].videos[0].frames[0]
    assert read_status(open_storage(config.output)).state == "finished"
    assert open_storage(config.output).exists("preview.html")
    # growth packs only the new row; a retry packs only the rejected ones
    rows += [dict(rows[0], id="new"), dict(rows[1], id="new2")]
    fs.pipe_file(f"{place}/m.jsonl", "".join(json.dumps(r) + "\n" for r in rows).encode())
    grown, change = run_job(config, MEDIA)
    assert (change.dropped, grown.card.totals.rows_packed) == (0, 12)
    retried, count = retry_job(config, media=MEDIA)
    assert (count, retried.card.totals.rows_in, retried.card.totals.rows_packed) == (2, 14, 12)


def test_the_loser_of_a_race_leaves_nothing_and_garbage_is_removed(place: str, tmp_path: Path) -> None:
    write_clips(tmp_path, 1)
    (tmp_path / "m.jsonl").write_text(json.dumps(row(0)) + "\n")
    config = job_config(tmp_path / "m.jsonl", place)
    (task,) = tasks_of(config)
    storage = open_storage(place)
    storage.write(f"parts/{task.partition.name}/dead/shard.00000.mds", b"of an attempt that was killed")
    assert write_partition(task, MEDIA).won
    assert not write_partition(task, MEDIA).won
    assert [r.why for r in collect_garbage(storage, 24, dry_run=False)] == []  # it may be uploading now
    (removed,) = collect_garbage(storage, -1, dry_run=False)
    assert removed.name == f"parts/{task.partition.name}/dead"
    assert len(storage.part_folders()) == 1


def test_a_changed_object_is_found(place: str, tmp_path: Path) -> None:
    write_clips(tmp_path, 2)
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row(i)) + "\n" for i in range(2)))
    config = job_config(tmp_path / "m.jsonl", place)
    run_job(config, MEDIA)
    storage = open_storage(place)
    plan = load_plan(storage)
    check_verified(storage, verify_job(storage, plan))
    (shard,) = [e.name for e in storage.files("parts") if e.name.endswith(".mds")]
    data = bytearray(storage.read(shard))
    data[len(data) // 4] ^= 1
    storage.write(shard, bytes(data))
    with pytest.raises(VerificationError, match=r"shard\.00000\.mds: sample 0: .*crc"):
        check_verified(storage, verify_job(storage, plan))
