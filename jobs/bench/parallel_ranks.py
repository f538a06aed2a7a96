"""Processes that share a group and run one function after another, so that a benchmark starts them once."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from schemas.errors import OmniloomError

PATIENCE_S = 240.0  # for one function


class Ranks:
    """world processes, each with a GPU of its own where there are GPUs. group: whether they share a process group; one
    without can make a group of its own."""

    def __init__(self, world: int, device_type: str, *, group: bool = True) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="omniloom-ranks-")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            here, there = context.Pipe()
            store = os.path.join(self._folder.name, "store")
            given = (there, rank, world, store, device_type, group)
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """function(*arguments) on each; results by rank. OmniloomError, with the traceback of the first that failed,
        or when one has not ended; then the processes are of no more use."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, arguments)))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + PATIENCE_S
        while len(results) < len(self._pipes):
            waiting = {id(pipe): rank for rank, pipe in enumerate(self._pipes) if rank not in results}
            ready = wait([self._pipes[rank] for rank in waiting.values()], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise OmniloomError(f"ranks {sorted(waiting.values())} of {function.__name__} have not ended")
            for rank in [waiting[id(pipe)] for pipe in ready]:
                try:
                    error, results[rank] = pickle.loads(self._pipes[rank].recv_bytes())
                except EOFError:
                    raise OmniloomError(f"rank {rank} of {function.__name__} ended without a result") from None
                if error is not None:
                    raise OmniloomError(f"rank {rank} of {function.__name__}:\n{error}")
        return [results[rank] for rank in range(len(self._pipes))]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if error is None and process.is_alive():
                pipe.send_bytes(pickle.dumps(None))
            pipe.close()
        for process in self._processes:
            process.join(20.0 if error is None else 0.0)
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(pipe: Connection, rank: int, world: int, store: str, device_type: str, group: bool) -> None:
    """In the child: functions until there are no more."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    if group:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=PATIENCE_S),
        )
    while True:
        try:
            task = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        if task is None:
            break
        function, arguments = task
        try:
            answer: tuple[str | None, Any] = (None, function(*arguments))
        except BaseException:  # noqa: BLE001  # whatever it is, the parent raises it
            answer = (traceback.format_exc(), None)
        gc.collect()
        if device_type == "cuda":
            torch.cuda.empty_cache()
        pipe.send_bytes(pickle.dumps(answer))
    if group:
        dist.destroy_process_group()
