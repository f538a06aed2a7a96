"""One conversion from its plan to the finished directory: write, verify, commit; or leave nothing."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from convert.dcp_output import CHUNK_BYTES, DcpOutput
from convert.file_states import check_unchanged
from convert.fill import SLAB, row_bytes
from convert.ledger import Recipe
from convert.output import REPORT, OutputDirectory, check_space, digest, finished_files
from convert.safetensors_io import SafetensorsReader
from convert.shards import SHARD_BYTES, files_like, new_files
from convert.small_files import json_bytes
from convert.system_errors import as_error
from convert.tensors import ChecksRecords, TensorReader, dtype_name
from convert.threads import Progress
from convert.write import SafetensorsOutput
from schemas.errors import ResumableError


@dataclass(frozen=True)
class Conversion:
    """Everything that decides about the bytes of the output.

    recipes: of the tensors that are made. base: the model whose files the output has; its tensors that no recipe makes
    are copied, `copies` has the reasons. dropped, sliced: source tensors, or elements of them, that are left out, and
    why. files: the small files of the output by name, config.json among them. warnings: what the user must
    hear even if nothing is wrong. as_dcp: the output is a torch DCP.
    """

    direction: str
    source: str
    reader: TensorReader
    recipes: tuple[Recipe, ...]
    files: Mapping[str, bytes]
    base: SafetensorsReader | None = None
    copies: Mapping[str, str] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    sliced: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    as_dcp: bool = False


@dataclass(frozen=True)
class Options:
    """What does not change the output's bytes, but for the size of a shard (bytes)."""

    workers: int = 4
    resume: bool = True
    shard_bytes: int = SHARD_BYTES


Verifier = Callable[[Path, Conversion, Progress], Mapping[str, Any]]
Phase = Callable[[str, int, int], None]  # title, bytes of the whole phase, bytes that an earlier run has done


@dataclass(frozen=True)
class Result:
    """done_before: an earlier run had finished this output. verified: what the verifier reports."""

    done_before: bool
    bytes_written: int
    bytes_read: int
    verified: Mapping[str, Any] | None


class Output(Protocol):
    """The weight files of an output, whatever their format."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """File -> bytes."""

    @property
    def bytes_copied(self) -> int:
        """Bytes that come from the base as they are."""

    def key(self) -> Iterator[bytes]:
        """Everything that decides about the files' bytes, but for source and base."""

    def write(self, reader: TensorReader, out: OutputDirectory, workers: int, progress: Progress) -> None:
        """Writes the files that `out` does not have yet."""

    def small_files(self, out: OutputDirectory) -> Mapping[str, bytes]:
        """What binds the files together; asked for when all are finished."""


def output_of(conversion: Conversion, options: Options) -> Output:
    """Every file of the output with every tensor's place in it; nothing is read or written."""
    if conversion.as_dcp:
        return DcpOutput(conversion.recipes)
    if conversion.base is not None:
        return SafetensorsOutput(files_like(conversion.base, conversion.recipes), conversion.base)
    return SafetensorsOutput(new_files(conversion.recipes, options.shard_bytes))


def bytes_to_read(conversion: Conversion) -> int:
    """Of the source, as the recipes say."""
    return sum(
        piece.numel * conversion.reader.tensors[piece.source].dtype.itemsize
        for recipe in conversion.recipes
        for piece in recipe.pieces
    )


def memory_needed(conversion: Conversion, options: Options) -> int:
    """Bytes beside the libraries: for every thread a slab of a target and the pieces that it is made of."""
    least = max((row_bytes(recipe.info) for recipe in conversion.recipes), default=0)
    return options.workers * 3 * max(CHUNK_BYTES if conversion.as_dcp else SLAB, least)


def run(
    conversion: Conversion,
    output: Path,
    options: Options,
    progress: Progress,
    verify: Verifier | None = None,
    phase: Phase = lambda title, total, resumed: None,
) -> Result:
    """Writes `output`, or finds it done.

    progress: told bytes as they are written, then as they are verified; phase: told which of the two begins.
    ResumableError when the disk is full: what is finished stays for the next run, as it does after a signal. Any other
    error leaves nothing behind.
    """
    weights, out = planned(conversion, output, options)
    if isinstance(conversion.reader, ChecksRecords):
        conversion.reader.check_records = verify is not None
    total = sum(weights.sizes.values())
    if out.check(options.resume):
        out.tidy()
        return Result(True, 0, 0, None)
    try:
        out.open(options.resume)
        finished = sum(size for name, size in weights.sizes.items() if name in out.finished)
        check_space(out.partial, total - finished)
        phase("writing", total, finished)
        weights.write(conversion.reader, out, options.workers, progress)
        _write_small_files(conversion, weights, out)
        read = conversion.reader.bytes_read
        phase("verifying", total, 0)
        verified = verify(out.partial, conversion, progress) if verify else None
        check_unchanged(conversion.reader, *([conversion.base] if conversion.base else []))
        result = Result(False, total - finished, read, verified)
        out.commit()
    except OSError as error:
        if out.committed:  # whatever comes behind the rename, the output is whole and there
            return result
        stated = as_error(error, out.partial)
        out.close() if isinstance(stated, ResumableError) else out.discard()
        raise stated from error
    except Exception as error:
        if out.committed:
            return result
        out.close() if isinstance(error, ResumableError) else out.discard()
        raise
    except BaseException:  # a signal: the journal lets the next run go on
        out.close()
        if out.committed:
            return result
        raise
    return result


def planned(conversion: Conversion, output: Path, options: Options) -> tuple[Output, OutputDirectory]:
    """The files of an output and the directory for them, before anything is written."""
    weights = output_of(conversion, options)
    dtypes = ", ".join(sorted({dtype_name(recipe.info.dtype) for recipe in conversion.recipes}))
    begun = f"{conversion.direction} of {conversion.source} in {dtypes} with files of {options.shard_bytes} bytes"
    return weights, OutputDirectory(output, fingerprint_of(conversion, weights), begun)


def check_output(conversion: Conversion, output: Path, options: Options) -> bool:
    """What `run` would find out before it writes: True when the output is finished, else its errors."""
    weights, out = planned(conversion, output, options)
    if out.check(options.resume):
        return True
    there = finished_files(output) if options.resume else []
    check_space(out.partial, sum(size for name, size in weights.sizes.items() if name not in there))
    return False


def fingerprint_of(conversion: Conversion, weights: Output) -> str:
    """Of everything that decides about the output's bytes: source, base, small files, and each tensor's recipe."""
    state = hashlib.sha256()
    base = conversion.base.fingerprint if conversion.base else ""
    state.update(f"{conversion.direction}\0{conversion.reader.fingerprint}\0{base}\0".encode())
    for name, content in sorted(conversion.files.items()):
        state.update(f"{name}\0{len(content)}\0".encode() + content)
    for part in weights.key():
        state.update(part)
    return state.hexdigest()


def casts(conversion: Conversion) -> Counter[str]:
    """`float32 -> bfloat16`: number of target tensors that change their dtype so."""
    counted: Counter[str] = Counter()
    for recipe in conversion.recipes:
        for source in {conversion.reader.tensors[piece.source].dtype for piece in recipe.pieces}:
            if source != recipe.info.dtype:
                counted[f"{dtype_name(source)} -> {dtype_name(recipe.info.dtype)}"] += 1
    return counted


def report_of(
    conversion: Conversion, weights: Output, out: OutputDirectory, small_files: Mapping[str, bytes]
) -> dict[str, Any]:
    """What was done, to lie beside the weights: the same bytes for every run of the same conversion."""
    dropped: dict[str, list[str]] = {}
    for name, reason in sorted({**conversion.reader.skipped, **conversion.dropped}.items()):
        dropped.setdefault(reason, []).append(name)
    copied: dict[str, list[str]] = {}
    for name, reason in sorted(conversion.copies.items()):
        copied.setdefault(reason, []).append(name)
    hashes = {name: made for line in out.finished.values() for name, made in line.get("tensors", {}).items()}
    return {
        "omniloom": omniloom_version(),
        "direction": conversion.direction,
        "source": conversion.source,
        "base": conversion.base.folder.resolve().name if conversion.base else None,
        "fingerprint": out.fingerprint,
        "source_fingerprint": conversion.reader.fingerprint,
        "files": {name: out.finished[name]["size"] for name in weights.sizes},
        "small_files": {name: digest(content) for name, content in sorted(small_files.items())},
        "tensors_made": len(conversion.recipes),
        "tensors_from_base": copied,
        "tensors_dropped": dropped,
        "elements_dropped": {name: {"elements": n, "reason": why} for name, (n, why) in conversion.sliced.items()},
        "casts": dict(sorted(casts(conversion).items())),
        "notes": list(conversion.notes),
        "warnings": list(conversion.warnings),
        "xxh3_64": {name: hashes[name] for name in sorted(hashes)},
    }


def omniloom_version() -> str:
    try:
        return version("omniloom")
    except PackageNotFoundError:
        return "source tree"


def _write_small_files(conversion: Conversion, weights: Output, out: OutputDirectory) -> None:
    files = {**conversion.files, **weights.small_files(out)}
    report = json_bytes(report_of(conversion, weights, out, files), indent=1)
    for name, content in {**files, REPORT: report}.items():
        out.write(name, content)
