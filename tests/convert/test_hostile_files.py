"""Files made to harm who reads them: bombs, endless nesting, numbers that cannot be. Each is refused by its name, with
an exit code of its kind, and nothing is left."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from convert.dcp import DcpReader
from convert.pickle_scan import check_pickle
from convert.restricted_pickle import load_common, load_metadata
from convert.safetensors_io import read_layout
from jobs.cli import main
from schemas.errors import IncompleteSourceError, OmniloomError, SchemaError, UnsafeInputError
from tests.convert.dcp_factory import edit_metadata, save, save_megatron
from tests.convert.models import make_text, read_weights
from tests.convert.refusing import EMBEDDING, INCOMPLETE, MEGATRON, NORM, UNSAFE, convert
from tests.convert.test_unsafe_checkpoints import info_of, replace_record


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A whole, valid checkpoint: its iteration's directory."""
    return Path(shutil.copytree(MEGATRON / "singleton", tmp_path / "source")) / "iter_0000001"


def omniloom(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["convert", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


# --- pickles that end the process

DEEP = 200_000
BOMBS: dict[str, bytes] = {
    "tuples as a key": b"\x80\x04}" + b")" + b"\x85" * DEEP + b"Ns.",
    "tuples as a key, remembered between": b"\x80\x04})" + b"\x94\x85" * DEEP + b"Ns.",
    "tuples as a key, with something behind": b"\x80\x04})" + b"N\x86" * DEEP + b"Ns.",
    "tuples as a key, fetched again": b"\x80\x04})\x94" + b"h\x00\x85q\x00" * DEEP + b"Ns.",
    "tuples as a key, duplicated": b"\x80\x04})" + b"2\x86" * DEEP + b"Ns.",
    "the same tuple twice on every level": b"\x80\x04})" + b"2\x86" * 60 + b"Ns.",
    "the same tuple a thousand times on some levels": b"\x80\x04})\x94"
    + b"("
    + b"h\x00" * 1000
    + b"t\x94("
    + b"h\x01" * 1000
    + b"t\x94("
    + b"h\x02" * 1000
    + b"t\x94("
    + b"h\x03" * 1000
    + b"tNs.",
    "entries of the memo left out": b"\x80\x04})r\x05\x00\x00\x00" + b"\x85\x94" * 1000 + b"Ns.",
    "tuples as a key, through marks": b"\x80\x04}" + b"(" * DEEP + b"t" * DEEP + b"Ns.",
    "tuples as a key, through marks that are taken back": b"\x80\x04})" + b"(0\x85" * DEEP + b"Ns.",
    "tuples as a key, as places of storages": b"\x80\x04})" + b"Q\x85" * DEEP + b"Ns.",
    "tuples in a set": b"\x80\x04\x8f(" + b")" + b"\x85" * DEEP + b"\x90.",
    "tuples in a frozen set": b"\x80\x04()" + b"\x85" * DEEP + b"\x91.",
    "tuples by text": b"}(" + b"(" * DEEP + b"t" * DEEP + b"I1\nu.",
    "a million tuples": b"\x80\x04})" + b"\x85" * 1_000_000 + b"Ns.",
    "a memo of gigabytes in a long stream": b"\x80\x04" + b"N0" * DEEP + b"Nr\xff\xff\xff\x7f.",
    "a memo of gigabytes": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "a memo of gigabytes, by text": b"Np2000000000\n.",
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("file", [".metadata", "common.pt"])
def test_pickles_that_would_end_the_process(source: Path, name: str, file: str) -> None:
    """In a process of its own, since a failure of this test would end this one."""
    (source / file).write_bytes(BOMBS[name])
    arguments = ["megatron-to-hf", source, source.parent / "out", "--base", MEGATRON / "singleton" / "base"]
    if name not in ("tuples as a key", "a million tuples"):  # the others without the seconds that a process takes
        with pytest.raises(UnsafeInputError, match=r"holds more than 2000|the memo"):
            load_metadata(BOMBS[name], "x") if file == ".metadata" else load_common(source / file)
        return
    command = [sys.executable, "-m", "jobs.cli", "convert", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path.cwd(), check=False)
    assert done.returncode in (UNSAFE, INCOMPLETE, 7) and file in done.stderr
    assert not list(source.parent.glob("out*"))


@pytest.mark.parametrize(
    "data",
    [b"\x80\x04" + b"]" * DEEP + b"a" * (DEEP - 1) + b".",  # lists in lists
     b"\x80\x04" + b"}N" * DEEP + b"s" * 0 + b".", b"\x80\x04\x8c\xff", b"\x80\x04X\xff\xff\xff\xff.",
     b"\x80\x04\x8d" + b"\xff" * 8 + b".", b"\x80\x05\x97.", b"\x80\x04\x82\x01.", b"cposix", b"I1", b"\xfe.",
     b"\x80\x04\x8a\xff.", b"L" + b"9" * 100_000 + b"L\n.", b"g7\n.", b"t.", b"0.", b"\x80\x04\x95" + b"\xff" * 8],
)  # fmt: skip
def test_pickles_that_are_none(source: Path, capsys: pytest.CaptureFixture[str], data: bytes) -> None:
    (source / ".metadata").write_bytes(data)
    code, message = convert(source, capsys)
    assert code in (UNSAFE, INCOMPLETE, 7) and ".metadata" in message and "fault of omniloom" not in message


@pytest.mark.parametrize("path", sorted(MEGATRON.glob("*/iter_*/.metadata")), ids=lambda path: path.parts[-3])
def test_genuine_pickles_pass_the_look(path: Path) -> None:
    check_pickle(path.read_bytes())
    for protocol in range(6):
        check_pickle(pickle.dumps(pickle.loads(path.read_bytes()), protocol))


def test_whatever_python_writes_passes_the_look() -> None:
    """Strings of all lengths, numbers, nested containers, in every protocol; cut anywhere it is none."""
    rows = [{"x" * (i % 300): (i, -i, 1 << (i % 80), i / 3), "y": [b"z" * (i % 260), None, {i}]} for i in range(600)]
    for protocol in range(6):
        data = pickle.dumps(rows, protocol)
        check_pickle(data)
        for cut in (len(data) - 1, len(data) // 2):
            with pytest.raises(ValueError):
                check_pickle(data[:cut])


def test_names_of_entries_may_be_anything(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nested: Any = ()
    for _ in range(90):
        nested = (nested,)
    for name in (nested, 3, None, "a\nb", "\x1b[31mred", b"bytes", 1.5, "\ud800"):
        shutil.rmtree(source)
        shutil.copytree(MEGATRON / "singleton" / "iter_0000001", source)
        edit_metadata(source, lambda metadata, name=name: metadata.state_dict_metadata.update({name: None}))  # type: ignore[misc]
        code, message = convert(source, capsys)
        assert code == UNSAFE and ".metadata" in message and message.strip().isprintable()


@pytest.mark.parametrize(
    ("key", "value"),
    [("size", (1 << 62, 1 << 62)), ("size", [128, 32]), ("size", None), ("chunks", 3), ("chunks", [3]), ("chunks", {}),
     ("properties", None), ("properties", 3), ("properties", {"dtype": 3})],
)  # fmt: skip
def test_fields_of_a_wrong_kind(source: Path, capsys: pytest.CaptureFixture[str], key: str, value: Any) -> None:
    value = torch.Size(value) if isinstance(value, tuple) else value
    edit_metadata(source, lambda metadata: setattr(metadata.state_dict_metadata[EMBEDDING], key, value))
    code, message = convert(source, capsys)
    assert code in (UNSAFE, 7, INCOMPLETE) and "fault of omniloom" not in message and EMBEDDING in message


# --- archives


def bomb(path: Path, name: str, size: int) -> None:
    """An archive whose member unpacks to `size` zeros."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(name, "w", force_zip64=True) as file:
        for _ in range(size >> 20):
            file.write(bytes(1 << 20))


def test_an_archive_that_unpacks_to_gigabytes(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bomb(source / "common.pt", "common/data.pkl", 1 << 28)
    assert (source / "common.pt").stat().st_size < 1 << 20
    code, message = convert(source, capsys)
    assert code == UNSAFE and "common.pt" in message and "268435456 bytes" in message


def test_a_large_common_pt_that_is_no_archive(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(source / "common.pt", 1 << 40)
    code, message = convert(source, capsys)
    assert code in (UNSAFE, INCOMPLETE) and "common.pt" in message


@pytest.mark.parametrize("name", ["common.pt"])
def test_directories_in_the_place_of_files(source: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (source / name).unlink()
    (source / name).mkdir()
    code, message = convert(source, capsys)
    assert code == INCOMPLETE and name in message


def archive_of(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(f"archive/{name}", content)
    return stream.getvalue()


def header_of(tensor: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    with zipfile.ZipFile(stream) as archive:
        return archive.read("archive/data.pkl")


RECORDS: dict[str, Callable[[], bytes]] = {
    "a byte order of megabytes": lambda: archive_of(
        {"data.pkl": header_of(torch.zeros(32)), "byteorder": bytes(1 << 24), "data/0": bytes(128)},
        zipfile.ZIP_DEFLATED,
    ),
    "data that unpack to megabytes": lambda: archive_of(
        {"data.pkl": header_of(torch.zeros(32)), "byteorder": b"little", "data/0": bytes(1 << 24)},
        zipfile.ZIP_DEFLATED,
    ),
    "a header of megabytes": lambda: archive_of({"data.pkl": bytes(1 << 24)}, zipfile.ZIP_DEFLATED),
    "a deep header": lambda: archive_of({"data.pkl": BOMBS["tuples as a key"], "data/0": bytes(128)}),
    "nothing but the magic": lambda: b"PK\x03\x04" + bytes(300),
    "an empty archive": lambda: archive_of({}),
    "many members": lambda: archive_of({f"x{i}": b"" for i in range(70_000)}),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_records_that_are_bombs(source: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    replace_record(source, NORM, RECORDS[name]())
    code, message = convert(source, capsys)
    assert code in (UNSAFE, INCOMPLETE, 7) and NORM in message and "fault of omniloom" not in message


@pytest.mark.parametrize("at", [0, 17, 127])
def test_one_changed_byte_of_a_record(source: Path, capsys: pytest.CaptureFixture[str], at: int) -> None:
    """Nothing but the checksum of the archive can tell."""
    stream = io.BytesIO()
    torch.save(torch.arange(32.0), stream)
    content = bytearray(stream.getvalue())
    start = content.index(torch.arange(32.0).numpy().tobytes())
    replace_record(source, NORM, bytes(content))
    assert convert(source, capsys)[0] == 0
    shutil.rmtree(source.parents[1] / "out")
    content[start + at] ^= 1
    replace_record(source, NORM, bytes(content))
    code, message = convert(source, capsys)
    assert code == INCOMPLETE and NORM in message and "checksum" in message


def test_a_changed_byte_of_a_record_that_is_read_in_parts(tmp_path: Path) -> None:
    tensor = torch.arange(4096.0).view(64, 64)
    save(tmp_path / "dcp", {"a": tensor})
    data = next((tmp_path / "dcp").glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[content.index(tensor.numpy().tobytes()) + 9000] ^= 4
    data.write_bytes(content)
    with DcpReader(tmp_path / "dcp") as reader:
        rows = [((start, start + 16), (0, 64)) for start in range(0, 64, 16)]
        for box in rows[:3]:
            reader.read("a", box)
        with pytest.raises(IncompleteSourceError, match="checksum"):
            reader.read("a", rows[3])
        reader.read("a", rows[2])  # of a part alone nothing is known
        reader.check_records = False  # what a conversion without verification does
        for box in rows:
            reader.read("a", box)


def test_records_without_checksums(tmp_path: Path) -> None:
    """torch.save can leave them out for speed."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        save(tmp_path / "dcp", {"a": torch.arange(6.0)})
        torch.save({"iteration": 4}, tmp_path / "common.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    with DcpReader(tmp_path / "dcp") as reader:
        assert torch.equal(reader.read("a"), torch.arange(6.0))
    assert load_common(tmp_path / "common.pt") == [{"iteration": 4}]


def test_records_of_no_bytes(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An object may be empty, as the extra state of Transformer Engine often is; a tensor may not."""
    with DcpReader(source) as reader:
        tensors = {name: reader.read(name) for name in reader.tensors}
    parent = source.parents[1] / "changed"
    checkpoint = save_megatron(parent, tensors, objects={"decoder.layers.0.mlp._extra_state": None})
    edit_metadata(
        checkpoint, lambda metadata: setattr(info_of(metadata, "decoder.layers.0.mlp._extra_state"), "length", 0)
    )
    assert convert(checkpoint, capsys)[0] == 0
    shutil.rmtree(source.parents[1] / "out")
    edit_metadata(checkpoint, lambda metadata: setattr(info_of(metadata, NORM), "length", 0))
    code, message = convert(checkpoint, capsys)
    assert code == INCOMPLETE and NORM in message


# --- safetensors


def header_file(path: Path, header: bytes, data: bytes = bytes(16)) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def entry(**values: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **values}}


HEADERS: dict[str, Any] = {
    "float offsets": entry(data_offsets=[0.0, 16.0]), "negative": entry(data_offsets=[-16, 0]),
    "huge": entry(data_offsets=[1 << 70, (1 << 70) + 16]), "one offset": entry(data_offsets=[16]),
    "true": entry(data_offsets=[False, 16]), "text": entry(data_offsets=["0", "16"]), "null": entry(data_offsets=None),
    "float shape": entry(shape=[4.0]), "true shape": entry(shape=[True, 4]), "text shape": entry(shape="4"),
    "huge shape": entry(shape=[0, 1 << 70], data_offsets=[0, 0]), "infinite": entry(shape=[float("inf")]),
    "many dimensions": entry(shape=[1] * 10_000 + [4]), "dtype list": entry(dtype=["F32"]),
    "metadata list": {**entry(), "__metadata__": [1]}, "metadata numbers": {**entry(), "__metadata__": {"a": 1}},
    "list": [entry()],
    "number": 3, "text alone": "a", "entry list": {"a": [1]}, "reversed": entry(data_offsets=[16, 0]),
    "control characters": {"a\x1b[31m": entry()["a"]}, "line break": {"a\nerror: x": entry()["a"]},
    "half a pair": {"a\ud800": entry()["a"]},
}  # fmt: skip
RAW: dict[str, bytes] = {
    "a key twice": b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":1}',
    "deep": b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "no text": b"\xff\xfe\xfd", "long number": b'{"a":' + b"9" * 10_000 + b"}", "empty": b"", "cut": b'{"a":{"dtype"',
}  # fmt: skip


@pytest.mark.parametrize("name", [*HEADERS, *RAW])
def test_headers_that_lie(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    header = RAW[name] if name in RAW else json.dumps(HEADERS[name]).encode()
    path = header_file(tmp_path / "model.safetensors", header)
    with pytest.raises((SchemaError, UnsafeInputError, IncompleteSourceError)) as raised:
        read_layout(path)
    assert str(path) in str(raised.value) and str(raised.value).isprintable()
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert omniloom("inspect", tmp_path) == raised.value.exit_code
    assert "fault of omniloom" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["pipe", "directory"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model.safetensors.index.json"])
def test_pipes_and_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, name: str) -> None:
    folder = make_text(tmp_path / "hf")
    (folder / "model.safetensors").rename(folder / "kept")
    (folder / name).unlink(missing_ok=True)
    capsys.readouterr()
    os.mkfifo(folder / name) if kind == "pipe" else (folder / name).mkdir()
    for command in (["relayout", folder, tmp_path / "out", "--layout", "v5"], ["inspect", folder], ["verify", folder]):
        assert omniloom(*command) in (2, 8)
        message = capsys.readouterr().err
        assert "fault of omniloom" not in message and "Errno" not in message
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("content", "code"),
    [('{"weight_map": 3}', 4), ('{"weight_map": {"a": 3}}', 6), ('{"weight_map": {"a": "b\\u0000"}}', 6), ("[]", 4),
     ('{"weight_map": {"a": "x", "a": "y"}}', 4), ("[" * 100_000, 4), ('{"weight_map": {"a\\u001b[31m": "../x"}}', 6),
     ('{"weight_map": {"a": "no.safetensors"}}', 8), ('{"weight_map": {}}', 8), ("{", 4)],
)  # fmt: skip
def test_an_index_that_lies(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, code: int) -> None:
    folder = make_text(tmp_path / "hf")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    capsys.readouterr()
    assert omniloom("relayout", folder, tmp_path / "out", "--layout", "v5") == code
    message = capsys.readouterr().err
    assert "fault of omniloom" not in message and message.strip().isprintable()
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_weights_that_end_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file shrinks after its header was checked."""
    from convert.directions import relayout_conversion  # noqa: PLC0415
    from convert.job import Options, run  # noqa: PLC0415

    folder = make_text(tmp_path / "hf")
    assert read_weights(folder)
    conversion = relayout_conversion(folder, "v5")
    os.truncate(folder / "model.safetensors", 20_000)
    with pytest.raises(OmniloomError, match=r"model\.safetensors"):
        run(conversion, tmp_path / "out", Options(), lambda count: None)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_link_to_itself(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (source / "__0_0.distcp").unlink()
    (source / "__0_0.distcp").symlink_to("__0_0.distcp")
    code, message = convert(source, capsys)
    assert code in (UNSAFE, INCOMPLETE) and "__0_0.distcp" in message and "fault of omniloom" not in message


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", '{"xxh3_64": 3}', '{"xxh3_64": [1]}'])
def test_a_record_of_a_conversion_that_lies(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    folder = make_text(tmp_path / "hf")
    (folder / "omniloom_conversion.json").write_text(content)
    capsys.readouterr()
    assert omniloom("verify", folder) == 4
    assert "omniloom_conversion.json is damaged" in capsys.readouterr().err
