"""The restricted unpickler: what it lets through is inert, all else is refused before it runs."""

from __future__ import annotations

import argparse
import pickle
import pickletools
from collections import Counter
from pathlib import Path

import numpy
import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta

from convert.restricted_pickle import Inert, is_inert, load_common, load_metadata, load_tensor_header
from schemas.errors import IncompleteSourceError, UnsafeInputError
from tests.convert.dcp_factory import Touch

MEGATRON = Path(__file__).parent / "megatron"


@pytest.mark.parametrize("path", sorted(MEGATRON.glob("*/iter_*/.metadata")), ids=lambda path: path.parts[-3])
def test_genuine_metadata_becomes_inert_objects(path: Path) -> None:
    data = path.read_bytes()
    root = load_metadata(data, "x")
    genuine = pickle.loads(data)
    assert is_inert(root, "Metadata") and not isinstance(root, Metadata)
    assert list(root.state["state_dict_metadata"]) == list(genuine.state_dict_metadata)
    kinds = Counter(type(entry).__name__ for entry in root.state["storage_data"].values())
    assert kinds == {"_StorageInfo": len(genuine.storage_data)}
    assert all(type(entry).__mro__[1] is Inert for entry in root.state["storage_data"].values())


def test_a_path_as_checkpoint_id_is_allowed() -> None:
    metadata = Metadata({"a": BytesStorageMetadata()}, None, {}, StorageMeta(checkpoint_id=Path("x/y")))
    root = load_metadata(pickle.dumps(metadata), "x")
    assert is_inert(root.state["storage_meta"].state["checkpoint_id"], "PosixPath")


@pytest.mark.parametrize("protocol", range(6))
def test_refused_in_every_protocol(tmp_path: Path, protocol: int) -> None:
    with pytest.raises(UnsafeInputError, match=r"posix\.system"):
        load_metadata(pickle.dumps([Touch(tmp_path / "executed")], protocol), "x")
    assert not (tmp_path / "executed").exists()


def frame(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


METADATA = text("torch.distributed.checkpoint.metadata") + text("Metadata") + b"\x93"
SIZE = text("torch") + text("Size") + b"\x93"


def test_a_pickle_cannot_change_a_class() -> None:
    """BUILD sets attributes on whatever is on the stack, a class too, by a pair of states."""
    state = b"N}" + text("__new__") + SIZE + b"s\x86b"
    before = dict(Inert.__dict__)
    with pytest.raises(IncompleteSourceError):
        load_metadata(frame(METADATA, state), "x")
    assert dict(Inert.__dict__) == before
    assert is_inert(load_metadata(frame(METADATA, b")R"), "x"), "Metadata")


@pytest.mark.parametrize(
    "data",
    [b"", b"\x80", b"not a pickle", frame(b"R"), frame(METADATA, b"}R"), frame(b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f"),
     frame(b"h\x05"), frame(b"\x82\x01"), frame(b"\x88\x88s")],
)  # fmt: skip
def test_damaged_pickles(data: bytes) -> None:
    with pytest.raises((IncompleteSourceError, UnsafeInputError)):
        load_metadata(data, "x")
        raise AssertionError(pickletools.dis(data))


def test_what_a_training_run_leaves_in_common_pt(tmp_path: Path) -> None:
    arguments = argparse.Namespace(
        num_layers=4, dtype=torch.bfloat16, path=Path("a"), seed=numpy.int64(3), curve=numpy.arange(4),
        device=torch.device("cpu"), activation=torch.nn.functional.silu, weights=torch.zeros(2), names={1, 2},
    )  # fmt: skip
    torch.save({"args": arguments, "iteration": 7}, tmp_path / "common.pt")
    (root,) = load_common(tmp_path / "common.pt")
    assert root["iteration"] == 7 and is_inert(root["args"], "Namespace")
    assert root["args"].state["num_layers"] == 4 and root["args"].state["dtype"] is torch.bfloat16
    assert load_common(tmp_path / "absent.pt") == []


def test_a_second_pickle_in_the_archive_is_read_too(tmp_path: Path) -> None:
    import zipfile  # noqa: PLC0415 - only this case needs it

    torch.save({"iteration": 1}, tmp_path / "common.pt")
    with zipfile.ZipFile(tmp_path / "common.pt", "a") as archive:
        archive.writestr("common/extra.pkl", pickle.dumps(Touch(tmp_path / "executed")))
    with pytest.raises(UnsafeInputError, match=r"extra\.pkl"):
        load_common(tmp_path / "common.pt")


def test_headers_of_tensors_allow_less(tmp_path: Path) -> None:
    with pytest.raises(UnsafeInputError):
        load_tensor_header(frame(METADATA), "x")
    header = pickle.dumps(torch.Size([3]))
    with pytest.raises(UnsafeInputError):
        load_tensor_header(header, "x")
