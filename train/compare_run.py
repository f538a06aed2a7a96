"""What `omniloom train compare` does: the choice of operations, the comparison, and how it is told."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from convert.tensors import dtype_name, dtype_of
from schemas.errors import ConfigError
from train.models.compare import Comparison, Row, compare_directory
from train.ops.device import describe_device
from train.ops.registry import AUTO, OPS, bind_ops, resolve

INSIDE_A_BLOCK = re.compile(r"\.(layers|blocks)\.\d+\.")


def run_comparison(
    folder: Path,
    kinds: Sequence[str],
    device: str,
    dtype: str,
    *,
    given: Iterable[str] = (),
    auto: bool = False,
    tolerance: float | None = None,
    seed: int = 0,
) -> Comparison:
    """kinds: of input; given: KEY=NAME of implementations; auto: for all others what training would choose, not the
    references."""
    place, kind = _device(device), dtype_of(dtype)
    described = describe_device(place)
    names = resolve(_implementations(given, auto=auto), described, dtype_name(kind))
    ops = bind_ops(names, described, dtype_name(kind))
    return compare_directory(folder, ops, kinds=kinds, dtype=kind, device=place, seed=seed, tolerance=tolerance)


def show_comparison(found: Comparison, *, every: bool = False, as_json: bool = False) -> str:
    """A table, or one JSON object. every: a line for each module, not only for each block."""
    return json.dumps(_report(found)) if as_json else "\n".join(_lines(found, every))


def _report(found: Comparison) -> dict[str, object]:
    """What `--json` prints."""
    return {
        "tolerance": found.tolerance,
        "first": None if found.first is None else found.first.as_json(),
        "weights": list(found.weights),
        "modules": [row.as_json() for row in found.rows],
    }


def _lines(found: Comparison, every: bool) -> list[str]:
    """A line for each module, of blocks for the whole block unless every module is asked for."""
    named = (found.first, found.finished)
    shown = [row for row in found.rows if every or row in named or not INSIDE_A_BLOCK.search(f"{row.path}")]
    width = max((len(row.path) for row in shown), default=0)
    head = f"{'input':<6} {'module':<{width}} {'shape':<16} {'max difference':>14} {'relative':>10}"
    table = [head, *(_line(row, width, found.differs(row)) for row in shown)]
    kinds = ", ".join(dict.fromkeys(row.kind for row in found.rows))
    differing = sum(map(found.differs, found.rows))
    said = f"{differing} of {len(found.rows)} modules differ" if differing else f"{len(found.rows)} modules agree"
    return [*table, f"{said} within {found.tolerance:.3g} of the greatest value, on {kinds}"]


def _line(row: Row, width: int, differs: bool) -> str:
    shape = "x".join(map(str, row.shape))
    line = f"{row.kind:<6} {row.path:<{width}} {shape:<16} {row.difference:>14.3g} {row.relative:>10.3g}"
    return line + ("  differs" if differs else "")


def _implementations(given: Iterable[str], *, auto: bool) -> dict[str, str]:
    """Key -> name; by default the references that every backend must equal, attention by sdpa."""
    names = {entry.key: AUTO if auto else "sdpa" if op == "attention" else "eager" for op, entry in OPS.items()}
    for text in given:
        key, equals, name = text.partition("=")
        if not equals:
            raise ConfigError(f"--op {text}: must be KEY=NAME, such as attn_implementation=sdpa")
        names[key] = name
    return names


def _device(name: str) -> torch.device:
    kind, colon, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (colon and not index.isdecimal()):
        raise ConfigError(f"--device {name}: must be cpu, cuda or cuda:N")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices here")
    return torch.device(name)
