"""safetensors files against the library that defines them, box by box, and damaged in every way."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from convert.safetensors_io import SafetensorsReader, lay_out, read_layout, runs
from convert.tensors import TensorInfo
from schemas.errors import ConfigError, IncompleteSourceError, SchemaError, UnsafeInputError, UnsupportedError

TENSORS = {
    "a": torch.randn(5, 4, 3),
    "b": torch.randn(7).bfloat16(),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "bool": torch.tensor([True, False, True]),
    "int": torch.arange(6).view(2, 3),
    "float8": torch.randn(4, 4).to(torch.float8_e4m3fn),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def test_reads_what_the_library_wrote(folder: Path) -> None:
    reader = SafetensorsReader(folder)
    assert reader.tensors == {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in TENSORS.items()}
    for name, tensor in TENSORS.items():
        found = reader.read(name)
        assert found.dtype == tensor.dtype
        assert torch.equal(
            found.view(torch.uint8) if found.dim() else found, tensor.view(torch.uint8) if tensor.dim() else tensor
        ), name
    assert reader.bytes_read == sum(tensor.nbytes for tensor in TENSORS.values())


@given(st.data())
def test_box_is_the_same_slice(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    tensor = torch.randn(shape)
    box = tuple(tuple(sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape)
    info = TensorInfo(shape, torch.float32)
    raw = tensor.numpy().tobytes()
    taken = b"".join(raw[offset : offset + length] for offset, length in runs(info, box))  # type: ignore[arg-type]
    assert taken == tensor[tuple(slice(*bounds) for bounds in box)].numpy().tobytes()


def test_box_reads_its_bytes_only(folder: Path) -> None:
    reader = SafetensorsReader(folder)
    part = reader.read("a", ((1, 3), (0, 4), (2, 3)))
    assert torch.equal(part, TENSORS["a"][1:3, :, 2:3])
    assert reader.bytes_read == part.nbytes
    with pytest.raises(ValueError, match="does not lie within"):
        reader.read("a", ((0, 6), (0, 4), (0, 3)))


def test_layout_is_a_file_that_the_library_reads(tmp_path: Path) -> None:
    """Wider dtypes first, so that everything is aligned; the values are put where the layout says."""
    infos = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in TENSORS.items()}
    layout = lay_out(infos, {"format": "pt"})
    content = bytearray(layout.size)
    content[: len(layout.header)] = layout.header
    for name, (start, stop) in layout.spans.items():
        content[start:stop] = TENSORS[name].reshape(-1).view(torch.uint8).numpy().tobytes()
        assert start % TENSORS[name].element_size() == 0
    (tmp_path / "x.safetensors").write_bytes(content)
    found = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(found[n].float(), TENSORS[n].float()) for n in TENSORS)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert read_layout(tmp_path / "x.safetensors") == layout


def rewrite_header(path: Path, change) -> None:  # type: ignore[no-untyped-def]
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def test_truncated_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(IncompleteSourceError, match=r"has \d+ bytes, its header says \d+"):
        SafetensorsReader(folder)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(IncompleteSourceError, match="cut short"):
        SafetensorsReader(folder)


def test_overlapping_ranges(folder: Path) -> None:
    def overlap(header: dict) -> None:
        header["a"]["data_offsets"] = header["int"]["data_offsets"]
        header["a"]["shape"] = [12]

    rewrite_header(folder / "model.safetensors", overlap)
    with pytest.raises(SchemaError, match="begins at byte"):
        SafetensorsReader(folder)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (
            lambda h: h["a"].update(shape=[5, 4, 2]),
            SchemaError,
            r"a is said to be float32 \[5, 4, 2\] in 240 bytes; that is 160",
        ),
        (lambda h: h["a"].update(shape=[-5, 4, -3]), SchemaError, "a has the shape"),
        (lambda h: h["a"].update(dtype="F4"), UnsupportedError, "dtype F4"),
        (lambda h: h["a"].pop("shape"), SchemaError, "header is damaged"),
        (lambda h: h.update(a=3), SchemaError, "header is damaged"),
    ],
)
def test_header_that_lies(folder: Path, change, error: type[Exception], says: str) -> None:  # type: ignore[no-untyped-def]
    rewrite_header(folder / "model.safetensors", change)
    with pytest.raises(error, match=says):
        SafetensorsReader(folder)


def test_not_a_safetensors_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x80\x04 this is a pickle, perhaps")
    with pytest.raises(SchemaError, match="is not a safetensors file"):
        SafetensorsReader(folder)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "two.safetensors")
    write_index(tmp_path, a="one.safetensors", b="two.safetensors")
    return tmp_path


def write_index(folder: Path, **weight_map: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_index(sharded: Path) -> None:
    reader = SafetensorsReader(sharded)
    assert reader.file_of == {"a": "one.safetensors", "b": "two.safetensors"}
    assert reader.location("b") == ("two.safetensors", len(read_layout(sharded / "two.safetensors").header))


@pytest.mark.parametrize("file", ["../one.safetensors", "/etc/passwd", "sub/one.safetensors", "..", ""])
def test_index_that_leaves_the_folder(sharded: Path, file: str) -> None:
    write_index(sharded, a=file)
    with pytest.raises(UnsafeInputError, match="only files beside the index"):
        SafetensorsReader(sharded)


def test_index_and_files_that_disagree(sharded: Path) -> None:
    write_index(sharded, a="one.safetensors", b="two.safetensors", c="two.safetensors")
    with pytest.raises(IncompleteSourceError, match="lacks 1 tensors that the index names, such as c"):
        SafetensorsReader(sharded)
    write_index(sharded, a="one.safetensors", b="three.safetensors")
    with pytest.raises(IncompleteSourceError, match=r"three\.safetensors: no such file"):
        SafetensorsReader(sharded)
    save_file({"b": torch.ones(3), "d": torch.ones(1)}, sharded / "two.safetensors")
    write_index(sharded, a="one.safetensors", b="two.safetensors")
    with pytest.raises(SchemaError, match="holds 1 tensors that the index does not name, such as d"):
        SafetensorsReader(sharded)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has neither"):
        SafetensorsReader(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedError, match="pickled"):
        SafetensorsReader(tmp_path)


def test_fingerprint_changes_with_the_files(sharded: Path) -> None:
    before = SafetensorsReader(sharded).fingerprint
    assert SafetensorsReader(sharded).fingerprint == before
    save_file({"b": torch.zeros(3)}, sharded / "two.safetensors")
    assert SafetensorsReader(sharded).fingerprint != before
