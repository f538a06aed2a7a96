"""The local folder and the object store (a local S3 server) keep the same promises."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pack.object_storage import ObjectStorage
from pack.storage import (
    COMMIT_FILE,
    LocalStorage,
    Storage,
    explain_io,
    hash_file,
    open_storage,
    write_atomic,
)
from schemas.errors import ConfigError, OmniloomError, VerificationError


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return open_storage(str(tmp_path / "out"))
    return open_storage(f"{request.getfixturevalue('s3')}/{uuid.uuid4().hex}")


def _part(storage: Storage, text: str) -> Path:
    folder = storage.new_staging(f"000001-k.{text}") / "part"
    folder.mkdir()
    (folder / "shard").write_text(text)
    (folder / COMMIT_FILE).write_text(f'{{"by": "{text}"}}')
    return folder


def test_files(storage: Storage) -> None:
    assert storage.try_read("a/b") is None
    with pytest.raises(FileNotFoundError):
        storage.read("a/b")
    storage.write("a/b", b"0123456789")
    storage.write("a/b", b"abcdefghij")
    assert storage.read("a/b") == b"abcdefghij"
    assert storage.read("a/b", 3, 4) == b"defg"
    assert storage.read("a/b", 8, 100) == b"ij"
    assert storage.read("a/b", 5, 0) == b""
    assert storage.read("a/b", 10, 5) == b""
    storage.write("empty", b"")
    assert (storage.read("empty"), storage.read("empty", 0, 9)) == (b"", b"")
    assert storage.size("a/b") == 10
    assert storage.exists("a/b")
    storage.append("log", "one")
    storage.append("log", "two")
    assert storage.read("log") == b"one\ntwo\n"
    storage.write("a/c/d", b"x")
    assert [(e.name, e.size) for e in storage.files("a")] == [("a/b", 10), ("a/c/d", 1)]
    assert list(storage.read_many(["log", "a/c/d"])) == [b"one\ntwo\n", b"x"]
    storage.remove("a")
    assert storage.files("a") == []
    storage.remove("a")


def test_hash_of_a_file_larger_than_a_block(storage: Storage) -> None:
    data = os.urandom(1 << 20) * 17
    storage.write("big", data)
    done: list[int] = []
    assert hash_file(storage, "big", "sha1", done.append) == hashlib.sha1(data).hexdigest()
    assert sum(done) == len(data)


def test_one_of_two_attempts_is_committed(storage: Storage) -> None:
    first, second = _part(storage, "one"), _part(storage, "two")
    assert storage.publish(first, "000001-k", "aaa")
    assert not storage.publish(second, "000001-k", "bbb")
    assert not first.exists()
    assert not second.exists()
    (commit,) = storage.read_commits(["000000-x", "000001-k"])
    assert commit.commit == b'{"by": "one"}'
    assert storage.read(f"{commit.folder}/shard") == b"one"
    assert storage.committed_names() == {"000001-k"}
    assert [folder for _, folder in storage.part_folders()] == [commit.folder]


def test_many_racing_attempts_leave_one_whole_partition(storage: Storage) -> None:
    parts = [_part(storage, str(i)) for i in range(6)]
    start = threading.Barrier(6)

    def publish(i: int) -> bool:
        start.wait()
        return storage.publish(parts[i], "000001-k", f"a{i}")

    with ThreadPoolExecutor(6) as pool:
        won = list(pool.map(publish, range(6)))
    assert sum(won) == 1
    (commit,) = storage.read_commits(["000001-k"])
    winner = won.index(True)
    assert storage.read(f"{commit.folder}/shard") == str(winner).encode()
    assert len(storage.part_folders()) == 1


def test_a_partition_without_its_commit_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "parts/000001-k").mkdir(parents=True)
    with pytest.raises(VerificationError, match=r"000001-k has no _COMMIT"):
        list(LocalStorage(tmp_path).read_commits(["000001-k"]))


def test_atomic_write_leaves_nothing_beside(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", b"1")
    with pytest.raises(TypeError):
        write_atomic(tmp_path / "a", "no bytes")  # type: ignore[arg-type]
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"1"


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (errno.ENOSPC, OmniloomError, "free some space"),
        (errno.EACCES, ConfigError, "choose an output"),
        (errno.EIO, OmniloomError, "Input/output"),
    ],
)
def test_refusals_of_the_system_are_explained(code: int, kind: type[OmniloomError], said: str) -> None:
    with pytest.raises(kind, match=f"cannot write here: .*{said}"), explain_io("cannot write", "here"):
        raise OSError(code, os.strerror(code))


def test_a_file_as_output_and_an_unknown_scheme_are_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        open_storage(str(tmp_path / "file/below")).check_writable()
    with pytest.raises(ConfigError, match="cannot open nosuch://x"):
        open_storage("nosuch://x")


def test_forms_of_a_local_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_storage("out").location == str(tmp_path / "out")
    assert open_storage(f"file://{tmp_path}/out").location == str(tmp_path / "out")
    assert isinstance(open_storage("memory://x"), ObjectStorage)
