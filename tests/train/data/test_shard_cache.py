from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from schemas.errors import ConfigError, IncompleteSourceError, VerificationError
from tests.train.data.loading import write_clips
from train.data.fetch import ShardFetcher, Wanted
from train.data.packed_files import PackedIndex
from train.data.shard_cache import ShardCache, check_cache_folder
from train.data.shard_index import Shard, read_shards

Open = Callable[..., ShardCache]


@pytest.fixture(scope="module")
def remote(s3: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a dataset of 8 shards in an object store."""
    folder = write_clips(tmp_path_factory.mktemp("remote") / "clips", 8, per_partition=1)
    fsspec.filesystem("s3").put(f"{folder}/", f"{s3}/clips/", recursive=True)
    return f"{s3}/clips"


@pytest.fixture
def shards(remote: str) -> list[Shard]:
    return read_shards(remote)


@pytest.fixture
def opened(remote: str, tmp_path: Path) -> Open:
    def cache(limit: int | None = None) -> ShardCache:
        return ShardCache(tmp_path / "cache", remote, PackedIndex.read(remote).fingerprint, limit, retries=0)

    return cache


def fetch(cache: ShardCache, shard: Shard) -> None:
    cache.pin(shard)
    assert cache.reserve([shard])
    cache.fetch(shard)


def files(cache: ShardCache) -> set[str]:
    return {path.name for path in cache.root.rglob("*") if path.is_file() and not path.name.startswith(".")}


def test_a_shard_is_downloaded_once_and_is_the_remote_s(opened: Open, shards: list[Shard], remote: str) -> None:
    cache = opened()
    assert not cache.has(shards[0])
    fetch(cache, shards[0])
    assert cache.has(shards[0])
    with fsspec.open(f"{remote}/{shards[0].name}", "rb") as file:
        assert cache.path(shards[0].name).read_bytes() == file.read()
    stamp = cache.path(shards[0].name).stat().st_ino
    opened().fetch(shards[0])
    assert cache.path(shards[0].name).stat().st_ino == stamp
    assert files(cache) == {"REMOTE", Path(shards[0].name).name}


def test_bytes_that_are_not_those_of_the_index_are_refused(opened: Open, shards: list[Shard], remote: str) -> None:
    cache = opened()
    url = f"{remote}/{shards[1].name}"
    fs = fsspec.filesystem("s3")
    whole = fs.cat_file(url)
    try:
        fs.pipe_file(url, whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(VerificationError, match="another xxh3_64 than the index says"):
            cache.fetch(shards[1])
        fs.rm_file(url)
        with pytest.raises(IncompleteSourceError, match="does not exist, but the dataset's index lists it"):
            cache.fetch(shards[1])
    finally:
        fs.pipe_file(url, whole)
    assert files(cache) == {"REMOTE"}
    cache.fetch(shards[1])


def test_the_limit_holds_and_the_least_recently_used_goes_first(opened: Open, shards: list[Shard]) -> None:
    limit = sum(shard.bytes for shard in shards[:3])
    cache = opened(limit + 100)
    for age, shard in enumerate(shards[:3]):
        fetch(cache, shard)
        cache.unpin(shard)
        os.utime(cache.path(shard.name), (1000 + age, 1000 + age))
    os.utime(cache.path(shards[0].name), (5000, 5000))  # used again
    fetch(cache, shards[3])
    assert [cache.has(shard) for shard in shards[:4]] == [True, False, shards[3].bytes <= shards[1].bytes + 100, True]
    used = sum(path.stat().st_size for path in cache.folder.rglob("*.mds"))
    assert used <= cache.limit  # type: ignore[operator]


def test_pinned_shards_are_never_deleted_not_even_by_others(opened: Open, shards: list[Shard]) -> None:
    holder, other = opened(1), opened(1)
    holder.pin(shards[0])
    assert holder.reserve([shards[0]], forced=True) is False
    holder.fetch(shards[0])
    for cache in (holder, other):
        assert not cache.reserve([shards[1]])
        assert cache.has(shards[0])
    holder.unpin(shards[0])
    assert not other.reserve([shards[1]])  # 1 byte is too little for any shard
    assert not other.has(shards[0])


def test_the_room_kept_for_a_download_counts_as_used(opened: Open, shards: list[Shard]) -> None:
    one, two = opened(shards[0].bytes + 10), opened(shards[0].bytes + 10)
    one.pin(shards[0])
    assert one.reserve([shards[0]])
    two.pin(shards[1])
    assert not two.reserve([shards[1]])
    one.cancel([shards[0]])
    one.unpin(shards[0])
    assert two.reserve([shards[1]]) == (shards[1].bytes <= shards[0].bytes + 10)


def test_only_copies_in_the_cache_are_ever_deleted(opened: Open, shards: list[Shard], tmp_path: Path) -> None:
    cache = opened(shards[0].bytes)
    own = write_clips(tmp_path / "cache" / "shards" / "mine", 1)  # somebody's only copy, laid where it should not be
    (cache.root / "notes.mds").write_bytes(b"x" * 1000)
    before = {path: path.read_bytes() for path in own.rglob("*") if path.is_file()}
    fetch(cache, shards[0])
    cache.unpin(shards[0])
    cache.pin(shards[1])
    cache.reserve([shards[1]])
    assert not cache.has(shards[0])
    assert {path: path.read_bytes() for path in before} == before
    assert (cache.root / "notes.mds").exists()
    with pytest.raises(ConfigError, match="is local; it is read where it lies and never cached"):
        ShardCache(tmp_path / "cache", str(own), "f", 1)
    with pytest.raises(ConfigError, match="lie inside each other"):
        check_cache_folder(tmp_path / "cache", [str(own)])
    with pytest.raises(ConfigError, match="lie inside each other"):
        check_cache_folder(own, [str(own)])
    check_cache_folder(tmp_path / "cache", [str(tmp_path / "elsewhere"), "s3://bucket/x"])


def test_a_folder_with_foreign_files_is_not_taken_over(opened: Open) -> None:
    cache = opened()
    (cache.folder / "REMOTE").unlink()
    (cache.folder / "thesis.txt").write_text("only copy")
    with pytest.raises(ConfigError, match="has files that omniloom did not put there"):
        opened()


HOLD = """
import sys, time
sys.path.insert(0, ".")
from pathlib import Path
from train.data.shard_cache import ShardCache
from train.data.shard_index import read_shards
folder, remote, fingerprint = sys.argv[1:]
cache = ShardCache(Path(folder), remote, fingerprint, 10**9)
shards = read_shards(remote)
cache.pin(shards[0]); cache.reserve([shards[0]]); cache.fetch(shards[0])
cache.pin(shards[1]); cache.reserve([shards[1]])
cache._downloads.own(cache._key(shards[1].name))
cache.path(shards[1].name).parent.mkdir(parents=True, exist_ok=True)
cache.path(shards[1].name + ".1.part").write_bytes(b"half")
print("held", flush=True)
time.sleep(600)
"""


def test_what_a_run_holds_is_safe_while_it_lives_and_free_once_it_was_killed(
    opened: Open, shards: list[Shard], remote: str, tmp_path: Path
) -> None:
    arguments = [str(tmp_path / "cache"), remote, PackedIndex.read(remote).fingerprint]
    run = subprocess.Popen([sys.executable, "-c", HOLD, *arguments], stdout=subprocess.PIPE)
    try:
        assert run.stdout is not None and run.stdout.readline() == b"held\n"
        cache = opened(1)
        cache.pin(shards[2])
        assert not cache.reserve([shards[2]])
        assert cache.has(shards[0])
        assert len(list(cache.folder.rglob("*.room"))) == 1
        assert not cache._downloads.try_own(cache._key(shards[1].name))
        run.send_signal(signal.SIGKILL)
        run.wait()
        assert not cache.reserve([shards[2]])  # nothing fits one byte, but what nobody holds is gone
        assert not cache.has(shards[0])
        assert not list(cache.folder.rglob("*.room"))
        cache.fetch(shards[1])
        assert not list(cache.folder.rglob("*.part"))
    finally:
        run.kill()
        run.wait()


def units(cache: ShardCache, numbers: list[list[int]], shards: list[Shard]) -> list[list[Wanted]]:
    return [[Wanted(cache, shards[i]) for i in unit] for unit in numbers]


def test_shards_are_fetched_ahead_pinned_until_their_last_use_and_then_free(opened: Open, shards: list[Shard]) -> None:
    cache = opened()
    fetcher = ShardFetcher(units(cache, [[0, 1], [1], [], [2], [0], [3], [4]], shards), ahead=4, threads=2)
    fetcher.ready(0)
    assert cache.has(shards[0]) and cache.has(shards[1])
    assert set(cache._pinned) == {shards[i].name for i in (0, 1, 2)}  # of the first four units
    fetcher.done(0)
    assert set(cache._pinned) == {shards[i].name for i in (0, 1, 2)}  # unit 4 came in, which needs shard 0 again
    fetcher.ready(1)
    fetcher.done(1)
    assert set(cache._pinned) == {shards[i].name for i in (0, 2, 3)}
    for unit in range(2, 7):
        fetcher.ready(unit)
        fetcher.done(unit)
    assert not cache._pinned
    assert all(cache.has(shards[i]) for i in range(5)) and not cache.has(shards[5])
    fetcher.close()


def test_a_tight_limit_slows_fetching_ahead_but_never_stops_a_step(
    opened: Open, shards: list[Shard], caplog: pytest.LogCaptureFixture
) -> None:
    biggest = max(shard.bytes for shard in shards)
    cache = opened(biggest * 2)
    fetcher = ShardFetcher(units(cache, [[i] for i in range(8)], shards), ahead=8, threads=2)
    for unit in range(8):
        fetcher.ready(unit)
        assert cache.has(shards[unit])
        used = sum(path.stat().st_size for path in cache.folder.rglob("*.mds"))
        assert used <= biggest * 2
        fetcher.done(unit)
    fetcher.close()
    assert "grows over its limit" not in caplog.text
    cramped = opened(10)
    fetcher = ShardFetcher(units(cramped, [[0, 1], [2]], shards), ahead=2, threads=1)
    fetcher.ready(0)
    assert cramped.has(shards[0]) and cramped.has(shards[1])
    assert "grows over its limit" in caplog.text
    fetcher.close()


def test_a_download_that_fails_is_raised_by_the_unit_that_needs_it(opened: Open, shards: list[Shard]) -> None:
    cache = opened()
    missing = Shard("parts/00009/none.mds", 1, 10, "xxh3_64", "0", {})
    fetcher = ShardFetcher([[Wanted(cache, shards[0])], [Wanted(cache, missing)]], ahead=2, threads=1)
    fetcher.ready(0)
    with pytest.raises(IncompleteSourceError, match=r"none\.mds does not exist"):
        fetcher.ready(1)
    fetcher.close()
    assert not cache._pinned


def test_two_processes_fetch_a_shard_once(opened: Open, shards: list[Shard]) -> None:
    """The second waits for the first, and finds the file there."""
    first, second = opened(), opened()
    first._downloads.own(first._key(shards[0].name))
    waiting = threading.Thread(target=second.fetch, args=(shards[0],))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    first._remove_parts(shards[0])
    first._download(shards[0])
    stamp = first.path(shards[0].name).stat().st_ino
    first._downloads.free(first._key(shards[0].name))
    waiting.join(60)
    assert first.path(shards[0].name).stat().st_ino == stamp
