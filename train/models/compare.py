"""A native model against transformers, module by module: which is the first that computes something else.

Hooks keep what goes into and comes out of every module that both have under one name, for the same seeded input; one
model is in memory at a time. A module differs when its output does; the first in the order of computation is the place
to look, or the module around it when its input differs already and that of the module around it does not.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from convert.patterns import some
from convert.verify_logits import available_memory
from schemas.errors import UnsupportedError, VerificationError
from train.models.compare_inputs import kinds_of, make_case
from train.models.compare_record import Recording, Values, record_native, record_reference
from train.models.foundation import FoundationModel
from train.models.spec import ModelSource, build_foundation_model, read_model
from train.ops.registry import Ops

TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9}
COARSE = 5e-2  # of 16 bits, whose noise grows with depth


@dataclass(frozen=True)
class Row:
    """One module on one kind of input. difference: the greatest; relative: to the greatest value of transformers;
    given: the relative difference of its input, None where it has none."""

    kind: str
    path: str
    shape: tuple[int, ...]
    difference: float
    relative: float
    given: float | None

    def as_json(self) -> dict[str, Any]:
        return {
            "input": self.kind,
            "module": self.path,
            "max_difference": self.difference,
            "relative": self.relative,
            "relative_of_its_input": self.given,
        }


@dataclass(frozen=True)
class Comparison:
    """rows: of all kinds, in the order of computation; first: the module to look at; finished: the first whose output
    differs, which may lie inside; weights: parameters that are not the same bytes."""

    rows: tuple[Row, ...]
    tolerance: float
    first: Row | None
    finished: Row | None
    weights: tuple[str, ...]

    def differs(self, row: Row) -> bool:
        return not row.relative <= self.tolerance

    def check(self) -> None:
        """VerificationError that names the first module."""
        if self.first is None:
            return
        inner = self.finished if self.finished is not self.first else None
        inside = [name for name in self.weights if name.startswith(f"{self.first.path}.")]
        raise VerificationError(
            f"{self.first.path} is the first module that differs from transformers, on {self.first.kind}: by "
            f"{self.first.difference:.3g}, {self.first.relative:.3g} of the greatest value (allowed: "
            f"{self.tolerance:.3g})"
            + (f"; in it first the input of {inner.path}" if inner is not None else "")
            + (f"; of its weights differ: {some(inside)}" if inside else "")
            + (f"; all weights that differ: {some(self.weights)}" if self.weights and not inside else "")
        )


def compare_directory(
    folder: Path | str,
    ops: Ops,
    *,
    kinds: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    tolerance: float | None = None,
) -> Comparison:
    """Loads a model directory by both and compares them. kinds: of input, by default all that the family takes. In 16
    bits near ties of a router fall either way, so there our experts get the choices of transformers'.

    UnsupportedError: a model that does not fit into memory; VerificationError: transformers misses a tensor of it.
    """
    source = read_model(folder)
    cases = [make_case(k, source.spec, source.config, seed, device) for k in kinds or kinds_of(source.spec)]
    planned = build_foundation_model(folder, ops, device="meta", dtype=dtype)
    _check_memory(Path(folder), sum(parameter.nbytes for parameter in planned.parameters()), torch.device(device))
    reference = load_reference(source, dtype, device)
    theirs = record_reference(reference, source.spec, cases)
    del reference
    gc.collect()
    model = build_foundation_model(folder, ops, device=device, dtype=dtype)
    assert isinstance(model, FoundationModel)
    ours = record_native(model, cases, theirs.choices if dtype.itemsize < 4 else None)
    return compare(ours, theirs, TOLERANCES.get(dtype, COARSE) if tolerance is None else tolerance)


def load_reference(source: ModelSource, dtype: torch.dtype, device: torch.device | str = "cpu") -> nn.Module:
    """The model of transformers; VerificationError when it does not take every tensor of the directory."""
    load: Callable[..., Any] = getattr(transformers, source.spec.reference).from_pretrained
    model, info = load(
        source.path.parent,
        config=deepcopy(source.config),
        dtype=dtype,
        attn_implementation="sdpa",
        experts_implementation="eager",
        output_loading_info=True,
        local_files_only=True,
    )
    missing = sorted(info["missing_keys"])
    wrong = sorted(map(str, info.get("mismatched_keys") or ()))
    if missing or wrong:
        raise VerificationError(
            f"transformers loads {source.path.parent} without {some(missing) or 'fault'}"
            + (f", and with other shapes of {some(wrong)}" if wrong else "")
        )
    found: nn.Module = model.to(device).eval()
    return found


def compare(ours: Recording, theirs: Recording, tolerance: float) -> Comparison:
    """Of the modules that both recorded with as many values."""
    rows = [
        row
        for kind, modules in theirs.kinds.items()
        for path, values in modules.items()
        if (row := _row(kind, path, ours.kinds[kind].get(path), values)) is not None
    ]
    common = ours.weights.keys() & theirs.weights.keys()
    weights = tuple(sorted(name for name in common if ours.weights[name] != theirs.weights[name]))
    finished = next((row for row in rows if not row.relative <= tolerance), None)
    first = None if finished is None else _around(finished, rows, tolerance)
    return Comparison(tuple(rows), tolerance, first, finished, weights)


def _around(row: Row, rows: Sequence[Row], tolerance: float) -> Row:
    """The innermost module around a differing one whose own input does not differ; itself when there is none."""
    modules = {other.path: other for other in rows if other.kind == row.kind}
    path, found = row.path, row
    while found.given is not None and not found.given <= tolerance:
        path = path.rpartition(".")[0]
        if not path:
            return row
        found = modules.get(path, found)
    return found


def _row(kind: str, path: str, ours: Values | None, theirs: Values) -> Row | None:
    if ours is None or ours.made.numel() != theirs.made.numel():
        return None
    difference, relative = _difference(ours.made, theirs.made)
    given = None
    if ours.given is not None and theirs.given is not None and ours.given.numel() == theirs.given.numel():
        given = _difference(ours.given, theirs.given)[1]
    return Row(kind, path, tuple(ours.made.shape), difference, relative, given)


def _difference(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """(greatest difference, the same over the greatest value); NaN where either has one."""
    difference = float((ours.flatten() - theirs.flatten()).abs().max()) if ours.numel() else 0.0
    greatest = float(theirs.abs().max()) if theirs.numel() else 0.0
    return difference, difference / greatest if greatest else difference


def _check_memory(folder: Path, needed: int, device: torch.device) -> None:
    """UnsupportedError for a model of so many bytes that would bring the machine down."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    if free is not None and needed > free:
        raise UnsupportedError(
            f"{folder}: one model needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free; give another "
            "--dtype or --device"
        )
