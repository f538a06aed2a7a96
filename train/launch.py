"""Starting the ranks of a node with torchrun, stopping them without hurry, and knowing how they ended.

torchrun itself gives workers 30 seconds after a signal, too little for a large checkpoint, and ends with 1 whatever
happened. So signals go past it to the workers, who finish their step and save, and each rank leaves how it ended in a
file of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import psutil

from schemas.errors import ConfigError, OmniloomError, StoppedError
from train.signals import BEFORE, StoppedOutsideError

OUTCOME_VARIABLE = "OMNILOOM_OUTCOMES"  # folder where the ranks of this node leave how they ended
LAUNCHER_VARIABLE = "OMNILOOM_LAUNCHER"  # process number of the launcher
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
INTERRUPTED = 130  # the exit code after Ctrl-C
STOPPED = 5  # of torchrun when a signal ended its ranks before they could say how, or itself before there were any
STOPPED_EARLY = (STOPPED, -signal.SIGTERM)


@dataclass(frozen=True)
class Outcome:
    """How a rank ended. code: of `schemas.errors.EXIT_CODES`, or 130 after Ctrl-C; message: of its error, empty without
    one; asked: it was stopped as it was asked to; outside: of steps, so by itself; time: in seconds since 1970."""

    rank: int
    code: int
    message: str = ""
    asked: bool = False
    time: float = 0.0
    outside: bool = False


@dataclass(frozen=True)
class Launch:
    """nproc: ranks on this node; nnodes: nodes; rdzv: host:port where several nodes meet, one of them its host."""

    nproc: int
    nnodes: int = 1
    rdzv: str | None = None

    def __post_init__(self) -> None:
        if self.nproc < 1 or self.nnodes < 1:
            raise ConfigError(f"--nproc {self.nproc} and --nnodes {self.nnodes} must be at least 1")
        if self.nnodes > 1 and not self.rdzv:
            raise ConfigError(f"--nnodes {self.nnodes} needs --rdzv HOST:PORT, the same on every node")

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The torchrun line that runs `omniloom ARGUMENTS` in every rank."""
        meet = ["--standalone"]
        if self.rdzv:
            meet = [f"--nnodes={self.nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={self.rdzv}"]
        run = [sys.executable, "-m", "train.launch_agent", *meet, f"--nproc-per-node={self.nproc}"]
        return [*run, "--max-restarts=0", "-m", "jobs.cli", *arguments]


def under_torchrun() -> bool:
    """This process is a rank that torchrun started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(how: Launch, arguments: Sequence[str]) -> None:
    """Runs the ranks of this node to their end. Raises what the worst of them raised, as the same kind of error; an
    OmniloomError for one that ended without a word."""
    with tempfile.TemporaryDirectory(prefix="omniloom-") as folder:
        variables = {**os.environ, OUTCOME_VARIABLE: folder}
        variables.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // how.nproc)))
        variables[LAUNCHER_VARIABLE] = str(os.getpid())
        passing, process = _PassOn(), None
        before = {number: signal.signal(number, passing) for number in SIGNALS}
        try:
            process = subprocess.Popen(how.command(arguments), env=variables, start_new_session=True)
            passing.begin(process)
            code = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if process is not None and process.poll() is None:
                kill_tree(process.pid)
        raise_worst(read_outcomes(Path(folder)), code, passing.number)


def leave_outcome(rank: int, error: BaseException | None) -> None:
    """Writes how this rank ended where the launcher looks; nothing without a launcher."""
    folder = os.environ.get(OUTCOME_VARIABLE)
    if folder is None:
        return
    code = 0
    if error is not None:
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
    said = str(error) if isinstance(error, OmniloomError) else f"{type(error).__name__}: {error}" if error else ""
    said = "; ".join([said, *getattr(error, "__notes__", ())])
    path = Path(folder, f"rank_{rank}.json")
    beside = path.with_suffix(".tmp")
    asked, outside = isinstance(error, StoppedError), isinstance(error, StoppedOutsideError)
    beside.write_text(json.dumps(asdict(Outcome(rank, code, said, asked, time.time(), outside))))
    os.replace(beside, path)


def read_outcomes(folder: Path) -> list[Outcome]:
    """Of the ranks of this node that ended by themselves, by rank."""
    found = [Outcome(**json.loads(path.read_text())) for path in folder.glob("rank_*.json")]
    return sorted(found, key=lambda outcome: outcome.rank)


def raise_worst(outcomes: Sequence[Outcome], code: int, asked: int | None = None) -> None:
    """code: of torchrun; asked: the signal that the launcher got. A failure comes before a stop of all ranks, and of
    those that ended by themselves the first in time: others fail because that rank is gone."""
    stopped = [outcome for outcome in outcomes if outcome.code == StoppedError.exit_code]
    alone = [outcome for outcome in outcomes if outcome.outside or outcome.code not in (0, StoppedError.exit_code)]
    if alone:
        first = min(alone, key=lambda outcome: outcome.time)
        if first.code == INTERRUPTED:
            raise KeyboardInterrupt
        raise _error(first)
    if asked is not None and code in STOPPED_EARLY:
        if asked == signal.SIGINT:
            raise KeyboardInterrupt
        raise StoppedError(f"{signal.Signals(asked).name} {BEFORE}")
    if code:
        raise OmniloomError(f"a rank ended without a word (torchrun: {code}); its own output above says why")
    if stopped:
        raise _error(stopped[0])


def _error(outcome: Outcome) -> OmniloomError:
    if outcome.asked:  # all ranks were
        return StoppedError(outcome.message)
    error = OmniloomError(f"{outcome.message} (rank {outcome.rank})")
    error.exit_code = outcome.code
    return error


def kill_tree(pid: int) -> None:
    """Ends a process and all below it, whatever sessions they are in."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [*root.children(recursive=True), root]:  # the root last: it may be this process
            with suppress(psutil.NoSuchProcess):
                process.kill()


class _PassOn:
    """Hands a signal to torchrun's workers, one that comes before torchrun to it when it begins; a second SIGINT ends
    everything."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._interrupted = False
        self.number: int | None = None

    def begin(self, process: subprocess.Popen[bytes]) -> None:
        """process: torchrun."""
        self._process = process
        if self.number is not None:
            process.terminate()

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self._process is None:
            self.number = number
            return
        if number == signal.SIGINT and self._interrupted:
            kill_tree(self._process.pid)
            return
        self._interrupted = self._interrupted or number == signal.SIGINT
        self.number = number
        with suppress(psutil.NoSuchProcess):
            workers = psutil.Process(self._process.pid).children()
            if not workers:  # nor will there be: torchrun still starts
                self._process.terminate()
            for worker in workers:
                with suppress(psutil.NoSuchProcess):
                    worker.send_signal(number)
