"""`omniloom train logprobs` and `omniloom train compare-logprobs`."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from schemas.errors import ConfigError
from schemas.strict import load_config
from schemas.wording import known_names
from train.config import OmniConfig
from train.launch import Launch, launch, under_torchrun
from train.progress import say_loading, say_starting
from train.run_cli import ConfigPath, outcome_told

TOKENS = ("labelled", "text", "all")
BACKENDS = ("native", "transformers")


def logprobs(
    config: ConfigPath,
    context: typer.Context,
    out: Annotated[Path | None, typer.Option(help="New folder; default: train.checkpoint.output_dir/logprobs.")] = None,
    tokens: Annotated[str, typer.Option(help="labelled, text (all but what media fill) or all.")] = "labelled",
    max_samples: Annotated[int | None, typer.Option(help="So many rows, chosen by train.seed; default: all.")] = None,
    features: Annotated[bool, typer.Option("--features", help="Also what the towers make of each medium.")] = False,
    backend: Annotated[str, typer.Option(help="native, or transformers for a reference, row by row.")] = "native",
    nproc: Annotated[int | None, typer.Option(help="Ranks on this node; default: one, in this process.")] = None,
    nnodes: Annotated[int, typer.Option(help="Nodes; run the same command on each.")] = 1,
    rdzv: Annotated[str | None, typer.Option(help="HOST:PORT where the nodes meet; one of them is HOST.")] = None,
) -> None:
    """Write the log-probability of every token that the model of a training gives, in its parallel layout, without
    training. Overrides as of `train run`."""
    settings = load_config(config, context.args, OmniConfig)
    for option, name, names in (("tokens", tokens, TOKENS), ("backend", backend, BACKENDS)):
        if name not in names:
            raise ConfigError(f"--{option} {name}{known_names(name, names)}")
    if max_samples is not None and max_samples < 1:  # as `DumpOptions`, whose module takes seconds to import
        raise ConfigError(f"--max-samples {max_samples}: must be at least 1")
    folder = out or Path(settings.train.checkpoint.output_dir, "logprobs")
    if not (under_torchrun() or (nproc in (None, 1) and nnodes == 1)):
        words = ["train", "logprobs", str(config), "--out", str(folder), "--tokens", tokens, "--backend", backend]
        words += [] if max_samples is None else ["--max-samples", str(max_samples)]
        words += ["--features"] if features else []
        how = Launch(nproc or 1, nnodes, rdzv)
        say_starting(how.nproc)
        launch(how, [*words, *context.args])
        return
    say_loading()
    from train.logprobs import DumpOptions, LogprobRun  # noqa: PLC0415  # seconds to import
    from train.logprobs_hub import HubLogprobRun  # noqa: PLC0415

    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    with outcome_told(rank):
        options = DumpOptions(folder, tokens, max_samples, features)  # type: ignore[arg-type]  # checked above
        card = (HubLogprobRun if backend == "transformers" else LogprobRun)(settings, options).run()
        if rank == 0:
            typer.echo(f"{folder}: {card.token_count} tokens of {card.samples} samples in {len(card.files)} files")


def compare_logprobs(
    first: Annotated[Path, typer.Argument(metavar="A", help="A dump: folder, Parquet, JSONL or .pt.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The dump that A is held against.")],
    mean_tolerance: Annotated[float | None, typer.Option(help="Greatest mean |d| of any group of tokens.")] = None,
    max_tolerance: Annotated[float | None, typer.Option(help="Greatest |d| of any token.")] = None,
    feature_tolerance: Annotated[
        float | None, typer.Option(help="Greatest difference of the towers' rows over their greatest value.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a histogram of |d| as SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Compare two dumps of log-probabilities token by token; d = A - B. Over a tolerance, or where tokens have other
    ids, the exit code is 4."""
    for path in (first, second):
        if not path.exists():
            raise ConfigError(f"{path}: there is no such file or folder")
    if not as_json:
        say_loading("torch")
    from train.logprob_compare import compare_tables  # noqa: PLC0415  # seconds to import
    from train.logprob_features import compare_features  # noqa: PLC0415
    from train.logprob_read import read_dump  # noqa: PLC0415
    from train.logprob_report import agreement_lines, write_histogram  # noqa: PLC0415

    one, other = read_dump(first), read_dump(second)
    both = bool(one.features and other.features)
    if feature_tolerance is not None and not both:
        raise ConfigError(
            "--feature-tolerance: not both dumps have features; make them with `omniloom train logprobs --features`"
        )
    found = compare_tables(one, other, compare_features(one.features, other.features) if both else ())
    typer.echo(json.dumps(found.as_json()) if as_json else "\n".join(agreement_lines(found, one, other)))
    if plot is not None:
        write_histogram(plot, found)
    found.check(mean_tolerance, max_tolerance, feature_tolerance)
