"""torch's distributed checkpoint, without its pickles: `.metadata` is read by convert's restricted reader, tensors are
loaded with weights_only, and nothing but tensors is ever saved."""

from __future__ import annotations

import io
import json
import pickle
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from convert.dcp_index import DcpIndex, StoredTensor
from convert.output import write_atomic
from convert.patterns import some
from convert.small_files import read_object
from convert.tensors import TensorInfo, box_shape
from convert.trainer import STATE_FILE
from schemas.errors import ConfigError, IncompleteSourceError, OmniloomError, UnsafeInputError, UnsupportedError

STATE_VERSION = 1
CHUNK_BYTES = 16 << 20  # read at once to compare a checksum
WRITE_THREADS = 4  # files that a rank writes at a time


class StepWriter(FileSystemWriter):
    """Writes the files of a step. finished: called on rank 0 when the files of all ranks are there and `.metadata` is
    written; an error of it is one of the save, on every rank."""

    def __init__(self, folder: Path, finished: Callable[[], None]) -> None:
        super().__init__(folder, thread_count=WRITE_THREADS, sync_files=True)
        self._folder, self._finished = folder, finished

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """See `StorageWriter.finish`."""
        super().finish(metadata, results)
        files = {result.storage_data.relative_path for of_rank in results for result in of_rank}
        if missing := sorted(name for name in files if not (self._folder / name).is_file()):
            raise IncompleteSourceError(
                f"{self._folder}: {missing[0]} and {len(missing) - 1} more files of other ranks are not visible here; "
                "train.checkpoint.output_dir must be a folder that all nodes share"
            )
        self._finished()


class IndexReader(FileSystemReader):
    """Reads a checkpoint whose index was read and checked by convert. torch writes a checksum into every record and
    never looks at it; here it is compared."""

    def __init__(self, index: DcpIndex) -> None:
        super().__init__(index.directory)
        self._index = index
        self._intact: set[tuple[str, int]] = set()

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        place = (sinfo.relative_path, sinfo.offset)
        if place not in self._intact:
            what = f"{self._index.directory / sinfo.relative_path}: the record at byte {sinfo.offset}"
            _check_record(_Record(file, sinfo.offset, sinfo.length), what)
            self._intact.add(place)
        return super()._slice_file(file, sinfo)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index in torch's classes; no pickle is read."""
        entries: dict[str, Any] = {}
        storage: dict[MetadataIndex, _StorageInfo] = {}
        for name, stored in self._index.tensors.items():
            chunks = []
            for number, chunk in enumerate(stored.chunks):
                offset = torch.Size(low for low, _ in chunk.box)
                chunks.append(ChunkStorageMetadata(offset, torch.Size(box_shape(chunk.box))))
                record = chunk.record
                storage[MetadataIndex(name, offset, number)] = _StorageInfo(record.file, record.offset, record.length)
            properties = TensorProperties(dtype=stored.info.dtype)
            entries[name] = TensorStorageMetadata(properties, torch.Size(stored.info.shape), chunks)
        return Metadata(entries, None, storage, StorageMeta(load_id=self.load_id))


class _Record(io.RawIOBase):
    """The bytes of a record, as a file of their own."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(self._length - self._at, 0)]
        self._file.seek(self._start + self._at)
        data = self._file.read(len(view))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def _check_record(record: _Record, what: str) -> None:
    """Compares the checksums of everything in a record."""
    try:
        with zipfile.ZipFile(io.BufferedReader(record)) as archive:
            for entry in archive.infolist():
                with archive.open(entry) as content:
                    while content.read(CHUNK_BYTES):
                        pass
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise IncompleteSourceError(f"{what} is damaged: {error}") from error


def write_tensors(
    tensors: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup | None, finished: Callable[[], None]
) -> None:
    """Saves tensors, sharded ones as what they are together; every rank of the group calls it. OmniloomError with the
    rank and the reason when it fails anywhere."""
    with warnings.catch_warnings(), _told(f"{folder}: the checkpoint could not be written", OmniloomError):
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_save(dict(tensors), storage_writer=StepWriter(folder, finished), process_group=group, no_dist=group is None)


def _nested(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """By the first part of the name; torch flattens them to the same names, and logs each entry at the top."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        parts.setdefault(part, {})[rest] = tensor
    return parts


class _CountingPlanner(DefaultLoadPlanner):
    """Tells the bytes of this rank's shards as they are filled."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        super().__init__()
        self._advance = advance

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """See `LoadPlanner.commit_tensor`."""
        super().commit_tensor(read_item, tensor)
        self._advance(tensor.nbytes)


def read_tensors(
    index: DcpIndex,
    tensors: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Fills tensors, each rank its own shards; every rank of the group calls it. Their names, shapes and dtypes must
    have been checked. advance: told the bytes that this rank has filled. IncompleteSourceError for damaged records,
    UnsafeInputError for those that want to run code."""
    with warnings.catch_warnings(), _told(f"{index.directory}: the checkpoint cannot be read", IncompleteSourceError):
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_load(
            dict(tensors),
            storage_reader=IndexReader(index),
            planner=_CountingPlanner(advance),
            process_group=group,
            no_dist=group is None,
        )


def local_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Of this rank's shards."""
    return sum((it.to_local() if isinstance(it, DTensor) else it).nbytes for it in tensors.values())


def read_state(path: Path) -> dict[str, Any]:
    """state.json of a checkpoint. ConfigError when there is none, UnsupportedError for another version,
    IncompleteSourceError for a damaged one."""
    where = path / STATE_FILE
    try:
        record = read_object(where, IncompleteSourceError)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: has no {STATE_FILE}; it is no checkpoint of a training run") from error
    if record.get("version") != STATE_VERSION:
        raise UnsupportedError(f"{where}: has version {record.get('version')}; this omniloom reads {STATE_VERSION}")
    kinds = {"family": str, "step": int, "world_size": int, "optimizer": dict}
    if wrong := [key for key, kind in kinds.items() if not isinstance(record.get(key), kind)]:
        raise IncompleteSourceError(f"{where}: {wrong[0]} is missing or of the wrong kind")
    return record


def state_bytes(record: Mapping[str, Any]) -> bytes:
    """The content of a state.json."""
    return json.dumps(record, indent=1).encode()


def amend_state(path: Path, values: Mapping[str, Any]) -> None:
    """Other values of keys of the state.json of a checkpoint, all at once. Raises as `read_state`; OSError."""
    write_atomic(path / STATE_FILE, state_bytes({**read_state(path), **values}))


def check_family(path: Path, record: Mapping[str, Any], family: str) -> None:
    """ConfigError when the model of a checkpoint is of another family. record: of `read_state`."""
    if record["family"] != family:
        raise ConfigError(f"{path}: is a checkpoint of a {record['family']}; the model is a {family}")


def check_tensors(path: Path, ours: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], prefix: str) -> None:
    """Names, shapes and dtypes of the model must be those of the checkpoint."""
    advice = "model.model_path or model.config_path must name the model that was saved, or output_dir another run"
    theirs = {name: tensor.info for name, tensor in stored.items() if name.startswith(prefix)}
    if missing := set(ours) - set(theirs):
        raise ConfigError(f"{path}: lacks {len(missing)} tensors of the model: {some(missing)}; {advice}")
    if extra := set(theirs) - set(ours):
        raise ConfigError(f"{path}: has {len(extra)} tensors that the model does not have: {some(extra)}; {advice}")
    for name, info in theirs.items():
        shape, dtype = tuple(ours[name].shape), ours[name].dtype
        if (info.shape, info.dtype) != (shape, dtype):
            ours_is = TensorInfo(shape, dtype)
            raise ConfigError(f"{path}: {name} is {info} in the checkpoint and {ours_is} in the model; {advice}")


@contextmanager
def _told(what: str, kind: type[OmniloomError]) -> Iterator[None]:
    """Turns what torch raises into one error with its cause."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        rank, cause = None, error
        if isinstance(error, CheckpointException) and error.failures:
            rank = min(error.failures)
            cause = error.failures[rank][0]  # type: ignore[assignment]
        at = "" if rank is None else f"rank {rank}: "
        if isinstance(cause, OmniloomError):
            raise type(cause)(f"{at}{cause}") from error
        made = UnsafeInputError if isinstance(cause, pickle.UnpicklingError) else kind
        said = (str(cause).splitlines() or [""])[0]
        raise made(f"{what}: {at}{type(cause).__name__}: {said}") from error
