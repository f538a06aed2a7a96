"""Distributed checkpoints for tests, written by torch's own writer in one process, cut into chunks as asked."""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

Boxes = Sequence[tuple[tuple[int, int], ...]]
Cut = Callable[[str, tuple[int, ...]], Boxes]


class ChunkingPlanner(DefaultSavePlanner):
    """Writes every tensor as the chunks that `cut` names, as many ranks together would."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.cut = cut

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for name, value in self.state_dict.items():
            if isinstance(value, io.BytesIO):
                items.append(WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO))
                continue
            for number, box in enumerate(self.cut(name, tuple(value.shape))):
                offsets = torch.Size(start for start, _ in box)
                sizes = torch.Size(stop - start for start, stop in box)
                data = TensorWriteData(
                    ChunkStorageMetadata(offsets, sizes), TensorProperties.create_from_tensor(value), value.shape
                )
                index = MetadataIndex(name, offsets, number)
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items, None, {})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        value = self.state_dict[write_item.index.fqn]
        if write_item.tensor_data is None:
            return value
        chunk = write_item.tensor_data.chunk
        where = zip(chunk.offsets, chunk.sizes, strict=True)
        return value[tuple(slice(start, start + size) for start, size in where)].clone()


def one_chunk(name: str, shape: tuple[int, ...]) -> Boxes:
    return [tuple((0, size) for size in shape)]


def grid(*parts: int) -> Cut:
    """Every dimension cut into as many nearly equal parts; 1 for dimensions that are not named."""

    def cut(name: str, shape: tuple[int, ...]) -> Boxes:
        ranges = []
        for size, count in itertools.zip_longest(shape, parts[: len(shape)], fillvalue=1):
            count = min(count, size)
            edges = [size * i // count for i in range(count + 1)]
            ranges.append(list(itertools.pairwise(edges)))
        return list(itertools.product(*ranges))

    return cut


def save(
    directory: Path, tensors: Mapping[str, torch.Tensor], cut: Cut = one_chunk, objects: Mapping[str, Any] | None = None
) -> Path:
    """A checkpoint directory with these tensors and pickled objects."""
    state: dict[str, Any] = dict(tensors)
    for name, value in (objects or {}).items():
        state[name] = io.BytesIO()
        torch.save(value, state[name])
    writer = dcp.FileSystemWriter(directory, thread_count=2)
    dcp.save(state, storage_writer=writer, planner=ChunkingPlanner(cut), no_dist=True)
    return directory


def save_megatron(
    parent: Path, tensors: Mapping[str, torch.Tensor], cut: Cut = one_chunk, objects: Mapping[str, Any] | None = None
) -> Path:
    """As Megatron lays it out: parent/iter_0000005 with metadata.json beside the files, and the tracker file."""
    directory = save(parent / "iter_0000005", tensors, cut, objects)
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (parent / "latest_checkpointed_iteration.txt").write_text("5")
    return directory


def edit_metadata(directory: Path, change: Callable[[Any], Any]) -> None:
    """Changes the genuine metadata object: `change` works in place or returns what is pickled instead."""
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(change(metadata) or metadata))


class Touch:
    """Its pickle creates a file when it is executed."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        import os  # noqa: PLC0415 - names the function in the pickle, as an attacker's would

        return os.system, (f"touch {self.marker}",)
