"""`omniloom train run` and `omniloom train validate`."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from schemas.errors import OmniloomError, ResumableError, StoppedError
from schemas.fault_places import placed
from schemas.strict import load_config
from train.config import OmniConfig
from train.launch import OUTCOME_VARIABLE, Launch, launch, leave_outcome, under_torchrun
from train.progress import say_loading, say_starting
from train.signals import OutsideSteps, StoppedOutsideError

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # either is a user's own choice
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML configuration.")]


def run(
    config: ConfigPath,
    context: typer.Context,
    nproc: Annotated[int | None, typer.Option(help="Ranks on this node; default: one, in this process.")] = None,
    nnodes: Annotated[int, typer.Option(help="Nodes; run the same command on each.")] = 1,
    rdzv: Annotated[str | None, typer.Option(help="HOST:PORT where the nodes meet; one of them is HOST.")] = None,
) -> None:
    """Train; goes on from the newest checkpoint. Overrides: train.max_steps=10 or --train.max_steps 10. Under torchrun
    it joins the ranks that are there."""
    settings = load_config(config, context.args, OmniConfig)  # before anything slow, and once for all ranks
    try:
        if under_torchrun() or (nproc in (None, 1) and nnodes == 1):
            run_rank(settings, placed(config, context.args, OmniConfig))
        else:
            how = Launch(nproc or 1, nnodes, rdzv)
            with OutsideSteps():  # until the launcher has the signals
                say_starting(how.nproc)
                launch(how, ["train", "run", str(config), *context.args])
    except StoppedError as stopped:  # no error
        typer.echo(str(stopped), err=True)
        raise typer.Exit(stopped.exit_code) from None


def validate(
    config: ConfigPath,
    context: typer.Context,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks that will train.")] = 1,
    data: Annotated[bool, typer.Option("--data/--no-data", help="Open the data and plan the first epoch.")] = True,
) -> None:
    """Check a configuration before it trains, without a GPU: degrees, model files, operations, memory of each GPU,
    data, steps. Every fault is told."""
    settings = load_config(config, context.args, OmniConfig)  # before anything slow
    say_loading()
    from train.validate import report_lines, validate_config  # noqa: PLC0415  # seconds to import

    found = validate_config(settings, world_size, data=data)
    typer.echo("\n".join(report_lines(found)))
    with placed(config, context.args, OmniConfig):
        found.raise_faults()


def run_rank(settings: OmniConfig, faults: AbstractContextManager[None]) -> None:
    """This process's part of a training. faults: adds to errors what is known of their place."""
    # before torch is imported: blocks of many sizes come and go, and segments that grow leave little unused
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    with outcome_told(rank), faults:
        with OutsideSteps():
            say_loading()
            from train.mesh import end_process_group  # noqa: PLC0415  # seconds to import
            from train.trainer import make_trainer  # noqa: PLC0415

            trainer = make_trainer(settings)
        try:
            trainer.train()
        except StoppedOutsideError:
            raise
        except StoppedError:
            end_process_group()
            raise
        end_process_group()


@contextmanager
def outcome_told(rank: int) -> Iterator[None]:
    """Tells the launcher how it ended. With a launcher a rank that stopped as all did ends with 0, and one that failed
    leaves the message to it; without, the root command reports both. A rank of several that failed, or was stopped
    outside of steps, ends without taking its groups down: NCCL would wait for others, which are in a collective call
    that never ends."""
    launched = OUTCOME_VARIABLE in os.environ
    try:
        yield
    except BaseException as error:
        leave_outcome(rank, error)
        together = isinstance(error, ResumableError) and not isinstance(error, StoppedOutsideError)
        if isinstance(error, Exception) and not together and _of_several():
            atexit.register(_end, error.exit_code if isinstance(error, OmniloomError) else 1)
        if launched and together:
            raise SystemExit(0) from error
        if launched and isinstance(error, OmniloomError):
            raise SystemExit(error.exit_code) from error
        raise
    leave_outcome(rank, None)


def _of_several() -> bool:
    return os.environ.get("WORLD_SIZE", "1") != "1"  # whether it is a number the trainer says


def _end(code: int) -> NoReturn:
    """Of this process: it comes before what was registered earlier, as torch did."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # whoever read it may be gone
            stream.flush()
    os._exit(code)
