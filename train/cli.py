"""`omniloom train`: lengths.

Errors are raised as OmniloomError; the root command prints them as one line and exits with their code.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from schemas.errors import ConfigError
from train.data.lengths import Lengths, load_lengths, load_text_lengths
from train.data.lengths_report import lengths_report, report_lines
from train.data.packed_files import PackedIndex
from train.data.processor import ProcessorAssets, load_assets
from train.data.text_files import is_text_path, scan_text
from train.data.text_rows import TextRows
from train.progress import progress

app = typer.Typer(no_args_is_help=True, help="Train on packed shards.")


@app.callback()
def _group() -> None:
    """Train on packed shards."""


@app.command()
def lengths(
    data: Annotated[str, typer.Argument(metavar="DATASET|TEXT", help="A packed dataset, or JSONL or Parquet of text.")],
    processor: Annotated[str, typer.Option(help="Checkpoint directory: its tokenizer and preprocessor files.")],
    source_name: Annotated[str | None, typer.Option(help="Preprocessor of a text source.")] = None,
    imports: Annotated[list[str] | None, typer.Option("--import", help="Module that registers preprocessors.")] = None,
    max_seq_len: Annotated[int | None, typer.Option(help="Also count the rows over so many tokens.")] = None,
    audio_in_video: Annotated[bool, typer.Option(help="A clip's own sound takes tokens.")] = True,
    wrap_video: Annotated[bool, typer.Option(help="Qwen3-VL: markers around all grids of a video.")] = True,
    system: Annotated[str | None, typer.Option(help="System prompt of conversations that bring none.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; default: one per core.")] = None,
    cache: Annotated[str | None, typer.Option(help="Folder that keeps the lengths; default: DATASET/lengths.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, with every unusable row.")] = False,
) -> None:
    """Count the tokens of every row, and keep the counts for training."""
    assets = load_assets(processor, use_audio_in_video=audio_in_video, wrap_video=wrap_video, system=system)
    if source_name is None and is_text_path(data):
        raise ConfigError(f"{data} is text; --source-name says which preprocessor reads it")
    if source_name is None:
        found = _packed(data, assets, workers, cache)
    else:
        found = _text(data, TextRows(source_name, imports=tuple(imports or ())), assets, workers, cache)
    report = lengths_report(found, max_seq_len)
    typer.echo(json.dumps(report) if as_json else "\n".join(report_lines(report, max_seq_len)))


def _packed(data: str, assets: ProcessorAssets, workers: int | None, cache: str | None) -> Lengths:
    with progress("counting tokens", PackedIndex.read(data).num_rows, "rows") as advance:
        return load_lengths(data, assets, workers=workers, cache=cache, advance=advance)


def _text(data: str, rows: TextRows, assets: ProcessorAssets, workers: int | None, cache: str | None) -> Lengths:
    with progress("finding rows", None, "bytes") as advance:
        files = scan_text(data, advance)
    with progress("counting tokens", files.num_rows, "rows") as advance:
        return load_text_lengths(files, rows, assets, workers=workers, cache=cache, advance=advance)
