"""`verify` finds whatever was changed after packing, and says where."""

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from pack.job import check_verified, preview_job
from pack.merge import merge
from pack.partition import write_partition
from pack.plan_file import load_plan
from pack.report import bar
from pack.rows_table import read_rows
from pack.storage import LocalStorage
from pack.verify import Verification, verify
from schemas.errors import IncompleteSourceError, VerificationError
from tests.pack.job_fakes import MEDIA, job_config, row, tasks_of, write_clips, write_manifest


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merged dataset of 12 rows, one rejected, in several partitions of two shards each."""
    folder = tmp_path_factory.mktemp("verify")
    write_clips(folder, 12, 0.5)
    rows = [row(i, do="raise" if i == 3 else "") for i in range(12)]
    config = job_config(
        write_manifest(folder / "m.jsonl", rows),
        folder / "out",
        partition={"target_mb": 0.9},
        shard={"size_mb": 0.05},
    )
    for task in tasks_of(config):
        write_partition(task, MEDIA)
    storage = LocalStorage(folder / "out")
    merge(storage, load_plan(storage))
    return folder / "out"


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "out"))


def _verify(folder: Path) -> Verification:
    storage = LocalStorage(folder)
    with bar("verifying") as told:
        return verify(storage, load_plan(storage), told)


def _damaged(folder: Path, path: Path, data: bytes) -> list[str]:
    """The faults found while a file has other content."""
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        return _verify(folder).faults
    finally:
        path.write_bytes(before)


def _checked_files(folder: Path) -> list[Path]:
    parts = [p for p in sorted(folder.glob("parts/*/*"))]
    return [*parts, folder / "index.json", folder / "README.md"]


def test_an_untouched_dataset_has_no_fault(whole: Path) -> None:
    found = _verify(whole)
    assert found.faults == []
    assert found.samples == 11
    assert found.partitions == len(list(whole.glob("parts/*"))) > 2
    check_verified(LocalStorage(whole), found)


def test_every_flipped_bit_is_found_and_its_file_named(copy: Path) -> None:
    chance = random.Random(11)
    for path in _checked_files(copy):
        data = path.read_bytes()
        bits = {chance.randrange(8 * len(data)) for _ in range(6)} if data else set()
        if path.suffix == ".mds":  # count, offsets, header, first sample's sizes, last byte
            bits |= {0, 33, 64, 96, 140 * 8, 8 * len(data) - 1}
        for bit in sorted(bits):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            faults = _damaged(copy, path, bytes(flipped))
            assert faults, f"bit {bit} of {path}"
            if path.name != "_COMMIT":
                assert any(str(path) in fault for fault in faults), (bit, faults)


def test_every_truncation_and_a_grown_file_are_found(copy: Path) -> None:
    chance = random.Random(12)
    for path in _checked_files(copy):
        data = path.read_bytes()
        cuts = {0, len(data) // 2, len(data) - 1, *(chance.randrange(len(data)) for _ in range(2))} if data else set()
        for cut in sorted(cuts):
            faults = _damaged(copy, path, data[:cut])
            assert any(str(path) in fault for fault in faults), (cut, path, faults)
        faults = _damaged(copy, path, data + b"\0")
        assert any(str(path) in fault for fault in faults), (path, faults)


def test_a_flipped_bit_in_a_sample_names_shard_sample_id_and_row(copy: Path) -> None:
    shard = max(copy.glob("parts/*/*.mds"), key=lambda p: p.stat().st_size)
    data = bytearray(shard.read_bytes())
    offsets = struct.unpack_from("<3I", data, 4)
    data[offsets[1] + (offsets[2] - offsets[1]) // 2] ^= 4  # in the media of the second sample
    shard.write_bytes(data)
    (fault,) = _verify(copy).faults
    assert str(shard) in fault
    assert f"{shard}: sample 1: " in fault
    assert "crc" in fault
    rows = read_rows((shard.parent / "rows.parquet").read_bytes(), "").to_pylist()
    (expected,) = [r for r in rows if (r["shard"], r["index_in_shard"]) == (shard.name, 1)]
    assert f"(id {expected['id']!r}, row {expected['row']} of " in fault


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: shutil.rmtree(next(p.glob("parts/*"))), "partitions of the plan are missing"),
        (lambda p: next(p.glob("parts/*/*.mds")).unlink(), "is missing"),
        (lambda p: (next(p.glob("parts/*")) / "extra").write_text("x"), "files that were not written with it: extra"),
        (lambda p: (p / "dataset.json").unlink(), "dataset.json"),
        (lambda p: next(p.glob("parts/*/_COMMIT")).unlink(), "has no _COMMIT"),
    ],
    ids=["partition", "shard", "stray file", "card", "commit"],
)
def test_what_is_missing_or_too_much_is_named(copy: Path, change: Callable[[Path], object], said: str) -> None:
    change(copy)
    with pytest.raises(VerificationError, match=said):
        check_verified(LocalStorage(copy), _verify(copy))


def test_swapped_shards_of_equal_content_layout_are_found(copy: Path) -> None:
    first, second = sorted(copy.glob("parts/*/*.mds"))[:2]
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    assert len(_verify(copy).faults) >= 2


def test_verify_before_merge_and_preview_before_merge_say_what_to_do(copy: Path) -> None:
    (copy / "index.json").unlink()
    with pytest.raises(IncompleteSourceError, match="pack merge"):
        _verify(copy)
    with pytest.raises(IncompleteSourceError, match="pack merge"):
        preview_job(LocalStorage(copy), load_plan(LocalStorage(copy)).config)


def test_a_damaged_dataset_no_longer_counts_as_finished(copy: Path) -> None:
    (copy / "plan" / "finished.json").write_text('{"fingerprint": "x"}\n')
    shard = next(copy.glob("parts/*/*.mds"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(VerificationError, match="run `omniloom pack run` again"):
        check_verified(LocalStorage(copy), _verify(copy))
    assert not (copy / "plan" / "finished.json").exists()
