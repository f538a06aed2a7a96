"""dead_samples: mask, and what becomes of shards that are gone, cut off, damaged or out of reach."""

from __future__ import annotations

import shutil
from pathlib import Path

import fsspec
import pytest

from schemas.errors import ConfigError, OmniloomError, VerificationError
from tests.train.data.loading import Setup, data_config, keys_of, write_clips
from train.config import BatchConfig
from train.data import packed_files
from train.data.packed_files import with_retries
from train.data.rank_plan import DataRank
from train.data.shard_cache import ShardCache

SHARD = "parts/00001/shard.00000.mds"


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clips(tmp_path_factory.mktemp("dead") / "clips", 8)


@pytest.mark.parametrize("damage", ["gone", "cut", "flipped"])
def test_shards_that_a_store_does_not_have_whole_are_masked_and_asked_for_once(
    s3: str, clips: Path, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, remote = fsspec.filesystem("s3"), f"{s3}/dead/{damage}"
    store.put(f"{clips}/", f"{remote}/", recursive=True)
    data = (clips / SHARD).read_bytes()
    if damage == "gone":
        store.rm_file(f"{remote}/{SHARD}")
    else:
        new = data[:999] if damage == "cut" else data[:3000] + bytes(50) + data[3050:]
        store.pipe_file(f"{remote}/{SHARD}", new)
    store.invalidate_cache()
    asked: list[str] = []
    copy = ShardCache._copy
    monkeypatch.setattr(ShardCache, "_copy", lambda self, url, *rest: (asked.append(url), copy(self, url, *rest)))
    cache = {"dir": str(tmp_path), "retries": 0}
    config = data_config([{"path": remote}], tmp_path, dead_samples="mask", cache=cache, max_seq_len=256)
    loader = Setup(config, BatchConfig(global_batch_size=1)).loader()
    assert sorted(key for step in loader for key in keys_of(step)) == [f"clip{i}" for i in range(8)]
    assert sorted(dead.key for dead in loader.dead) == ["clip4", "clip5", "clip6", "clip7"]
    assert sum(url.endswith(SHARD) for url in asked) == 1


def test_masking_is_refused_where_ranks_share_a_sequence(clips: Path, tmp_path: Path) -> None:
    setup = Setup(data_config([{"path": str(clips)}], tmp_path, dead_samples="mask"), BatchConfig(global_batch_size=2))
    with pytest.raises(ConfigError, match=r"dead_samples: mask needs train\.accelerator\.ulysses_size 1"):
        setup.loader(DataRank(0, 1, 1, 2))


def test_a_meta_that_is_not_that_of_the_rows_table_is_damage(clips: Path, tmp_path: Path) -> None:
    """Other words of the same length and token count: nothing but the comparison sees it."""
    shutil.copytree(clips, tmp_path / "clips")
    config = data_config([{"path": str(tmp_path / "clips")}], tmp_path / "cache", max_seq_len=256)
    setup = Setup(config, BatchConfig(global_batch_size=2))
    data = (clips / SHARD).read_bytes()
    assert data.count(b"What is clip 5?") == 1
    (tmp_path / "clips" / SHARD).write_bytes(data.replace(b"What is clip 5?", b"What is clip 6?"))
    with pytest.raises(VerificationError, match=r"sample 1: the meta of clip5 is not that of rows\.parquet"):
        list(setup.loader())
    loader = setup.loader(dead_samples="mask")
    assert len([key for step in loader for key in keys_of(step)]) == 8
    assert [dead.key for dead in loader.dead] == ["clip5"]


def test_whatever_a_client_raises_is_tried_again_and_then_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class EndpointConnectionError(Exception):
        """As that of botocore, no OSError."""

    monkeypatch.setattr(packed_files, "_FIRST_WAIT_S", 0.0)
    calls: list[int] = []

    def call() -> str:
        calls.append(1)
        if len(calls) < 3:
            raise EndpointConnectionError("could not connect to 127.0.0.1")
        return "data"

    assert with_retries(call, "s3://b/x cannot be downloaded to y", retries=2) == "data"
    calls.clear()
    with pytest.raises(OmniloomError, match=r"s3://b/x cannot be downloaded to y \(2 tries\): could not connect"):
        with_retries(call, "s3://b/x cannot be downloaded to y", retries=1)
    assert "trying again" in caplog.text


def test_a_store_that_does_not_answer_ends_the_run_also_under_mask(
    s3: str, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = f"{s3}/dead/away"
    fsspec.filesystem("s3").put(f"{clips}/", f"{remote}/", recursive=True)
    cache = {"dir": str(tmp_path), "retries": 0}
    setup = Setup(
        data_config([{"path": remote}], tmp_path, dead_samples="mask", cache=cache), BatchConfig(global_batch_size=2)
    )

    def away(*_: object) -> None:
        raise RuntimeError("no route to host")

    monkeypatch.setattr(ShardCache, "_copy", away)
    with pytest.raises(OmniloomError, match=r"shard\.00000\.mds cannot be downloaded to .*no route to host"):
        list(setup.loader())
