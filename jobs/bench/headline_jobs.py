"""Starts the ranks of a part in processes of their own, tells their claims as they come, and ends what takes too
long."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from jobs.bench.claims import Claim
from jobs.bench.headline_rank import CLAIMS_FILE, STARTED
from jobs.bench.headline_setup import Run
from schemas.errors import OmniloomError

LOOK_S = 0.2
PATIENCE_S = 15.0  # for the other ranks, when one has failed


def run_ranks(run: Run, limit_s: float, tell: Callable[[Claim], None], variables: Mapping[str, str]) -> None:
    """OmniloomError when a rank fails or they take longer than limit_s; what was told until then holds."""
    out = Path(run.out)
    out.mkdir(parents=True, exist_ok=True)
    spec, claims = out / "run.json", out / CLAIMS_FILE
    spec.write_text(run.to_json())
    claims.write_text("")
    began = time.time()
    ranks = [_start(run, rank, spec, {**variables, STARTED: repr(began)}) for rank in range(run.nproc)]
    told, failed_at = 0, None
    try:
        while any(rank.poll() is None for rank in ranks):
            time.sleep(LOOK_S)
            told = _tell_new(claims, told, tell)
            if failed_at is None and any(rank.poll() not in (None, 0) for rank in ranks):
                failed_at = time.time()
            if failed_at is not None and time.time() - failed_at > PATIENCE_S:
                break
            if time.time() - began > limit_s:
                raise OmniloomError(f"{run.part} took longer than {limit_s:g} s and was ended")
    finally:
        for rank in ranks:
            _end(rank)
        _tell_new(claims, told, tell)
    codes = [rank.returncode for rank in ranks]
    if any(codes):
        raise OmniloomError(f"{run.part}: the ranks ended with {codes}; their output above says why")


def _start(run: Run, rank: int, spec: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **variables}
    environment.setdefault("OMP_NUM_THREADS", "1" if run.quick else "4")
    # segments that grow: blocks of many sizes come and go, and what is left over is little
    environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    environment.setdefault("KINETO_LOG_LEVEL", "5")
    if run.quick:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if run.nproc > 1:
        environment |= {"RANK": str(rank), "WORLD_SIZE": str(run.nproc), "LOCAL_RANK": str(rank)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": variables["MASTER_PORT"]}
    command = [sys.executable, "-u", "-m", "jobs.bench.headline_rank", str(spec)]
    return subprocess.Popen(command, env=environment, start_new_session=True)


def free_port() -> str:
    """Of this machine, for the ranks to meet."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def _tell_new(file: Path, told: int, tell: Callable[[Claim], None]) -> int:
    """Whole lines behind the first `told`; how many there are now."""
    lines = file.read_text().split("\n")[:-1]
    for line in lines[told:]:
        tell(Claim(**json.loads(line)))
    return len(lines)


def _end(rank: subprocess.Popen[bytes]) -> None:
    """With the loader processes below it."""
    if rank.poll() is None:
        os.killpg(rank.pid, signal.SIGKILL)
    rank.wait()
