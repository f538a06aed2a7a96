"""`omniloom train`: lengths, compare, logprobs, compare-logprobs, run, validate.

Errors are raised as OmniloomError; the root command prints them as one line and exits with their code.
"""

from __future__ import annotations

import typer

from train.compare_cli import compare
from train.lengths_cli import lengths
from train.logprobs_cli import compare_logprobs, logprobs
from train.run_cli import OVERRIDES, run, validate

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Train on packed shards.")


@app.callback()
def _group() -> None:
    """Train on packed shards."""


app.command()(compare)


app.command(context_settings=OVERRIDES)(lengths)
app.command(context_settings=OVERRIDES)(logprobs)
app.command()(compare_logprobs)


app.command(context_settings=OVERRIDES)(run)
app.command(context_settings=OVERRIDES)(validate)
