"""After the fact: a model directory is read again and held against its configuration, its own record and its base.

Faults (names, shapes, dtypes, bytes that changed since they were written, NaN) end with exit code 4. What may be right
but should be looked at (a tensor that became zero, low cosine, nothing trained) is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import Any

from convert.compare import Comparison, Counterpart, compare
from convert.dcp import DcpReader
from convert.families import Model, expected, expert_form, model_of, read_config
from convert.job import Conversion
from convert.output import REPORT
from convert.patterns import some
from convert.safetensors_io import SafetensorsReader
from convert.small_files import read_object
from convert.tensors import TensorInfo, TensorReader
from convert.threads import Progress, Task, run_all
from schemas.errors import ConfigError, VerificationError

COSINE = 0.9  # below this a trained tensor has little in common with the one it was trained from


@dataclass
class Verification:
    """tensors: in the order of the output's names. against: name of the base, None when there was none. logits: what
    `convert.verify_logits` found, None when it was not asked for."""

    output: str
    against: str | None
    family: str
    tensors: list[Comparison] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    logits: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "output": self.output,
            "against": self.against,
            "family": self.family,
            "passed": not self.faults,
            "faults": self.faults,
            "warnings": self.warnings,
            "counts": self.counts(),
            "logits": self.logits,
            "unchanged": [tensor.name for tensor in self.tensors if tensor.unchanged],
            "all_zero": [tensor.name for tensor in self.tensors if tensor.zero],
            "tensors": [tensor.as_json() for tensor in self.tensors],
        }

    def counts(self) -> dict[str, int]:
        compared = [tensor for tensor in self.tensors if tensor.cosine is not None]
        return {
            "tensors": len(self.tensors),
            "bytes": sum(tensor.info.nbytes for tensor in self.tensors),
            "compared": len(compared),
            "unchanged": sum(bool(tensor.unchanged) for tensor in compared),
            "all_zero": sum(tensor.zero for tensor in self.tensors),
            "nonfinite": sum(tensor.nonfinite for tensor in self.tensors),
        }

    def check(self) -> None:
        """VerificationError with every fault, one a line."""
        if self.faults:
            raise VerificationError("\n".join(self.faults))


@dataclass(frozen=True)
class _Job:
    """What is compared with what. groups: how many groups of heads the rows of a tensor have."""

    reader: TensorReader
    counterparts: Mapping[str, Counterpart]
    groups: Mapping[str, int]


def verify(
    output: Path,
    against: Path | None = None,
    *,
    wanted: Mapping[str, TensorInfo] | None = None,
    workers: int = 4,
    progress: Progress = lambda count: None,
) -> Verification:
    """Reads every tensor of a model directory.

    against: a model of the same family, usually the base. wanted: names, shapes and dtypes that the output must have;
    by default those of its config.json and the dtypes of `against`. progress: told bytes of the output as they are
    read. ConfigError, IncompleteSourceError, SchemaError, UnsupportedError for a directory that cannot be read at all.
    """
    reader = SafetensorsReader(output)
    model = _model(output, reader)
    base = SafetensorsReader(against) if against is not None else None
    result = Verification(output.name, against.resolve().name if against else None, model.family.model_type)
    counterparts: dict[str, Counterpart] = {}
    if base is not None and against is not None:
        counterparts = _counterparts(model, reader, _model(against, base), base, result)
    if wanted is not None:
        _check_infos(reader.tensors, wanted, result)
    else:
        _check_names(model, reader, result)
        _check_dtypes(reader.tensors, counterparts, result)
    _check_tensors(_Job(reader, counterparts, _head_groups(model)), output, workers, progress, result)
    return result


def verify_conversion(output: Path, conversion: Conversion, progress: Progress, workers: int = 4) -> dict[str, Any]:
    """A `convert.job.Verifier`: what was just written must be what was planned. Returns `Verification.as_json()`.

    VerificationError with every fault.
    """
    wanted = {recipe.target: recipe.info for recipe in conversion.recipes}
    base = conversion.base
    if conversion.as_dcp:
        result = Verification(output.name, None, "distributed checkpoint")
        with DcpReader(output) as reader:
            _check_infos(reader.tensors, wanted, result)
            _check_tensors(_Job(reader, {}, {}), output, workers, progress, result)
    else:
        wanted |= {name: base.tensors[name] for name in conversion.copies} if base is not None else {}
        result = verify(output, base.folder if base else None, wanted=wanted, workers=workers, progress=progress)
    result.check()
    return result.as_json()


def _model(folder: Path, reader: SafetensorsReader) -> Model:
    return model_of(read_config(folder), str(folder / "config.json"), reader.tensors)


def _counterparts(
    model: Model, reader: SafetensorsReader, base_model: Model, base: SafetensorsReader, result: Verification
) -> dict[str, Counterpart]:
    """Output tensor -> the base's; fused experts of the other layout are compared transposed."""
    if base_model.family.model_type != model.family.model_type:
        raise ConfigError(
            f"{base.folder} is a {base_model.family.model_type}, the output a {model.family.model_type}; "
            "compare with a model of the same family, or the logits with --logits"
        )
    forms = expert_form(model, reader.tensors), expert_form(base_model, base.tensors)
    experts = f"{model.family.text}layers."
    found: dict[str, Counterpart] = {}
    for name, info in reader.tensors.items():
        theirs = _theirs(name, model, base_model)
        if theirs not in base.tensors:
            continue
        fused = name.startswith(experts) and name.endswith((".experts.gate_up_proj", ".experts.down_proj"))
        transposed = fused and forms[0] != forms[1]
        shape = base.tensors[theirs].shape
        shape = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
        if shape == info.shape:
            found[name] = Counterpart(base, theirs, transposed)
        else:
            result.warnings.append(f"{name} is {info}, in the base {base.tensors[theirs]}: not compared")
    if forms[0] != forms[1]:
        result.warnings.append(f"experts are stored as {forms[0]!r} here, as {forms[1]!r} in the base")
    return found


def _theirs(name: str, model: Model, base: Model) -> str:
    """The base's name of a tensor: the same, but for a `thinker.` that one of the two does not have."""
    if model.family.head == base.family.head or (model.family.rest and name.startswith(model.family.rest)):
        return name
    return base.family.head + name.removeprefix(model.family.head)


def _check_infos(tensors: Mapping[str, TensorInfo], wanted: Mapping[str, TensorInfo], result: Verification) -> None:
    _check_sets(set(tensors), set(wanted), result)
    wrong = [
        f"{name} is {tensors[name]}, not {info}"
        for name, info in wanted.items()
        if name in tensors and tensors[name] != info
    ]
    if wrong:
        result.faults.append(f"{len(wrong)} tensors have another shape or dtype than planned: {'; '.join(wrong[:8])}")


def _check_names(model: Model, reader: SafetensorsReader, result: Verification) -> None:
    """The names and shapes that config.json asks for, in the expert layout that the output has."""
    form = expert_form(model, reader.tensors)
    shapes = expected(model, None if form == "none" else form)
    rest = {name for name in reader.tensors if name.startswith(model.family.rest)} if model.family.rest else set()
    _check_sets(set(reader.tensors) - rest, set(shapes), result)
    if model.family.rest and not rest:
        result.warnings.append(f"no tensor of {', '.join(model.family.rest)}*: the model cannot speak")
    wrong = [
        f"{name} is {reader.tensors[name]}, config.json says {list(shape)}"
        for name, shape in shapes.items()
        if name in reader.tensors and reader.tensors[name].shape != shape
    ]
    if wrong:
        result.faults.append(f"{len(wrong)} tensors have another shape than config.json says: {'; '.join(wrong[:8])}")
    numbers = [name for name in shapes if name in reader.tensors and not reader.tensors[name].dtype.is_floating_point]
    if numbers:
        result.faults.append(f"{len(numbers)} tensors hold whole numbers, which are no weights: {some(numbers)}")


def _check_sets(there: set[str], wanted: set[str], result: Verification) -> None:
    if wanted - there:
        result.faults.append(f"{len(wanted - there)} tensors are missing: {some(wanted - there)}")
    if there - wanted:
        result.faults.append(f"{len(there - wanted)} tensors do not belong to the model: {some(there - wanted)}")


def _check_dtypes(
    tensors: Mapping[str, TensorInfo], counterparts: Mapping[str, Counterpart], result: Verification
) -> None:
    """A conversion with --dtype changes them on purpose, so this is for the user to judge."""
    changed: dict[str, list[str]] = {}
    for name, other in counterparts.items():
        before, after = other.reader.tensors[other.name].dtype, tensors[name].dtype
        if before != after:
            changed.setdefault(f"{str(before)[6:]} in the base, {str(after)[6:]} here", []).append(name)
    for change, names in changed.items():
        result.warnings.append(f"{len(names)} tensors are {change}: {some(names)}")


def _head_groups(model: Model) -> dict[str, int]:
    """Rows of q, k and v by key/value head: a wrong order of heads shows there."""
    at = f"{model.family.text}layers."
    heads = model.geometry.size("kv_heads")
    names = ("q_proj", "k_proj", "v_proj")
    return {f"{at}{i}.self_attn.{name}.weight": heads for i in model.geometry.ranges["layer"] for name in names}


def _check_tensors(job: _Job, output: Path, workers: int, progress: Progress, result: Verification) -> None:
    """Reads and judges every tensor."""
    result.tensors = _compare_all(job, workers, progress)
    _check_record(output, result)
    _judge(result)


def _compare_all(job: _Job, workers: int, progress: Progress) -> list[Comparison]:
    found: dict[str, Comparison] = {}
    lock = Lock()

    def one(name: str, stop: Event) -> None:
        groups = job.groups.get(name, 0)
        shape = job.reader.tensors[name].shape
        groups = groups if groups and shape and shape[0] % groups == 0 else 0
        result = compare(job.reader, name, job.counterparts.get(name), groups)
        with lock:
            found[name] = result
        progress(result.info.nbytes)

    names = sorted(job.reader.tensors, key=job.reader.location)
    tasks: Iterator[Task] = (partial(one, name) for name in names)
    run_all(tasks, workers)
    return [found[name] for name in job.reader.tensors]


def _check_record(output: Path, result: Verification) -> None:
    """The bytes against the hashes that the conversion noted as it wrote them."""
    path = output / REPORT
    if not path.is_file():
        return
    try:
        record = read_object(path)
        hashes = dict(record.get("xxh3_64") or {})
    except (ConfigError, ValueError, TypeError) as error:
        result.faults.append(f"{path} is damaged: {error}")
        return
    changed = [tensor.name for tensor in result.tensors if hashes.get(tensor.name, tensor.digest) != tensor.digest]
    if changed:
        result.faults.append(f"{len(changed)} tensors changed since they were written: {some(changed)}")


def _judge(result: Verification) -> None:
    """Faults and warnings from the comparisons."""
    broken = [f"{tensor.name} ({tensor.nonfinite})" for tensor in result.tensors if tensor.nonfinite]
    if broken:
        result.faults.append(f"{len(broken)} tensors hold NaN or Inf: {some(broken)}")
    died = [tensor.name for tensor in result.tensors if tensor.zero and tensor.base_zero is False]
    if died:
        result.warnings.append(f"{len(died)} tensors are all zero, in the base they are not: {some(died)}")
    empty = [
        tensor.name
        for tensor in result.tensors
        if tensor.zero and tensor.base_zero is None and len(tensor.info.shape) > 1 and tensor.info.numel
    ]
    if empty:
        result.warnings.append(f"{len(empty)} tensors are all zero: {some(empty)}")
    compared = [tensor for tensor in result.tensors if tensor.cosine is not None]
    far = [f"{tensor.name} ({tensor.cosine:.3f})" for tensor in compared if (tensor.cosine or 0) < COSINE]
    if far:
        result.warnings.append(f"{len(far)} of {len(compared)} tensors have a cosine below {COSINE}: {some(far)}")
    heads = [
        f"{tensor.name} (head group {i}: {value:.3f})"
        for tensor in compared
        if (tensor.cosine or 0) >= COSINE
        for i, value in enumerate(tensor.groups)
        if value < COSINE
    ]
    if heads:
        result.warnings.append(f"{len(heads)} head groups have a cosine below {COSINE}: {some(heads)}")
    if compared and all(tensor.unchanged for tensor in compared):
        result.warnings.append(f"all {len(compared)} compared tensors equal the base: was anything trained?")
