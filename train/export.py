"""Complete checkpoints -> Hugging Face layout, by convert in a process of its own, while training goes on.

`python -m train.export CHECKPOINT OUTPUT [--base HF_DIR]` is that process; it ends with convert's exit code.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from rich.console import Console

from convert.assemble import open_base
from convert.job import Options, planned, run
from convert.output import OTHER_INPUTS
from convert.progress import Meter, shown, stoppable
from convert.system_errors import stated
from convert.tables.hub import FAMILIES
from convert.trainer import dcp_to_hf_conversion
from convert.verify import verify_conversion
from schemas.errors import ConfigError, OmniloomError
from train.config import CheckpointConfig

HF_FOLDER = "hf"
WORKERS = 2  # threads that read and write, beside a training that wants the rest
NICENESS = 10
POLL_S = 0.5
LINE_EVERY_S = 10.0
STOP_S = 30.0  # for an export to end by itself before it is killed
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")

log = logging.getLogger("omniloom.train")


@dataclass
class _Export:
    source: Path
    output: Path
    log_file: Path
    process: subprocess.Popen[bytes]


class Exporter:
    """Of rank 0. Exports run one after the other, the newest first that waits; each goes to output_dir/hf/step_N, its
    messages beside it. One that is there already is left alone; what else has its name is moved aside, as it may be the
    only copy of its weights. What fails is told by `wait`, at the end of the training.

    base: a model directory whose other tensors are taken along (a whole Omni around a thinker), None = the config.json
    beside the checkpoint. hold, release: keep a checkpoint from being removed meanwhile.
    """

    def __init__(
        self,
        output_dir: Path,
        base: Path | None,
        *,
        hold: Callable[[Path], None] = lambda path: None,
        release: Callable[[Path], None] = lambda path: None,
    ) -> None:
        self.folder, self.base, self.hold, self.release = output_dir / HF_FOLDER, base, hold, release
        self.faults: list[OmniloomError] = []
        self.done: list[Path] = []
        self._waiting: list[Path] = []
        self._running: _Export | None = None

    def start(self, checkpoint: Path) -> None:
        """Exports a complete checkpoint as soon as no other export runs, unless an earlier run has done so."""
        if checkpoint in self._waiting or (self.folder / checkpoint.name) in self.done:
            return
        if self._running is not None and self._running.source == checkpoint:
            return
        self.hold(checkpoint)
        if self._is_there(checkpoint):
            self.release(checkpoint)
            return
        self._waiting.append(checkpoint)
        self.poll()

    def poll(self) -> str | None:
        """Sees whether an export ended, starts the next. `exporting step_100`, None when nothing runs."""
        running = self._running
        if running is not None and running.process.poll() is not None:
            self._ended(running)
        if self._running is None and self._waiting:
            self._launch(self._waiting.pop())
        return None if self._running is None else f"exporting {self._running.source.name}"

    def wait(self) -> None:
        """Until all is exported, saying how far it is. Raises what failed, here or before."""
        console = Console(file=sys.stderr, highlight=False)
        next_line = time.monotonic() + LINE_EVERY_S
        while self.poll() is not None:
            time.sleep(POLL_S)
            if self._running is not None and time.monotonic() >= next_line:
                next_line = time.monotonic() + LINE_EVERY_S
                said = _last_line(self._running.log_file)
                console.print(f"exporting {self._running.source.name}: {said or 'starting'}", soft_wrap=True)
        if self.faults:
            faults, self.faults = self.faults, []
            raise faults[0]

    def stop(self) -> None:
        """Ends what runs; its journal lets the same command go on. What was waiting is told, too."""
        waiting, self._waiting = self._waiting, []
        for checkpoint in waiting:
            log.warning(
                "%s: is not exported yet; the same training does it when it goes on, or: %s",
                *(checkpoint, self.command_line(checkpoint)),
            )
        running, self._running = self._running, None
        if running is None:
            return
        running.process.send_signal(signal.SIGTERM)
        try:
            running.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            running.process.kill()
            running.process.wait()
        log.warning("%s: the export was stopped; go on by: %s", running.output, self.command_line(running.source))

    def command_line(self, checkpoint: Path) -> str:
        """What a user types to export by hand."""
        base = f" --base {self.base}" if self.base is not None else ""
        return f"omniloom convert dcp-to-hf {checkpoint} {self.folder / checkpoint.name}{base}"

    def _is_there(self, checkpoint: Path) -> bool:
        """Whether this very export is there and whole, as its record says: of this checkpoint as it is, with this base;
        or one that is not to be made again. Takes its name from anything else."""
        output = self.folder / checkpoint.name
        if not output.is_dir() or not any(output.iterdir()):
            return False
        try:
            with stated():
                conversion = dcp_to_hf_conversion(checkpoint, self.base)
                _, out = planned(conversion, output, Options(WORKERS))
                reason = out.difference()
                if reason is None:
                    self.done.append(output)
                    log.info("%s: is exported already", output)
                    return True
                if reason == OTHER_INPUTS and out.source_fingerprint() == conversion.reader.fingerprint:
                    # perhaps of the same base with other times, as one has that is downloaded at each start
                    log.warning("%s: was made with another base; rename it, and it is made anew", output)
                    return True
                if output.is_symlink():  # where it leads is another's
                    return False
                aside = free_name(output)
                output.rename(aside)
                log.warning("%s: %s; it is called %s now, and the export is made anew", output, reason, aside.name)
        except OmniloomError as error:  # of which the export will end, too
            log.warning("%s: cannot be compared with its checkpoint: %s", output, error)
        return False

    def _launch(self, checkpoint: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        output, log_file = self.folder / checkpoint.name, self.folder / f"{checkpoint.name}.log"
        command = [sys.executable, "-m", "train.export", str(checkpoint.absolute()), str(output.absolute())]
        command += ["--base", str(self.base.absolute())] if self.base is not None else []
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(WORKERS)}
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with log_file.open("wb") as said:
            # its own session: Ctrl-C in the terminal is for the trainer, which tells it
            process = subprocess.Popen(
                command, stdout=said, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        self._running = _Export(checkpoint, output, log_file, process)

    def _ended(self, export: _Export) -> None:
        self._running = None
        self.release(export.source)
        code = export.process.returncode
        if code == 0:
            self.done.append(export.output)
            log.info("%s: exported", export.output)
            return
        said = _last_line(export.log_file).removeprefix("error: ") or f"ended with {code}, see {export.log_file}"
        fault = _kind(code)(f"{export.output}: the export failed: {said}; again by: {self.command_line(export.source)}")
        log.warning("%s", fault)
        self.faults.append(fault)


def check_exportable(family: str) -> None:
    """ConfigError for a family that convert cannot write, before the first step is taken."""
    if family not in FAMILIES:
        raise ConfigError(
            f"train.checkpoint.save_hf_weights: a {family} cannot be exported (known: {', '.join(FAMILIES)}); "
            "set it to false and hf_save_steps to 0"
        )


def check_export(config: CheckpointConfig, family: str | None, *, adapters: bool) -> None:
    """What can be told of the exports of a training before it begins. family: of the model, None where that is not
    known; adapters: a LoRA training, which exports these alone. ConfigError, IncompleteSourceError: the family, or
    `checkpoint.hf_base`, does not do."""
    if adapters or not (config.save_hf_weights or config.hf_save_steps):
        return
    if family is not None:
        check_exportable(family)
    if config.hf_base is None:
        return
    key = "train.checkpoint.hf_base"
    try:
        base = open_base(Path(config.hf_base))
    except OmniloomError as error:
        stated = OmniloomError(f"{key}: {error}")
        stated.exit_code = error.exit_code
        raise stated from error
    theirs = base.model.family.model_type
    if family is not None and theirs.removesuffix("_thinker") != family.removesuffix("_thinker"):
        raise ConfigError(f"{key}: {config.hf_base} is a {theirs}, the model a {family}")


def export(checkpoint: Path, output: Path, base: Path | None) -> None:
    """Converts in this process, with progress on stderr. Goes on with what was left unfinished of this very export; of
    another checkpoint or base it is thrown away."""
    meter = Meter()
    with stated(), stoppable(), shown(meter):
        conversion = dcp_to_hf_conversion(checkpoint, base)
        verify = partial(verify_conversion, workers=WORKERS)
        _, out = planned(conversion, output, Options(WORKERS))
        options = Options(WORKERS, resume=not out.other_begun())
        run(conversion, output, options, meter.add, verify, meter.begin)


def main() -> int:
    """The exit code of an export."""
    parser = argparse.ArgumentParser(prog="python -m train.export")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--base", type=Path)
    arguments = parser.parse_args()
    os.nice(NICENESS)
    try:
        export(arguments.checkpoint, arguments.output, arguments.base)
    except OmniloomError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return error.exit_code
    return 0


def _kind(code: int) -> type[OmniloomError]:
    """The error of an exit code."""
    kinds = {kind.exit_code: kind for kind in reversed(OmniloomError.__subclasses__())}
    return kinds[code] if code in kinds and code != OmniloomError.exit_code else OmniloomError


def free_name(path: Path) -> Path:
    """step_100 -> step_100.before-1, or a higher number."""
    return next(name for n in count(1) if not os.path.lexists(name := path.with_name(f"{path.name}.before-{n}")))


def _last_line(file: Path) -> str:
    lines = file.read_text(errors="replace").strip().splitlines() if file.is_file() else []
    return lines[-1] if lines else ""


if __name__ == "__main__":
    raise SystemExit(main())
