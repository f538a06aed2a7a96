"""Runs a function on N processes that share a gloo group, and gives back what each returned.

    results = run(4, check_something, tmp_path, argument)

The processes are forked from a server that has imported torch and the trainer once. The function must be importable by
name; arguments and results are pickled. The first failure's traceback is raised here, and the others are ended.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT_S = 240.0
STACKS_S = 5.0  # so long before the time is up every rank writes down where it stands
IMPORTED = ("torch.distributed.fsdp", "torch.distributed.tensor", "train.trainer", "tests.train.parallel.steps")


def run(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = TIMEOUT_S,
    backend: str = "gloo",
) -> list[Any]:
    """function(*arguments) in every process of a group; its results by rank. With NCCL each process has a GPU."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))  # ignored where the server runs already; children then import
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            here, there = context.Pipe(duplex=False)
            given = (there, rank, world_size, os.path.join(folder, "store"), function, arguments, timeout_s, backend)
            process = context.Process(target=_one, args=given, daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            return _collect(pipes, time.monotonic() + timeout_s, folder)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], deadline: float, folder: str) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {id(pipe): rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait([pipes[rank] for rank in waiting.values()], max(0.0, deadline - time.monotonic()))
        if not ready:
            late = sorted(waiting.values())
            stacks = "".join(f"\nrank {rank}:\n{_read(os.path.join(folder, f'store.stacks{rank}'))}" for rank in late)
            raise TimeoutError(f"ranks {late} have not ended. Where they were:{stacks}")
        for rank in [waiting[id(pipe)] for pipe in ready]:
            try:
                error, results[rank] = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                raise RuntimeError(f"rank {rank} ended without a result") from None
            if error is not None:
                raise AssertionError(f"rank {rank}:\n{error}")
    return [results[rank] for rank in range(len(pipes))]


def _read(path: str) -> str:
    return Path(path).read_text() if os.path.exists(path) else "nothing was written: the rank had not begun"


def _one(
    pipe: Connection,
    rank: int,
    world_size: int,
    store: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    timeout_s: float,
    backend: str,
) -> None:
    import torch  # noqa: PLC0415  # in the child only
    import torch.distributed as dist  # noqa: PLC0415

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    stacks = open(f"{store}.stacks{rank}", "w")  # noqa: SIM115  # open until the process ends
    faulthandler.dump_traceback_later(max(timeout_s - STACKS_S, 0.1), file=stacks)
    try:
        if "nccl" in backend:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        result = function(*arguments)
        dist.barrier()
        # by value: torch would share the memory of tensors with a process that is about to end
        pipe.send_bytes(pickle.dumps((None, result)))
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001  # whatever it is, the parent raises it
        pipe.send_bytes(pickle.dumps((traceback.format_exc(), None)))
