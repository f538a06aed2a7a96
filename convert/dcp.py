"""Weights of a torch distributed checkpoint, read box by box: Megatron's torch_dist and torch's own FSDP2 checkpoints.

Only the bytes of the asked box are read, straight from the records of the `.distcp` files; no pickle is executed. What
is no weight (optimizer state, random state, extra state of Transformer Engine) is named in `skipped` and never opened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from convert.archives import Checksums
from convert.dcp_index import METADATA_FILE, Chunk, DcpIndex, Record, StoredTensor, read_index
from convert.dcp_record import Place, data_start, load_record
from convert.file_states import FileStates
from convert.open_files import OpenFiles
from convert.printing import printable
from convert.tensors import Box, TensorInfo, box_shape, check_box, full_box
from convert.tiling import BoxTree
from schemas.errors import IncompleteSourceError, UnsafeInputError, UnsupportedError

BLOCK = 16 << 20  # bytes read at once where they cannot go straight to their place

# kinds of entries that are no weights, each matched on whole parts of the name, whatever prefix stands before
_NO_WEIGHT: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?:.*\.)?(?:chained_\d+\.)?(?:optimizer|optimizers|optim)\..*"), "optimizer state"),
    (re.compile(r"(?:.*[./])?_extra_state\d*(?:/shard_[\d._]+)?"), "extra state of Transformer Engine"),
    (re.compile(r"(?:.*\.)?rng_state(?:[./].*)?"), "state of the random generators"),
    (re.compile(r"(?:.*\.)?rerun_state_machine_state(?:[./].*)?"), "state of the rerun machine"),
    (re.compile(r"(?:.*\.)?opt_param_scheduler(?:[./].*)?"), "state of the learning rate schedule"),
    (re.compile(r"(?:lr_)?schedulers?\..*"), "state of the learning rate schedule"),
    (re.compile(r"(?:dataloader|train_state|rng)(?:[./].*)?"), "state of the training loop"),
)
_MASTER = re.compile(r"(?:.*\.)?(?:chained_\d+\.)?optimizer\.state\.fp32_param\.(.+)")


def no_weight(name: str) -> str | None:
    """Why an entry of a checkpoint is no weight of the model, None when it may be one."""
    return next((reason for pattern, reason in _NO_WEIGHT if pattern.fullmatch(name)), None)


class DcpReader:
    """A `convert.tensors.TensorReader` over one checkpoint directory; close it, or use it as a context.

    from_master: take the fp32 masters of the optimizer, under the names of their parameters, wherever there is one.
    Errors of the constructor: those of `read_index`; UnsafeInputError when chunks overlap; UnsupportedError when
    masters are asked for and there are none that have the shape of their parameters.
    """

    def __init__(self, directory: Path, *, from_master: bool = False) -> None:
        self.index: DcpIndex = read_index(
            directory, lambda name: no_weight(name) is None or (from_master and _MASTER.fullmatch(name) is not None)
        )
        self.skipped: dict[str, str] = {
            name: no_weight(name) or "an object, no tensor" for name in (*self.index.objects, *self.index.others)
        }
        unknown = [name for name in self.index.objects if no_weight(name) is None]
        if unknown:
            raise UnsupportedError(
                f"{directory}: {len(unknown)} entries are Python objects of no known kind, which may hold "
                f"weights: {', '.join(map(printable, sorted(unknown)[:4]))}"
            )
        self._stored = {name: stored for name, stored in self.index.tensors.items() if no_weight(name) is None}
        self.masters: tuple[str, ...] = ()
        self.without_masters: tuple[
            str, ...
        ] = ()  # parameters that are taken as they are, though masters were asked for
        if from_master:
            self._take_masters()
        self._trees = {name: _tree(name, stored) for name, stored in self._stored.items()}
        self.tensors: Mapping[str, TensorInfo] = {name: stored.info for name, stored in self._stored.items()}
        self._states = FileStates((directory / METADATA_FILE, *(directory / file for file in self.index.files)))
        self._files = OpenFiles()
        self._places: dict[Record, Place | None] = {}  # where the data lies; None: only torch can read it
        self.check_records = True
        self._checksums = Checksums()

    def __enter__(self) -> DcpReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._files.close()

    @property
    def fingerprint(self) -> str:
        return self.index.fingerprint + (".masters" if self.masters else "")

    @property
    def bytes_read(self) -> int:
        return self._files.bytes_read

    def changed(self) -> Iterable[Path]:
        return self._states.changed()

    def location(self, name: str) -> tuple[str, int]:
        records = [chunk.record for chunk in self._stored[name].chunks]
        return min(((record.file, record.offset) for record in records), default=("", 0))

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A new contiguous tensor of the box's shape in the stored dtype."""
        stored = self._stored[name]
        box = full_box(stored.info.shape) if box is None else box
        check_box(name, box, stored.info.shape)
        out = torch.empty(box_shape(box), dtype=stored.info.dtype)
        if not out.numel():
            return out
        filled = 0
        for i, common in self._trees[name].overlapping(box):
            chunk = stored.chunks[i]
            target = out[tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(common, box, strict=True))]
            region = tuple((a - low, b - low) for (a, b), (low, _) in zip(common, chunk.box, strict=True))
            self._read_region(name, chunk, region, target)
            filled += target.numel()
        if filled != out.numel():
            raise IncompleteSourceError(f"{name}: chunks hold {filled} of the {out.numel()} elements of {box}")
        return out

    def _read_region(self, name: str, chunk: Chunk, region: Box, target: torch.Tensor) -> None:
        """Reads a region of one chunk, in the chunk's own coordinates, into `target`."""
        record = chunk.record
        path = self.index.directory / record.file
        expected = TensorInfo(box_shape(chunk.box), target.dtype)
        what = f"{path}: the record of {name} at byte {record.offset}"
        if record not in self._places:
            self._places[record] = data_start(
                lambda offset, size: self._bytes(path, record.offset + offset, size), record.length, expected, what
            )
        place = self._places[record]
        if place is None:
            whole = load_record(self._bytes(path, record.offset, record.length), expected, what)
            target.copy_(whole[tuple(slice(low, high) for low, high in region)])
            return
        strides = [target.dtype.itemsize]
        for size in reversed(expected.shape[1:]):
            strides.insert(0, strides[0] * size)
        begin = record.offset + place.start

        def read(offset: int, buffer: memoryview) -> None:
            self._files.read_into(path, begin + offset, buffer)
            checked = self.check_records and place.checksum
            if checked and not self._checksums.matches(record, offset, buffer, expected.nbytes, place.checksum):
                raise IncompleteSourceError(f"{what} is damaged: its bytes do not have the checksum that it states")

        _fill(read, 0, expected.shape, tuple(strides), region, target)

    def _bytes(self, path: Path, offset: int, size: int) -> bytes:
        data = bytearray(size)
        self._files.read_into(path, offset, memoryview(data))
        return bytes(data)

    def _take_masters(self) -> None:
        """Puts the fp32 masters in the place of the parameters of the same name."""
        taken: list[str] = []
        for name, stored in self.index.tensors.items():
            found = _MASTER.fullmatch(name)
            if found is None:
                continue
            parameter = found[1]
            if parameter not in self._stored:
                self.skipped[name] = "optimizer state"
                continue
            if stored.info.shape != self._stored[parameter].info.shape:
                raise UnsupportedError(
                    f"{name} is {stored.info}, its parameter {self._stored[parameter].info}: flattened masters of old "
                    "checkpoints are not handled; convert without --from-master"
                )
            self._stored[parameter] = stored
            taken.append(parameter)
        if not taken:
            raise UnsupportedError(
                f"{self.index.directory} has no fp32 masters (optimizer.state.fp32_param.*); "
                "convert without --from-master"
            )
        self.masters = tuple(taken)
        self.without_masters = tuple(name for name in self._stored if name not in set(taken))


def _tree(name: str, stored: StoredTensor) -> BoxTree:
    tree = BoxTree([chunk.box for chunk in stored.chunks])
    overlap = tree.first_overlap()
    if overlap is not None:
        boxes = " and ".join(str(tree.boxes[i]) for i in overlap)
        raise UnsafeInputError(f"the chunks {boxes} of {name} overlap; the index is not to be trusted")
    return tree


def _fill(
    read: Callable[[int, memoryview], None],
    base: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    region: Box,
    target: torch.Tensor,
) -> None:
    """Reads a region of a stored tensor, in the order of its bytes. read: fills a buffer from an offset of the tensor's
    bytes; base: the offset of the first element; target: [region's shape]."""
    if _is_one_run(region, shape) and (target.is_contiguous() or target.nbytes <= BLOCK):
        first = base + sum(low * step for (low, _), step in zip(region, strides, strict=False))
        straight = target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype)
        read(first, straight.reshape(-1).view(torch.uint8).numpy().data)
        if straight is not target:
            target.copy_(straight)
        return
    low, high = region[0]
    if high - low == 1:
        _fill(read, base + low * strides[0], shape[1:], strides[1:], region[1:], target[0])
        return
    middle = (low + high) // 2
    _fill(read, base, shape, strides, ((low, middle), *region[1:]), target[: middle - low])
    _fill(read, base, shape, strides, ((middle, high), *region[1:]), target[middle - low :])


def _is_one_run(region: Box, shape: tuple[int, ...]) -> bool:
    """True when the region's elements lie side by side: single indices, one range, then whole dimensions."""
    dim = 0
    while dim < len(shape) and region[dim][1] - region[dim][0] == 1:
        dim += 1
    return all(region[d] == (0, shape[d]) for d in range(dim + 1, len(shape)))
