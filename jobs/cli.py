"""The `omniloom` command: names the command groups, imports the one that is asked for, turns errors into one line.

Nothing heavy is imported here, so that `omniloom --help` answers at once: a group's module is only imported when one of
its commands runs. Exit codes stand in `schemas.errors.EXIT_CODES`; beside them 130 after Ctrl-C.
"""

from __future__ import annotations

import os
import sys
import tomllib
import traceback
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from schemas.errors import EXIT_CODES, OmniloomError

TRACEBACK_VARIABLE = "OMNILOOM_TRACEBACK"

# name -> (module that has `app`, one line of help); listed in the order of a first day with omniloom
GROUPS: dict[str, tuple[str, str]] = {
    "demo": ("jobs.demo", "Real clips -> packed shards -> verified -> a page to look at; everything in one folder."),
    "doctor": ("jobs.doctor", "Check this machine: packages, codecs, memory, disk, Ray, GPU."),
    "pack": ("pack.cli", "Pack raw clips into verified audio/video shards."),
    "train": ("train.cli", "Train on packed shards."),
    "rollouts": ("jobs.rollout.cli", "Sample answers to packed rows, with log-probabilities and rewards."),
    "convert": ("convert.cli", "Translate checkpoints between formats."),
    "config": ("jobs.config_cli", "Explain configuration keys, print JSON Schemas."),
    "preprocessors": ("jobs.preprocessors_cli", "List the registered preprocessors."),
}


class LazyGroup(TyperGroup):
    """Knows every group of `GROUPS` that this installation has by name and help, and imports one to run it."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (module, text) in GROUPS.items():
            if find_spec(module) is not None:
                self.commands[name] = TyperCommand(name, help=text, short_help=text)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name in GROUPS:
            command = typer.main.get_command(import_module(GROUPS[name][0]).app)
        return name, command, rest


AFTER_CTRL_C = 130
EXITS = EXIT_CODES | {AFTER_CTRL_C: "Ctrl-C"}
# one paragraph, as the lines of several would have an empty one between them
EPILOG = f"Exit codes: {'; '.join(f'{code} {meaning}' for code, meaning in EXITS.items())}."

app = typer.Typer(
    cls=LazyGroup, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG
)


def installed_version() -> str:
    """The version of the installed distribution, or of the source tree that this file lies in."""
    try:
        return version("omniloom")
    except PackageNotFoundError:
        project = Path(__file__).parents[1] / "pyproject.toml"
        return f"{tomllib.loads(project.read_text())['project']['version']} (source tree)"


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"omniloom {installed_version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help=f"Show the stack of an error (also {TRACEBACK_VARIABLE}=1).")
    ] = False,
) -> None:
    """Pack, train and convert for omni-modal models."""


def _without_traceback_option(arguments: list[str]) -> list[str]:
    """Takes `--traceback` out wherever it stands before a `--`; the environment hands it on to child processes."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if "--traceback" in arguments[:end]:
        os.environ[TRACEBACK_VARIABLE] = "1"
    return [a for i, a in enumerate(arguments) if i >= end or a != "--traceback"]


def _report(error: Exception) -> int:
    """Writes what the user needs of an error to stderr; its exit code."""
    if os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
        traceback.print_exception(error)
    if isinstance(error, OmniloomError | OSError):
        for line in str(error).splitlines():  # a configuration may have several faults
            typer.echo(f"error: {line}", err=True)
        return error.exit_code if isinstance(error, OmniloomError) else 1
    name = type(error).__name__
    typer.echo(f"error: {name}: {error} (a fault of omniloom; `--traceback` shows where)", err=True)
    return 1


def _close_stdout() -> int:
    """The reader of our output has gone (`omniloom ... | head`): no more output, no message; as typer does."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    return 1


def main(arguments: list[str] | None = None) -> None:
    """Runs one command and exits with its code."""
    arguments = _without_traceback_option(sys.argv[1:] if arguments is None else arguments)
    code: int | str | None = 0
    try:
        try:
            typer.main.get_command(app).main(args=arguments, prog_name="omniloom")
        except SystemExit as ended:
            code = ended.code
        sys.stdout.flush()
    except BrokenPipeError:
        code = _close_stdout()
    except KeyboardInterrupt:
        code = AFTER_CTRL_C
    except Exception as error:  # noqa: BLE001 - the outermost frame: every error ends here as one line and an exit code
        code = _report(error)
    if code == AFTER_CTRL_C:  # typer, too, has this code for it, without a word
        typer.echo("error: ended by Ctrl-C", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
