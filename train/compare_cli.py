"""`omniloom train compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from train.progress import say_loading


def compare(
    model_dir: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A Hugging Face model directory.")],
    kinds: Annotated[
        list[str] | None, typer.Option("--input", help="text, image, video or audio; default: all that it takes.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="In which both compute.")] = "float32",
    op: Annotated[
        list[str] | None, typer.Option("--op", metavar="KEY=NAME", help="An implementation, as in ops_implementation.")
    ] = None,
    auto: Annotated[bool, typer.Option("--auto", help="The implementations that training would choose.")] = False,
    tolerance: Annotated[float | None, typer.Option(help="Difference over the greatest value that is allowed.")] = None,
    seed: Annotated[int, typer.Option(help="Of the input.")] = 0,
    every: Annotated[bool, typer.Option("--all", help="A line for every module, not for every block.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object, with every module.")] = False,
) -> None:
    """Run a model natively and in transformers on the same random input, and name the first module that differs."""
    if not as_json:
        say_loading()
    from train.compare_run import run_comparison, show_comparison  # noqa: PLC0415  # seconds to import

    found = run_comparison(
        model_dir, kinds or (), device, dtype, given=op or (), auto=auto, tolerance=tolerance, seed=seed
    )
    typer.echo(show_comparison(found, every=every, as_json=as_json))
    found.check()
