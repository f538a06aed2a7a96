"""Where checkpoints lie, which of them are whole, and how one appears or goes.

    output_dir/LATEST                     the name of the newest step
    output_dir/step_N/COMPLETE            written last; {"step", "number", "time"}
    output_dir/step_N/state.json          where training stood, and what the weights belong to
    output_dir/step_N/.metadata, *.distcp model and optimizer, a torch distributed checkpoint
    output_dir/step_N/rng/rank_R.json     random generators of each rank
    output_dir/step_N.tmp-X               being written; OWNER says by whom
    output_dir/step_N.old-X               being removed

The newest step is the one with the highest `number`, which counts the saves below an output_dir: after going back to
an earlier step the later ones of the abandoned course have higher steps, yet are older.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from convert.dcp_index import METADATA_FILE
from convert.output import sync_directory, write_atomic
from convert.small_files import read_object
from convert.trainer import COMPLETE_FILE, LATEST_FILE, STATE_FILE
from schemas.errors import ConfigError, IncompleteSourceError, OmniloomError

OWNER_FILE = "OWNER"
RNG_FOLDER = "rng"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
UNOWNED_S = 3600.0  # after so long without an OWNER nobody is going to write one
_STEP = re.compile(r"step_(\d+)")
_LEFT = re.compile(r"step_\d+\.(tmp|old)-[0-9a-f]+")

log = logging.getLogger("omniloom.train")


@dataclass(frozen=True, order=True)
class SavedStep:
    """A complete checkpoint; they sort by age, the newest last."""

    number: int
    step: int
    path: Path


def step_folder(output_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step appears."""
    return output_dir / f"step_{step}"


def rng_file(folder: Path, rank: int) -> Path:
    """Of the random generators of a rank, inside a checkpoint."""
    return folder / RNG_FOLDER / f"rank_{rank}.json"


def saved_steps(output_dir: Path) -> list[SavedStep]:
    """All complete checkpoints, the newest last; half-written ones have other names or lack their COMPLETE."""
    if not output_dir.is_dir():
        return []
    return sorted(step for path in output_dir.iterdir() if (step := _complete(path)) is not None)


def find_step(output_dir: Path, load_path: str | None) -> Path | None:
    """The checkpoint that `checkpoint.load_path` means. auto: the newest complete one below output_dir, None when there
    is none; a folder: that step, or the newest below it. ConfigError and IncompleteSourceError say what is wrong."""
    if load_path is None:
        return None
    if load_path == "auto":
        steps = saved_steps(output_dir)
        return steps[-1].path if steps else None
    path = Path(load_path)
    if not path.is_dir():
        raise ConfigError(f"train.checkpoint.load_path: {path} is no directory")
    if steps := saved_steps(path):
        return steps[-1].path
    if _LEFT.fullmatch(path.name) or ((path / STATE_FILE).exists() and not (path / COMPLETE_FILE).exists()):
        raise IncompleteSourceError(f"{path}: has no {COMPLETE_FILE}: it was not saved to its end; take another step")
    if not (path / STATE_FILE).exists():
        fault = "is no checkpoint of a training run"
        if (path / METADATA_FILE).exists():
            fault = (
                f"is a torch distributed checkpoint without {STATE_FILE}, so training cannot go on from it; "
                "convert it and start from its weights (model.model_path)"
            )
        raise ConfigError(f"train.checkpoint.load_path: {path} {fault}")
    return path


def way_on(damaged: Path) -> str:
    """What to do about a checkpoint that cannot be read, for the end of an error."""
    others = [saved.path for saved in saved_steps(damaged.parent) if saved.path.name != damaged.name]
    if not others:
        return "no other checkpoint lies beside it: copy it again if there is a copy, or begin in another output_dir"
    return f"go on from another, train.checkpoint.load_path={others[-1]}, or move {damaged.name} away"


def begin(output_dir: Path, step: int) -> Path:
    """A new temporary folder for a step, with its owner; rank 0 only."""
    output_dir.mkdir(parents=True, exist_ok=True)
    folder = output_dir / f"step_{step}.tmp-{secrets.token_hex(4)}"
    (folder / RNG_FOLDER).mkdir(parents=True)
    write_atomic(folder / OWNER_FILE, json.dumps(_myself()).encode())
    return folder


def commit(temporary: Path, step: int) -> Path:
    """Makes a whole temporary folder the checkpoint of its step, and the newest one."""
    output_dir = temporary.parent
    final = step_folder(output_dir, step)
    number = 1 + max((saved.number for saved in saved_steps(output_dir)), default=0)
    sync_directory(temporary / RNG_FOLDER)
    record = {"step": step, "number": number, "time": datetime.now(UTC).isoformat(timespec="seconds")}
    write_atomic(temporary / COMPLETE_FILE, json.dumps(record).encode())
    if final.exists():  # of a course that was abandoned, or of another run in the same folder
        _hide(final)  # `tidy` removes it, which may take long
    temporary.rename(final)
    (final / OWNER_FILE).unlink()
    sync_directory(output_dir)
    write_atomic(output_dir / LATEST_FILE, final.name.encode())
    return final


def end_commit(output_dir: Path) -> None:
    """What a kill right after a checkpoint took its name left undone: LATEST names the newest, which is nobody's."""
    steps = saved_steps(output_dir)
    if not steps:
        return
    (steps[-1].path / OWNER_FILE).unlink(missing_ok=True)
    latest, name = output_dir / LATEST_FILE, steps[-1].path.name.encode()
    if not latest.is_file() or latest.read_bytes() != name:
        write_atomic(latest, name)


def tidy(output_dir: Path, keep_last: int, keep: Collection[Path] = ()) -> None:
    """Removes complete checkpoints but the newest `keep_last` (0 = none is removed), and what dead runs left.

    keep: checkpoints that somebody is reading.
    """
    for saved in saved_steps(output_dir)[: -keep_last or None] if keep_last else []:
        if saved.path not in keep:
            _remove(saved.path)
    for path in output_dir.iterdir():
        found = _LEFT.fullmatch(path.name)
        if found and (found[1] == "old" or not _is_alive(path)):
            log.info("removing %s, which an earlier run left behind", path)
            shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """First out of sight, so that a kill in the middle leaves no half of a checkpoint under its name."""
    shutil.rmtree(_hide(path), ignore_errors=True)


def _hide(path: Path) -> Path:
    doomed = path.with_name(f"{path.name}.old-{secrets.token_hex(4)}")
    path.rename(doomed)
    return doomed


def _complete(path: Path) -> SavedStep | None:
    found = _STEP.fullmatch(path.name)
    if found is None or not (path / COMPLETE_FILE).is_file() or not (path / STATE_FILE).is_file():
        return None
    return SavedStep(_number(path / COMPLETE_FILE), int(found[1]), path)


def _number(path: Path) -> int:
    """0 for a marker that somebody else made; its step decides then."""
    try:
        number = read_object(path).get("number")
    except (OmniloomError, OSError):
        return 0
    return number if type(number) is int else 0


def _myself() -> dict[str, Any]:
    """This process, also among those that had or will have its number."""
    return {"host": socket.gethostname(), "boot": _boot(), "pid": os.getpid(), "started": _started(os.getpid())}


def _is_alive(folder: Path) -> bool:
    """True when the process that writes a folder may still be there. One of another machine counts as alive for as long
    as something in its folder is younger than a day."""
    try:
        owner = read_object(folder / OWNER_FILE)
    except (OmniloomError, OSError):
        return _age_s(folder) < UNOWNED_S
    if owner.get("host") != socket.gethostname():
        return _age_s(folder) < 24 * 3600.0
    pid = owner.get("pid")
    if owner.get("boot") != _boot() or type(pid) is not int:
        return False
    return _started(pid) is not None and _started(pid) == owner.get("started")


def _age_s(folder: Path) -> float:
    """Seconds since the last change of the folder or of a file in it."""
    times = [folder.stat().st_mtime, *(path.stat().st_mtime for path in folder.rglob("*") if path.is_file())]
    return time.time() - max(times)


def _boot() -> str:
    return BOOT_ID.read_text().strip() if BOOT_ID.is_file() else ""


def _started(pid: int) -> int | None:
    """When a process began, in clock ticks after boot; 0 where the system does not say; None when there is none."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] == "Z" else int(fields[19])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return 0
    return 0
