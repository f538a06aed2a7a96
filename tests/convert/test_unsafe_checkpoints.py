"""Code in pickles, places outside the folder, ranges that lie, damaged files: each ends with the exit code of its kind,
executes nothing, and leaves nothing behind."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from tests.convert.dcp_factory import Touch, edit_metadata
from tests.convert.refusing import EMBEDDING, INCOMPLETE, MEGATRON, NORM, UNSAFE, UNSUPPORTED, convert


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A whole, valid checkpoint: its iteration's directory."""
    return Path(shutil.copytree(MEGATRON / "singleton", tmp_path / "source")) / "iter_0000001"


def test_the_checkpoint_that_is_damaged_below_is_valid(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(source, capsys)[0] == 0


# --- code in pickles


def with_planner_data(metadata: Any, evil: Touch) -> None:
    metadata.planner_data = evil


def with_storage_meta(metadata: Any, evil: Touch) -> None:
    metadata.storage_meta.checkpoint_id = evil


def with_a_key(metadata: Any, evil: Touch) -> None:
    metadata.state_dict_metadata[evil] = None


def with_properties(metadata: Any, evil: Touch) -> None:
    metadata.state_dict_metadata[EMBEDDING].properties = evil


def with_nothing_else(metadata: Any, evil: Touch) -> Touch:
    return evil


@pytest.mark.parametrize(
    "change", [with_planner_data, with_storage_meta, with_a_key, with_properties, with_nothing_else]
)
def test_code_in_the_metadata(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Any, Touch], Any]
) -> None:
    marker = tmp_path / "executed"
    edit_metadata(source, lambda metadata: change(metadata, Touch(marker)))
    code, message = convert(source, capsys)
    assert code == UNSAFE and "posix.system" in message and ".metadata" in message
    assert not marker.exists()
    pickle.loads((source / ".metadata").read_bytes())  # what a reader without care would have done
    assert marker.exists()


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_code_in_common_pt(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
    marker = tmp_path / "executed"
    content = {"args": Touch(marker), "iteration": 1}
    if how == "torch":
        torch.save(content, source / "common.pt")
    else:
        (source / "common.pt").write_bytes(pickle.dumps(content))
    code, message = convert(source, capsys)
    assert code == UNSAFE and "common.pt" in message and "posix.system" in message
    assert not marker.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [("builtins", "eval"), ("builtins", "getattr"), ("torch.hub", "load"), ("torch", "load"), ("numpy", "load"),
     ("numpy.testing._private.utils", "runstring"), ("torch", "os.system"), ("importlib", "import_module"),
     ("torch.distributed.checkpoint.metadata", "torch.os.system"), ("operator", "attrgetter")],
)  # fmt: skip
@pytest.mark.parametrize("file", [".metadata", "common.pt"])
def test_globals_with_a_name_like_an_allowed_one(
    source: Path, capsys: pytest.CaptureFixture[str], file: str, module: str, name: str
) -> None:
    frame = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name)) + b"\x93."
    (source / file).write_bytes(frame)
    code, message = convert(source, capsys)
    assert code == UNSAFE and f"{module}.{name}" in message


def test_code_in_the_record_of_a_tensor(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marker, stream = tmp_path / "executed", io.BytesIO()
    torch.save([Touch(marker), torch.zeros(32)], stream)
    replace_record(source, NORM, stream.getvalue())
    code, message = convert(source, capsys)
    assert code == UNSAFE and NORM in message
    assert not marker.exists()


def replace_record(source: Path, name: str, content: bytes) -> None:
    """Puts other bytes in the place of a tensor's only record: at the end of its file."""

    def change(metadata: Any) -> None:
        (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == name)
        path = source / info.relative_path
        info.offset, info.length = path.stat().st_size, len(content)
        with path.open("ab") as file:
            file.write(content)

    edit_metadata(source, change)


# --- places and ranges


def info_of(metadata: Any, name: str) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "x\0y"])
def test_paths_that_leave_the_folder(source: Path, capsys: pytest.CaptureFixture[str], path: str) -> None:
    (source.parent / "secret").write_bytes((source / "__0_0.distcp").read_bytes())
    edit_metadata(source, lambda metadata: setattr(info_of(metadata, EMBEDDING), "relative_path", path))
    code, message = convert(source, capsys)
    assert code == UNSAFE and EMBEDDING in message


def test_links_that_leave_the_folder(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outside = source.parent / "elsewhere"
    (source / "__0_0.distcp").rename(outside)
    (source / "__0_0.distcp").symlink_to(outside)
    code, message = convert(source, capsys)
    assert code == UNSAFE and "link" in message


def test_a_link_to_the_whole_checkpoint_is_fine(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (source.parent / "latest").symlink_to(source)
    assert convert(source.parent / "latest", capsys)[0] == 0


RANGES: list[tuple[str, Any, int]] = [
    ("offset", -1, UNSAFE), ("offset", 1.5, UNSAFE), ("length", 0, INCOMPLETE), ("length", True, UNSAFE),
    ("length", 1 << 62, INCOMPLETE), ("offset", 1 << 62, INCOMPLETE),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "wanted"), RANGES)
def test_ranges_that_cannot_be(
    source: Path, capsys: pytest.CaptureFixture[str], key: str, value: Any, wanted: int
) -> None:
    def change(metadata: Any) -> None:
        # the last record of its file, so that a longer range meets no other one
        last = max(
            (info for info in metadata.storage_data.values() if info.relative_path == "__0_0.distcp"),
            key=lambda info: info.offset,
        )
        setattr(last, key, value)

    edit_metadata(source, change)
    assert convert(source, capsys)[0] == wanted


def test_records_that_overlap(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(metadata: Any) -> None:
        first, second = sorted(
            (info for info in metadata.storage_data.values() if info.relative_path == "__0_0.distcp"),
            key=lambda info: info.offset,
        )[:2]
        second.offset, second.length = second.offset - 1, second.length + 1
        assert first.offset + first.length > second.offset

    edit_metadata(source, change)
    code, message = convert(source, capsys)
    assert code == UNSAFE and "overlap" in message


@pytest.mark.parametrize(("stop", "wanted", "word"), [(40, INCOMPLETE, "gap"), (66, UNSAFE, "overlap")])
def test_chunks_that_do_not_tile(
    source: Path, capsys: pytest.CaptureFixture[str], stop: int, wanted: int, word: str
) -> None:
    """The embedding has the chunks [0, 64) and [64, 128) of rows; the first is made shorter or longer."""

    def change(metadata: Any) -> None:
        metadata.state_dict_metadata[EMBEDDING].chunks[0].sizes = torch.Size([stop, 32])

    edit_metadata(source, change)
    code, message = convert(source, capsys)
    assert code == wanted and word in message and EMBEDDING in message


def test_a_chunk_outside_its_tensor(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(metadata: Any) -> None:
        metadata.state_dict_metadata[EMBEDDING].chunks.append(
            ChunkStorageMetadata(torch.Size([128, 0]), torch.Size([1, 32]))
        )

    edit_metadata(source, change)
    assert convert(source, capsys)[0] == UNSAFE


def test_a_chunk_without_a_record(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(metadata: Any) -> None:
        del metadata.storage_data[next(index for index in metadata.storage_data if index.fqn == EMBEDDING)]

    edit_metadata(source, change)
    code, message = convert(source, capsys)
    assert code == INCOMPLETE and EMBEDDING in message


def test_a_record_that_no_tensor_declares(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_metadata(source, lambda metadata: metadata.state_dict_metadata.pop(EMBEDDING) and None)
    code, message = convert(source, capsys)
    assert code == UNSAFE and EMBEDDING in message


# --- files


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_1.distcp"])
def test_truncated_files(source: Path, capsys: pytest.CaptureFixture[str], name: str, share: float) -> None:
    os.truncate(source / name, int((source / name).stat().st_size * share))
    code, message = convert(source, capsys)
    assert code == INCOMPLETE and name in message and "truncated" in message


def test_a_missing_file(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (source / "__1_0.distcp").unlink()
    code, message = convert(source, capsys)
    assert code == INCOMPLETE and "__1_0.distcp" in message


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_truncated_metadata(source: Path, capsys: pytest.CaptureFixture[str], share: float) -> None:
    os.truncate(source / ".metadata", int((source / ".metadata").stat().st_size * share))
    code, message = convert(source, capsys)
    assert code == INCOMPLETE and ".metadata" in message


def test_metadata_that_is_something_else(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (source / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    assert convert(source, capsys)[0] == UNSUPPORTED


def test_no_metadata(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (source / ".metadata").unlink()
    assert convert(source.parent, capsys)[0] == INCOMPLETE


@pytest.mark.parametrize("at", [0.5, 0.9])
def test_bytes_changed_inside_a_record_are_noticed_where_they_break_it(
    source: Path, capsys: pytest.CaptureFixture[str], at: float
) -> None:
    """The directory of a record's archive is overwritten, at its end, or its header, at its beginning."""

    def damage(metadata: Any) -> None:
        info = info_of(metadata, EMBEDDING)
        with (source / info.relative_path).open("r+b") as file:
            file.seek(info.offset + (info.length - 60 if at > 0.6 else 0))
            file.write(b"\xff" * 40)

    edit_metadata(source, damage)
    code, message = convert(source, capsys)
    assert code in (INCOMPLETE, UNSUPPORTED) and EMBEDDING in message


@pytest.mark.parametrize(
    "content", [torch.zeros(31), torch.zeros(33), torch.zeros(32).bfloat16(), torch.zeros(32, 1), torch.zeros(())]
)
def test_a_record_of_another_size_than_the_index_says(
    source: Path, capsys: pytest.CaptureFixture[str], content: torch.Tensor
) -> None:
    stream = io.BytesIO()
    torch.save(content, stream)
    replace_record(source, NORM, stream.getvalue())
    code, message = convert(source, capsys)
    assert code == INCOMPLETE and NORM in message


def test_stream_transforms(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_metadata(source, lambda metadata: setattr(info_of(metadata, EMBEDDING), "transform_descriptors", ["zstd"]))
    code, message = convert(source, capsys)
    assert code == UNSUPPORTED and "zstd" in message
