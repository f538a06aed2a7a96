"""A torch distributed checkpoint written as a stream, to be loaded by `torch.distributed.checkpoint` at any world size.

Tensors are cut along their first dimension into records of bounded size, each a complete `torch.save` of its chunk, as
torch's own writer makes them. Files are written in parallel; `.metadata`, which makes them a checkpoint, comes last.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from convert.fill import slabs
from convert.ledger import Recipe
from convert.output import OutputDirectory
from convert.shards import natural
from convert.tensors import TensorReader
from convert.threads import Progress, Task, run_all

CHUNK_BYTES = 8 << 20  # of a tensor in one record
FILE_BYTES = 1 << 30


class DcpOutput:
    """The files of a checkpoint directory; see `convert.job.Output`. Sizes are those of the tensors: a record's
    frame adds about 1.5 kB."""

    def __init__(self, recipes: Sequence[Recipe]) -> None:
        groups: list[list[Recipe]] = [[]]
        size = 0
        for recipe in sorted(recipes, key=lambda recipe: natural(recipe.target)):
            if groups[-1] and size + recipe.info.nbytes > FILE_BYTES:
                groups.append([])
                size = 0
            groups[-1].append(recipe)
            size += recipe.info.nbytes
        self.files = {f"__0_{number}.distcp": tuple(group) for number, group in enumerate(groups)}

    @property
    def sizes(self) -> Mapping[str, int]:
        return {name: sum(recipe.info.nbytes for recipe in recipes) for name, recipes in self.files.items()}

    @property
    def bytes_copied(self) -> int:
        return 0

    def key(self) -> Iterator[bytes]:
        for name, recipes in self.files.items():
            yield f"{name}\0{recipes}".encode()

    def write(self, reader: TensorReader, out: OutputDirectory, workers: int, progress: Progress) -> None:
        tasks: Iterator[Task] = (
            partial(_write_file, name, recipes, reader, out, progress)
            for name, recipes in self.files.items()
            if name not in out.finished
        )
        run_all(tasks, workers)

    def small_files(self, out: OutputDirectory) -> Mapping[str, bytes]:
        """`.metadata`, from the records that the journal lists."""
        # here, since torch.distributed takes half a second and 50 MB that no other direction needs
        from convert.dcp_metadata import StoredChunk, metadata_bytes  # noqa: PLC0415

        chunks = {
            recipe.target: [
                StoredChunk(tuple(offset), tuple(sizes), file, start, length)
                for offset, sizes, start, length in out.finished[file]["records"][recipe.target]
            ]
            for file, recipes in self.files.items()
            for recipe in recipes
        }
        infos = {recipe.target: recipe.info for recipes in self.files.values() for recipe in recipes}
        return {".metadata": metadata_bytes(infos, chunks, out.fingerprint)}


def _write_file(
    name: str,
    recipes: Sequence[Recipe],
    reader: TensorReader,
    out: OutputDirectory,
    progress: Progress,
    stop: threading.Event,
) -> None:
    """One file, record after record. Notes for the journal: tensor -> [(offset, sizes, first byte, bytes)]."""
    records: dict[str, list[tuple[list[int], list[int], int, int]]] = {}
    position = 0
    with out.temporary(name).open("wb") as file:
        for recipe in recipes:
            records[recipe.target] = []
            row = 0
            for chunk in slabs(recipe, reader, CHUNK_BYTES):
                if stop.is_set():
                    return
                frame = io.BytesIO()
                torch.save(chunk, frame)
                length = file.write(frame.getbuffer())
                offset = [row, *[0] * (chunk.dim() - 1)] if chunk.dim() else []
                records[recipe.target].append((offset, list(chunk.shape), position, length))
                position += length
                row += chunk.shape[0] if chunk.dim() else 0
                progress(chunk.nbytes)
        file.flush()
        os.fsync(file.fileno())
    out.finish(name, {"records": records})
