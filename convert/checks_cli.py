"""The two commands of `omniloom convert` that only look: inspect and verify."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from convert.families import read_config
from convert.inspection import Inspection, inspect_source
from convert.output import write_atomic
from convert.progress import Meter, gigabytes, shown
from convert.safetensors_io import SafetensorsReader
from convert.system_errors import stated
from convert.tensors import dtype_name
from convert.verify import Verification, verify
from convert.verify_logits import compare_logits
from convert.verify_table import kind_of, table
from schemas.errors import ConfigError, VerificationError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def inspect_command(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A checkpoint of any kind.")],
    as_json: Json = False,
    every: Annotated[bool, typer.Option("--all", help="A line for every tensor, not for every kind.")] = False,
) -> None:
    """What a checkpoint is: kind, family, variant, tensors, and what a conversion would skip. Reads no tensor."""
    with stated():
        found = inspect_source(source)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=1, ensure_ascii=False))
        return
    typer.echo("\n".join(found.lines()))
    print_table(tensor_table(found, every))


def verify_command(
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="A Hugging Face model directory.")],
    against: Annotated[
        Path | None, typer.Option("--against", metavar="HF_DIR", help="The base, or another model to compare with.")
    ] = None,
    logits: Annotated[
        bool, typer.Option("--logits", help="Also run both models in transformers on the same seeded input.")
    ] = False,
    report: Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write the report as JSON.")] = None,
    as_json: Json = False,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Threads that read and compare.")] = 4,
) -> None:
    """Read a converted model again: names, shapes, dtypes, NaN, hashes, and cosine per tensor and head group."""
    if logits and against is None:
        raise ConfigError("--logits needs --against: the model whose logits the output's are compared with")
    with stated():
        result = run_verification(output, against, logits, workers)
    content = json.dumps(result.as_json(), indent=1, ensure_ascii=False)
    if report is not None:
        with stated():
            write_atomic(report, (content + "\n").encode())
    if as_json:
        typer.echo(content)
    else:
        _show(result)
    result.check()


def run_verification(output: Path, against: Path | None, logits: bool, workers: int) -> Verification:
    """Tensors first; the logits only of an output whose tensors have no fault. Of two models of different families
    only the logits are compared."""
    same = against is None or not logits or _family(output) == _family(against)
    meter = Meter()
    meter.begin("verifying", sum(info.nbytes for info in SafetensorsReader(output).tensors.values()), 0)
    with shown(meter):
        result = verify(output, against if same else None, workers=workers, progress=meter.add)
    if logits and against is not None and not result.faults:
        try:
            result.logits = compare_logits(output, against).as_json()
        except VerificationError as error:
            result.faults.append(str(error))
    return result


def _family(folder: Path) -> Any:
    return read_config(folder).get("model_type")


def _show(result: Verification) -> None:
    print_table(table(result.tensors))
    counts = result.counts()
    typer.echo(
        f"{counts['tensors']} tensors, {gigabytes(counts['bytes'])} GB; {counts['compared']} compared with "
        f"{result.against or 'nothing'}, {counts['unchanged']} unchanged; {counts['all_zero']} all zero"
    )
    if result.logits is not None:
        typer.echo(
            f"logits on {' and '.join(result.logits['inputs'])}: largest difference "
            f"{result.logits['max_difference']:.3g} of {result.logits['largest_logit']:.3g}"
        )
    for warning in result.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if not result.faults:
        typer.echo(f"{result.output}: verified")


def print_table(lines: Table) -> None:
    """As wide as the terminal; wide enough for any name where there is none."""
    console = Console(highlight=False, markup=False)
    console.width = console.width if console.is_terminal else 240
    console.print(lines)


def tensor_table(found: Inspection, every: bool) -> Table:
    """One line per kind of tensor, or per tensor."""
    result = Table(box=None, pad_edge=False)
    result.add_column("tensor", overflow="fold")
    for column in ("count", "dtype", "shape"):
        result.add_column(column, justify="right")
    kinds: Counter[tuple[str, str, str]] = Counter()
    for name, info in found.tensors.items():
        shape = "x".join(map(str, info.shape)) or "scalar"
        kinds[name if every else kind_of(name), dtype_name(info.dtype), shape] += 1
    for (name, dtype, shape), count in kinds.items():
        result.add_row(name, str(count), dtype, shape)
    return result
