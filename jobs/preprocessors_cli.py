"""`omniloom preprocessors`: which names `pack.source_name` can take."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from schemas.registry import PREPROCESSOR_REGISTRY, load_preprocessors

app = typer.Typer(no_args_is_help=True, add_completion=False, help="List the registered preprocessors.")


@app.callback()
def _group() -> None:
    """List the registered preprocessors."""


@app.command("list")
def list_command(
    imports: Annotated[
        list[str] | None, typer.Option("--import", help="A module that registers more, as in pack.imports; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the names of `pack.source_name`, what each does, and the `pack.preprocessor_args` it takes."""
    load_preprocessors(imports or ())
    entries = [PREPROCESSOR_REGISTRY.entry(name) for name in PREPROCESSOR_REGISTRY.names()]
    if as_json:
        listed = [
            {"name": e.name, "function": e.where, "summary": e.summary, "arguments": e.arguments} for e in entries
        ]
        typer.echo(json.dumps(listed, indent=2, ensure_ascii=False))
        return
    for entry in entries:
        takes = "any" if entry.arguments is None else ", ".join(entry.arguments) or "none"
        typer.echo(f"{entry.name}\n    {entry.summary}\n    {entry.where}; arguments: {takes}")
