"""`omniloom train lengths`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
import yaml

from schemas.errors import ConfigError
from schemas.strict import load_config
from train.config import BatchConfig, OmniConfig
from train.progress import say_loading

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
        load_config(data, context.args, OmniConfig)  # its faults are told before anything slow
        _say_loading(as_json)
        from train.lengths_run import count_configured  # noqa: PLC0415  # seconds to import

        typer.echo(count_configured(data, context.args, as_json=as_json))
        return
    if context.args:
        raise ConfigError(f"{context.args[0]!r} is no option of `omniloom train lengths`; see --help")
    if processor is None:
        raise ConfigError("--processor is missing: the checkpoint directory whose tokenizer counts")
    rows = None
    if source_name is not None:
        given = _arguments(source_args or [])
        rows = {"source_name": source_name, "arguments": given, "imports": tuple(imports or ()), "seed": seed}
    else:
        _refuse_text(data)
    _say_loading(as_json)
    from train.lengths_run import count_dataset  # noqa: PLC0415  # seconds to import

    said = count_dataset(
        data, processor, rows, workers=workers, cache=cache, max_seq_len=max_seq_len, as_json=as_json,
        use_audio_in_video=audio_in_video, wrap_video=wrap_video, system=system,
    )  # fmt: skip
    typer.echo(said)


def _say_loading(as_json: bool) -> None:
    if not as_json:  # which programs read, some of them both streams
        say_loading()


def _refuse_text(data: str) -> None:
    """ConfigError: text, which needs a preprocessor."""
    from train.data.text_files import is_text_path  # noqa: PLC0415  # `--help` needs no pyarrow

    if is_text_path(data):
        raise ConfigError(f"{data} is text; --source-name says which preprocessor reads it")


def _arguments(words: list[str]) -> dict[str, Any]:
    """KEY=VALUE, with values as in YAML."""
    found = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not key or not equals:
            raise ConfigError(f"--source-arg {word!r}: write KEY=VALUE")
        found[key] = yaml.safe_load(text)
    return found
