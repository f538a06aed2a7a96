"""`omniloom config`: what a configuration file may hold."""

from __future__ import annotations

from typing import Annotated

import typer

from jobs.schemas_json import REFERENCE, explain, keys_text, reference_text, schema_path, schema_text

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Explain configuration keys, print JSON Schemas.")


@app.command("schema")
def schema_command(
    name: Annotated[str, typer.Argument(help="Which file: pack, train or rollouts.")] = "pack",
    write: Annotated[bool, typer.Option("--write", help="Write it into the source tree instead.")] = False,
) -> None:
    """Print the JSON Schema of a YAML file, for editors and validators."""
    text = schema_text(name)
    if write:
        schema_path(name).write_text(text, encoding="utf-8")
        typer.echo(f"wrote {schema_path(name)}")
    else:
        typer.echo(text, nl=False)


@app.command("explain")
def explain_command(
    key: Annotated[
        str | None, typer.Argument(help="A key like pack.video.fps, or a section; all keys if left out.")
    ] = None,
) -> None:
    """Show type, default and meaning of a key or of a whole section."""
    typer.echo(keys_text() if key is None else explain(key))


@app.command("reference")
def reference_command(
    write: Annotated[bool, typer.Option("--write", help="Write docs/configuration.md instead.")] = False,
) -> None:
    """Print the configuration reference as Markdown."""
    if write:
        REFERENCE.write_text(reference_text(), encoding="utf-8")
        typer.echo(f"wrote {REFERENCE}")
    else:
        typer.echo(reference_text(), nl=False)
