"""The Ray executor: one local Ray for the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from pack.job import run_job
from pack.plan_file import load_plan
from pack.rejects import final_rejects, read_plan_commits
from pack.report import read_events
from pack.storage import LocalStorage
from schemas.errors import OmniloomError
from tests.pack.job_fakes import MEDIA, job_config, row, tree_bytes, write_clips, write_manifest


def test_ray_gives_the_bytes_of_local_processes_and_loses_only_poison_rows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_clips(tmp_path, 18)
    deeds = {3: "exit", 7: "raise", 8: "segv"}
    manifest = write_manifest(tmp_path / "m.jsonl", [row(i, do=deeds.get(i, "")) for i in range(18)])
    kept = (".mds", ".parquet", "rejects.jsonl", "index.json")
    run_job(job_config(manifest, tmp_path / "local"), MEDIA)
    capfd.readouterr()
    config = job_config(manifest, tmp_path / "ray", executor={"kind": "ray", "workers": 2})
    done, _ = run_job(config, MEDIA)
    out, err = capfd.readouterr()
    assert (done.card.totals.rows_in, done.card.totals.rows_packed) == (18, 15)
    assert tree_bytes(tmp_path / "ray", kept) == tree_bytes(tmp_path / "local", kept)
    storage = LocalStorage(tmp_path / "ray")
    plan = load_plan(storage)
    reasons = {r.id: r.reason for r in final_rejects(storage, plan, read_plan_commits(storage, plan))}
    assert reasons == {"r3": "crashed", "r7": "preprocessor_failed", "r8": "crashed"}
    done_events = [e for e in read_events(storage) if e["event"] == "partition_done"]
    assert len(done_events) == len(plan.partitions)
    assert out == ""  # Ray is quiet
    assert all(line.startswith(("packing:", "planning:", "verifying:", "merging:")) for line in err.splitlines()), err
    assert run_job(config, MEDIA)[0].nothing_to_do


def test_a_cluster_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    write_clips(tmp_path, 1)
    manifest = write_manifest(tmp_path / "m.jsonl", [row(0)])
    config = job_config(manifest, tmp_path / "out", executor={"kind": "ray", "address": "127.0.0.1:1"})
    with pytest.raises(Exception, match=r"cannot start or reach the Ray cluster at 127\.0\.0\.1:1"):
        run_job(config, MEDIA)


def test_a_ray_that_does_not_start_in_time_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises a bare Exception then."""

    def late(**_: object) -> None:
        raise Exception("The current node timed out during startup.")  # as Ray does

    monkeypatch.setattr("ray.init", late)
    write_clips(tmp_path, 1)
    config = job_config(write_manifest(tmp_path / "m.jsonl", [row(0)]), tmp_path / "out", executor={"kind": "ray"})
    with pytest.raises(
        OmniloomError, match=r"cannot start or reach a local Ray: The current node timed out.*kind=local"
    ):
        run_job(config, MEDIA)
