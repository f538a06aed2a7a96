from __future__ import annotations

import json
import pickle
from pathlib import Path

import fsspec
import numpy as np
import pytest
from streaming import StreamingDataset

from schemas.errors import IncompleteSourceError, SchemaError, VerificationError
from schemas.sample import from_columns
from tests.train.data.loading import Setup, data_config, keys_of, write_clips
from train.config import BatchConfig
from train.data.rank_plan import DataRank
from train.data.shard_index import read_shards
from train.data.store import PackedPart, check_shards, hollow


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clips(tmp_path_factory.mktemp("store") / "clips", 12, per_partition=3)


def part_of(clips: Path, numbers: list[int], views: Path) -> PackedPart:
    return PackedPart.make(str(clips), read_shards(str(clips)), np.array(numbers), views)


def test_rows_are_those_that_streamingdataset_gives(clips: Path, tmp_path: Path) -> None:
    whole = StreamingDataset(local=str(clips), batch_size=1)
    part = part_of(clips, [1, 3], tmp_path)
    for number in (3, 1):
        for index in range(3):
            assert part.read(number, index) == from_columns(whole[number * 3 + index])
    with pytest.raises(KeyError, match=r"shard 0 of .* is not served by this rank"):
        part.read(0, 0)


def test_the_sub_index_lists_the_lanes_shards_only_and_is_shared(clips: Path, tmp_path: Path) -> None:
    part = part_of(clips, [1, 3], tmp_path)
    listed = json.loads((Path(part.view) / "index.json").read_text())["shards"]
    assert [entry["raw_data"]["basename"] for entry in listed] == [
        str(clips / "parts" / f"{number:05d}" / "shard.00000.mds") for number in (1, 3)
    ]
    assert part_of(clips, [1, 3], tmp_path).view == part.view
    assert part_of(clips, [1], tmp_path).view != part.view
    assert not list(Path(part.view).glob(".*"))
    (Path(part.view) / "index.json").write_text("")  # cut off
    part_of(clips, [1, 3], tmp_path).read(3, 0)


def test_a_part_travels_to_workers_after_it_was_used(clips: Path, tmp_path: Path) -> None:
    part = part_of(clips, [0, 2], tmp_path)
    first = part.read(2, 1)
    assert pickle.loads(pickle.dumps(part)).read(2, 1) == first


def test_the_meta_comes_from_the_rows_table(clips: Path, tmp_path: Path) -> None:
    part = part_of(clips, [0, 2], tmp_path)
    sample = part.read(2, 1)
    assert part.meta(2, 1) == sample.meta
    empty = hollow(sample.meta)
    assert [len(video.frames) for video in empty.videos] == [0]
    assert (empty.videos[0].audio is None) == (sample.videos[0].audio is None)


@pytest.mark.parametrize("change", ["flip", "cut", "gone", "rows"])
def test_damage_is_named(tmp_path: Path, change: str) -> None:
    clips = write_clips(tmp_path / "clips", 4, per_partition=2)
    shard = clips / "parts" / "00001" / "shard.00000.mds"
    part = part_of(clips, [0, 1], tmp_path / "views")
    data = bytearray(shard.read_bytes())
    if change == "flip":
        data[-200] ^= 4  # in the media of the last sample
        shard.write_bytes(bytes(data))
    elif change == "cut":
        shard.write_bytes(bytes(data[:-5000]))
    elif change == "gone":
        shard.unlink()
    else:
        (clips / "parts" / "00001" / "rows.parquet").write_bytes(b"no table")
        with pytest.raises(SchemaError, match=r"00001/rows\.parquet cannot be read"):
            part.meta(1, 1)
        return
    with pytest.raises(SchemaError, match=r"parts/00001/shard\.00000\.mds: sample 1: "):
        part.read(1, 1)
    assert part.read(0, 0).meta.id == "clip0"
    if change != "flip":
        with pytest.raises(VerificationError, match=r"shard\.00000\.mds (has|does not exist).*omniloom pack verify"):
            check_shards(part)
    else:
        check_shards(part)


def test_a_dataset_without_index_says_so(tmp_path: Path) -> None:
    with pytest.raises(IncompleteSourceError, match="omniloom pack merge"):
        read_shards(str(tmp_path))
    (tmp_path / "index.json").write_text('{"version": 2, "shards": [{}]}')
    with pytest.raises(SchemaError, match="no index of MDS shards"):
        read_shards(str(tmp_path))


def test_training_from_an_object_store_is_training_from_disk(s3: str, tmp_path: Path) -> None:
    clips = write_clips(tmp_path / "clips", 16, per_partition=1)
    remote = f"{s3}/store/clips"
    fsspec.filesystem("s3").put(f"{clips}/", f"{remote}/", recursive=True)
    batch = BatchConfig(global_batch_size=4)
    budget = {"lanes": 2, "max_seq_len": 256, "window_rows": 4}
    local = Setup(data_config([{"path": str(clips)}], tmp_path / "local", **budget), batch)
    cache = {"dir": str(tmp_path / "cache"), "limit_gb": 400e3 / 1e9, "fetch_steps": 2}
    stored = Setup(data_config([{"path": remote}], tmp_path / "cache", **(budget | {"cache": cache})), batch)
    assert stored.plans.digest == local.plans.digest
    assert stored.plans.planner.lanes.count == 2
    largest = 0
    for one, two in zip(local.loader(), stored.loader(), strict=True):
        assert [keys_of(one), one.step] == [keys_of(two), two.step]
        for a, b in zip(one.micro_batches, two.micro_batches, strict=True):
            assert a.features is not None and b.features is not None
            assert (a.features.patches == b.features.patches).all()
        largest = max(largest, sum(f.stat().st_size for f in (tmp_path / "cache" / "shards").rglob("*.mds")))
    total = sum(shard.bytes for shard in read_shards(remote))
    assert 0 < largest <= 400e3 < total


def test_a_rank_downloads_the_shards_of_its_lanes_only(s3: str, tmp_path: Path) -> None:
    clips = write_clips(tmp_path / "clips", 16, per_partition=1)
    remote = f"{s3}/lanes/clips"
    fsspec.filesystem("s3").put(f"{clips}/", f"{remote}/", recursive=True)
    found = []
    for rank in range(2):
        folder = tmp_path / f"node{rank}"
        data = data_config([{"path": remote}], folder, lanes=2, max_seq_len=256, window_rows=4)
        setup = Setup(data, BatchConfig(global_batch_size=4))
        loader = setup.loader(DataRank(rank, 2))
        for _ in loader:
            pass
        here = {str(f.relative_to(folder)).split("/", 2)[2] for f in folder.rglob("*.mds")}
        numbers = setup.plans.planner.lanes.shards[rank]
        assert here == {setup.sources[0].shards[number].name for number in numbers}
        found.append(here)
    assert len(found[0] | found[1]) == 16 and not found[0] & found[1]


def test_a_damaged_copy_is_fetched_again(s3: str, tmp_path: Path) -> None:
    clips = write_clips(tmp_path / "clips", 3, per_partition=3)
    remote = f"{s3}/again/clips"
    fsspec.filesystem("s3").put(f"{clips}/", f"{remote}/", recursive=True)
    data = data_config([{"path": remote}], tmp_path / "cache", max_seq_len=1024)
    setup = Setup(data, BatchConfig(global_batch_size=1))
    whole = [keys_of(step) for step in setup.loader()]
    (copy,) = (tmp_path / "cache" / "shards").rglob("*.mds")
    good = copy.read_bytes()
    copy.write_bytes(good[:-100] + bytes(100))
    assert [keys_of(step) for step in setup.loader()] == whole
    assert copy.read_bytes() == good
    fsspec.filesystem("s3").pipe_file(f"{remote}/{setup.sources[0].shards[0].name}", good[:-100] + bytes(100))
    copy.write_bytes(good[:-100] + bytes(100))
    with pytest.raises(VerificationError, match="another xxh3_64 than the index says"):
        list(setup.loader())
