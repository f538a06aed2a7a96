"""`omniloom train lengths`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
import yaml

from schemas.errors import ConfigError
from schemas.strict import load_config
from train.config import BatchConfig, OmniConfig
from train.data.lengths import Lengths, load_lengths, load_text_lengths
from train.data.lengths_report import lengths_report, report_lines
from train.data.packed_files import PackedIndex
from train.data.processor import ProcessorAssets, load_assets
from train.data.sources import open_sources
from train.data.text_files import is_text_path, scan_text
from train.data.text_rows import TextRows
from train.model_assets import training_assets
from train.progress import progress

_DATA_HELP = "A packed dataset, JSONL or Parquet of text, or the YAML configuration of a training."
_SEED_HELP = "Of preprocessors that use chance; as train.seed."


def lengths(
    context: typer.Context,
    data: Annotated[str, typer.Argument(metavar="DATASET|TEXT|CONFIG.yaml", help=_DATA_HELP)],
    processor: Annotated[
        str | None, typer.Option(help="Checkpoint directory: tokenizer and preprocessor files.")
    ] = None,
    source_name: Annotated[str | None, typer.Option(help="Preprocessor of a text source.")] = None,
    source_args: Annotated[
        list[str] | None, typer.Option("--source-arg", metavar="KEY=VALUE", help="Passed to the preprocessor.")
    ] = None,
    imports: Annotated[list[str] | None, typer.Option("--import", help="Module that registers preprocessors.")] = None,
    seed: Annotated[int, typer.Option(help=_SEED_HELP)] = BatchConfig().seed,
    max_seq_len: Annotated[int | None, typer.Option(help="Also count the rows over so many tokens.")] = None,
    audio_in_video: Annotated[bool, typer.Option(help="A clip's own sound takes tokens.")] = True,
    wrap_video: Annotated[bool, typer.Option(help="Qwen3-VL: markers around all grids of a video.")] = True,
    system: Annotated[str | None, typer.Option(help="System prompt of conversations that bring none.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; default: one per core.")] = None,
    cache: Annotated[str | None, typer.Option(help="Folder that keeps the lengths; default: DATASET/lengths.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, with every unusable row.")] = False,
) -> None:
    """Count the tokens of every row, and keep the counts for training. With a configuration all of its sources are
    counted with its processor; overrides as of `train run`."""
    if data.endswith((".yaml", ".yml")):
        _configured(data, context.args, as_json)
        return
    if context.args:
        raise ConfigError(f"{context.args[0]!r} is no option of `omniloom train lengths`; see --help")
    if processor is None:
        raise ConfigError("--processor is missing: the checkpoint directory whose tokenizer counts")
    if source_name is None and is_text_path(data):
        raise ConfigError(f"{data} is text; --source-name says which preprocessor reads it")
    assets = load_assets(processor, use_audio_in_video=audio_in_video, wrap_video=wrap_video, system=system)
    if source_name is None:
        found = _packed(data, assets, workers, cache)
    else:
        rows = TextRows(source_name, _arguments(source_args or []), tuple(imports or ()), seed)
        found = _text(data, rows, assets, workers, cache)
    report = lengths_report(found, max_seq_len)
    typer.echo(json.dumps(report) if as_json else "\n".join(report_lines(report, max_seq_len)))


def _configured(path: str, overrides: list[str], as_json: bool) -> None:
    """All sources of a configuration, as training opens them."""
    config = load_config(path, overrides, OmniConfig)
    assets = training_assets(config)
    with progress("counting tokens", None, "rows") as advance:
        sources = open_sources(config.data, assets, config.train.seed, lambda _, count: advance(count))
    limit = config.data.max_seq_len
    reports = {source.rows.name: lengths_report(source.lengths, limit) for source in sources}
    if as_json:
        typer.echo(json.dumps(reports))
        return
    for name, report in reports.items():
        typer.echo("\n".join([f"source    {name}", *report_lines(report, limit)]))


def _arguments(words: list[str]) -> dict[str, Any]:
    """KEY=VALUE, with values as in YAML."""
    found = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not key or not equals:
            raise ConfigError(f"--source-arg {word!r}: write KEY=VALUE")
        found[key] = yaml.safe_load(text)
    return found


def _packed(data: str, assets: ProcessorAssets, workers: int | None, cache: str | None) -> Lengths:
    with progress("counting tokens", PackedIndex.read(data).num_rows, "rows") as advance:
        return load_lengths(data, assets, workers=workers, cache=cache, advance=advance)


def _text(data: str, rows: TextRows, assets: ProcessorAssets, workers: int | None, cache: str | None) -> Lengths:
    with progress("finding rows", None, "bytes") as advance:
        files = scan_text(data, advance)
    with progress("counting tokens", files.num_rows, "rows") as advance:
        return load_text_lengths(files, rows, assets, workers=workers, cache=cache, advance=advance)
