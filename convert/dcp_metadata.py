"""`.metadata` of a torch distributed checkpoint, made from torch's own classes."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

# torch names the place of a record by this class, in every checkpoint that it writes
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

from convert.tensors import TensorInfo


@dataclass(frozen=True)
class StoredChunk:
    """A box of a tensor (where it begins, its sizes) and the bytes of the record that holds it."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


def metadata_bytes(
    tensors: Mapping[str, TensorInfo], chunks: Mapping[str, Sequence[StoredChunk]], save_id: str | None = None
) -> bytes:
    """The content of `.metadata`; the same bytes for the same arguments. save_id: what tells this checkpoint from
    another one of the same shapes."""
    entries: dict[str, Any] = {}
    storage: dict[dcp.MetadataIndex, _StorageInfo] = {}
    for name, info in tensors.items():
        boxes = []
        for index, chunk in enumerate(chunks[name]):
            boxes.append(dcp.ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.sizes)))
            storage[dcp.MetadataIndex(name, chunk.offset, index)] = _StorageInfo(chunk.file, chunk.start, chunk.length)
        properties = dcp.TensorProperties(dtype=info.dtype)
        entries[name] = dcp.TensorStorageMetadata(properties, torch.Size(info.shape), boxes)
    paths = {name: tuple(name.split(".", 1)) for name in entries}  # as from {"model": {parameter: tensor}}
    content = dcp.Metadata(entries, paths, storage, dcp.StorageMeta(save_id=save_id), CURRENT_DCP_VERSION)
    return pickle.dumps(content, protocol=4)
