"""`omniloom rollouts`: run, show.

Errors are raised as OmniloomError; the root command prints them as one line and exits with their code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from jobs.rollout.config import RolloutsConfig, RolloutsFile
from jobs.rollout.summary import Summary, summarise
from pack.signals import Stoppable
from schemas.rollouts import ROLLOUTS_CARD
from schemas.strict import load_config
from train.data.rollout_files import Rollouts, read_rollouts

if TYPE_CHECKING:
    from jobs.rollout.job import Done

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Sample answers to packed rows, with log-probabilities and rewards.",
)


@app.callback()
def _group() -> None:
    """Sample answers to packed rows, with log-probabilities and rewards."""


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML with the key `rollouts`.")],
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Ask the model every row of a packed dataset; goes on where it was stopped. More arguments override keys."""
    from jobs.rollout.job import check_threshold, run_job  # noqa: PLC0415  # torch and transformers: seconds

    settings = load_config(config, context.args, RolloutsFile).rollouts
    with Stoppable():
        done = run_job(settings)
    if done.card is None:
        there, parts = done.parts
        typer.echo(f"{there} of {parts} parts are there; the worker that makes the last one writes {ROLLOUTS_CARD}")
    else:
        _tell(done, settings, as_json=as_json)
    check_threshold(done, settings)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(metavar="ROLLOUTS", help="A folder of rollouts.")],
    ids: Annotated[list[str] | None, typer.Option("--id", help="Only this row; may be repeated.")] = None,
    limit: Annotated[int, typer.Option(help="Rows to show.")] = 8,
) -> None:
    """Show rows with their answers and rewards, and the summary."""
    rollouts = read_rollouts(folder)
    shown = [rollouts[key] for key in ids] if ids else [row for row, _ in zip(rollouts, range(limit), strict=False)]
    for row in shown:
        typer.echo(f"{row.id} [{row.source}] {row.prompt_tokens} prompt tokens")
        for response in row.responses:
            text = json.dumps(response.text, ensure_ascii=False)
            mean = sum(response.logprobs) / len(response.logprobs)
            typer.echo(
                f"  {response.reward:7.3f}  {len(response.ids):5} tokens  {response.finish:6} {mean:8.3f}  {text}"
            )
    Console().print(_table(rollouts, summarise(rollouts)))


def _tell(done: Done, settings: RolloutsConfig, *, as_json: bool) -> None:
    rollouts = read_rollouts(Path(settings.out))
    found = summarise(rollouts)
    if as_json:
        typer.echo(json.dumps(found.as_json() | {"left_out": done.reasons}))
        return
    if done.nothing_to_do:
        typer.echo("nothing to do: every row has its answers")
    table = _table(rollouts, found)
    for reason, count in done.reasons.items():
        table.add_row("left out", f"{count:,} {reason}")
    table.add_row("rollouts", settings.out)
    Console().print(table)


def _table(rollouts: Rollouts, found: Summary) -> Table:
    about = rollouts.card.about
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("rows", f"{found.rows:,} of {about.dataset}")
    table.add_row("model", f"{about.model} by {about.engine}")
    table.add_row("answers", f"{found.responses:,} with {found.tokens:,} tokens")
    table.add_row("reward", f"{found.mean_reward:.4f} by {about.scorer}")
    table.add_row("no signal", f"{found.equal_groups:.1%} of the rows have equal rewards")
    table.add_row("cut off", f"{found.cut_off:.1%} of the answers")
    table.add_row("log-probability", f"{found.mean_logprob:.4f} per token")
    return table
