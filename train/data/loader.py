"""The loader: step by step the packed micro-batches of one rank, from the plan, on the device.

    plan -> requests -> worker processes (read, lay out, decode, pack) -> copy and features on the device -> the trainer

Its state is (epoch, step) and the hash of the plan, whatever the world size and the number of workers.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from schemas.errors import ConfigError, OmniloomError
from train.config import BatchConfig, DataConfig, DataloaderConfig
from train.data.batch import Batch, DeadSample
from train.data.device import Destination, DevicePrefetcher
from train.data.fetch import ShardFetcher, Wanted
from train.data.plan_store import PlanStore
from train.data.processor import ProcessorAssets
from train.data.rank_plan import DataRank, Position, RankPlan
from train.data.reader import BatchMaker, BatchRequest, Failure
from train.data.serving import ModelInputs, serve
from train.data.sources import OpenSource
from train.data.worker_context import worker_context

STATE_VERSION = 1
LEAST_AHEAD = 2  # micro-batches of each worker

log = logging.getLogger("omniloom.train")


@dataclass(frozen=True)
class StepBatches:
    """All micro-batches of one optimizer step of this rank. wait_s: how long the trainer waited for them; last: the
    step is the last of its epoch."""

    epoch: int
    step: int
    micro_batches: list[Batch]
    wait_s: float
    last: bool


class TrainLoader:
    """The batches of one rank. Iterating goes on from the current position to the end of the training.

    Behind a step that was trained, `state_dict()` is the state to save.
    """

    def __init__(
        self,
        sources: Sequence[OpenSource],
        plans: PlanStore,
        data: DataConfig,
        batch: BatchConfig,
        assets: ProcessorAssets,
        rank: DataRank | None = None,
        to: Destination | torch.device | None = None,
        model: ModelInputs | None = None,
    ) -> None:
        self.sources, self.plans, self.data, self.batch, self.assets = sources, plans, data, batch, assets
        self.rank = rank or DataRank()
        self.to = to if isinstance(to, Destination) else Destination.on(to or torch.device("cpu"))
        self.mine = RankPlan(plans, self.rank, batch)
        self.position = Position()
        self.wait_s = 0.0
        self.dead: list[DeadSample] = []
        self._serving = serve(sources, self.mine, data, batch, assets, self.rank, model or ModelInputs())

    @property
    def maker(self) -> BatchMaker:
        """What the workers do: the batch of a request of `mine.requests`."""
        return self._serving.maker

    def total_steps(self) -> int:
        """Optimizer steps of the whole training."""
        if self.batch.max_steps is not None:
            return self.batch.max_steps
        return self.plans.total_steps(self.batch.num_train_epochs)

    def steps_done(self) -> int:
        """Optimizer steps before the current position."""
        return self.plans.total_steps(self.position.epoch) + self.position.step

    def state_dict(self) -> dict[str, Any]:
        """The position behind the step that was handed out last, and what the plan is made of. JSON."""
        return {
            "version": STATE_VERSION,
            "epoch": self.position.epoch,
            "step": self.position.step,
            "plan": self.plans.digest,
            "inputs": dict(self.plans.planner.inputs),
            "rollouts": rollouts_of(self.sources),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position. ConfigError, naming what differs, when the plan is another one."""
        check_same_data(state, self.plans, self.sources)
        epoch, step = int(state["epoch"]), int(state["step"])
        if not 0 <= step <= self.plans.steps(epoch):
            raise ConfigError(f"data state: step {step} of the {self.plans.steps(epoch)} steps of epoch {epoch}")
        self.position = Position(epoch, step)

    def __iter__(self) -> Iterator[StepBatches]:
        left = self.total_steps() - self.steps_done()
        if left <= 0:
            return
        fetcher = self._start_fetcher(left)
        prefetcher = self._start_prefetcher(left, fetcher)
        try:
            for plan, step in self.mine.steps(self.position):
                if left == 0:
                    return
                left -= 1
                began = time.monotonic()
                batches = [next(prefetcher) for _ in range(self.mine.micro_steps)]
                waited = time.monotonic() - began
                self._check(batches, plan.epoch, step)
                self.wait_s += waited
                self.position = Position(plan.epoch, step + 1)
                yield StepBatches(plan.epoch, step, batches, waited, step + 1 == plan.steps)
        finally:
            prefetcher.close()
            if fetcher is not None:
                fetcher.close()

    def _check(self, batches: list[Batch], epoch: int, step: int) -> None:
        for micro, batch in enumerate(batches):
            place = batch.place
            if (place.epoch, place.step, place.micro) != (epoch, step, micro):
                raise OmniloomError(f"the loader gave {place} for epoch {epoch}, step {step}, micro-batch {micro}")
            for dead in batch.dead:
                self.dead.append(dead)
                log.warning(
                    "data source %s: row %s is dead (%d so far): %s", dead.source, dead.key, len(self.dead), dead.reason
                )

    def _start_fetcher(self, steps: int) -> ShardFetcher | None:
        if not self._serving.caches:
            return None
        cache = self.data.cache
        needs = map(self._needs, self.mine.requests(self.position, steps))
        ahead = cache.fetch_steps * self.mine.micro_steps
        return ShardFetcher(needs, ahead, cache.fetch_threads, mask_lost=self.data.dead_samples == "mask")

    def _needs(self, request: BatchRequest) -> list[Wanted]:
        return [wanted for _, _, wanted in self._remote_shards(request)]

    def _remote_shards(self, request: BatchRequest) -> list[tuple[int, int, Wanted]]:
        """(source, shard, itself) of those that a request reads."""
        pairs = set(zip(request.source.tolist(), request.shard.tolist(), strict=True))
        return [
            (source, shard, Wanted(self._serving.caches[source], self.sources[source].shards[shard]))
            for source, shard in sorted(pairs)
            if source in self._serving.caches
        ]

    def _without_lost(self, request: BatchRequest, lost: Mapping[tuple[str, str], str]) -> BatchRequest:
        """The request, with word of those of its shards that the store does not have."""
        if not lost:
            return request
        found = [(s, n, lost[wanted.key]) for s, n, wanted in self._remote_shards(request) if wanted.key in lost]
        return replace(request, lost=tuple(found))

    def _start_prefetcher(self, steps: int, fetcher: ShardFetcher | None) -> DevicePrefetcher:
        settings = self.data.dataloader
        pin = self.to.device.type == "cuda" if settings.pin_memory is None else settings.pin_memory
        workers: dict[str, Any] = {}
        if settings.num_workers:
            context = worker_context(settings.start_method)
            if settings.start_method == "forkserver":
                context.set_forkserver_preload([BatchMaker.__module__])  # imported once for all workers
            workers = {
                "prefetch_factor": made_ahead(settings, self.mine.micro_steps),
                "multiprocessing_context": context,
                "timeout": settings.timeout_s,
            }
        loader = DataLoader(
            self.maker,
            batch_size=None,
            sampler=_Requests(self.mine.requests(self.position, steps), fetcher, self._without_lost),
            num_workers=settings.num_workers,
            collate_fn=_as_it_is,
            worker_init_fn=_end_with_trainer,
            generator=torch.Generator(),  # else each start of a loader takes a number from the training's own
            pin_memory=pin,
            **workers,
        )
        return DevicePrefetcher(_batches(loader, fetcher), self.to, self.assets, settings.device_prefetch)


def made_ahead(settings: DataloaderConfig, micro_steps: int) -> int:
    """Micro-batches that each worker makes ahead: by default those of a whole step, which the trainer takes at once."""
    if settings.prefetch_factor is not None:
        return settings.prefetch_factor
    return max(LEAST_AHEAD, -(-micro_steps // max(1, settings.num_workers)))


def rollouts_of(sources: Sequence[OpenSource]) -> dict[str, str]:
    """Fingerprints of the rollouts of the sources that have some."""
    return {source.rows.name: source.rollouts.fingerprint for source in sources if source.rollouts is not None}


def check_same_data(state: Mapping[str, Any], plans: PlanStore, sources: Sequence[OpenSource]) -> None:
    """ConfigError, naming what differs, when the state of a checkpoint is of another plan."""
    if state.get("version") != STATE_VERSION:
        raise ConfigError(f"data state has version {state.get('version')}; this omniloom reads {STATE_VERSION}")
    if state["plan"] == plans.digest:
        return
    now, then = plans.planner.inputs, state.get("inputs", {})
    recorded, before = rollouts_of(sources), state.get("rollouts", {})
    others = {f"source {name}" for name in recorded if before.get(name, recorded[name]) != recorded[name]}
    changed = [f"the rollouts of {name} are others" for name in sorted(others)]
    changed += [
        f"{key}: {then.get(key)} then, {now.get(key)} now"
        for key in sorted({*then, *now} - others)
        if then.get(key) != now.get(key)
    ]
    raise ConfigError(
        "the data are not those of the checkpoint, so training cannot go on where it stopped: "
        f"{'; '.join(changed or ['other plan hash'])}. To train on these, set another train.checkpoint.output_dir; to "
        "start there from the weights of this training, set model.model_path to its export below hf/"
    )


class _Requests(Sampler[BatchRequest]):
    """Hands requests to the workers, each when its shards are there."""

    def __init__(
        self,
        requests: Iterator[BatchRequest],
        fetcher: ShardFetcher | None,
        without: Callable[[BatchRequest, Mapping[tuple[str, str], str]], BatchRequest],
    ) -> None:
        self._requests, self._fetcher, self._without = requests, fetcher, without

    def __iter__(self) -> Iterator[BatchRequest]:
        for unit, request in enumerate(self._requests):
            if self._fetcher is None:
                yield request
                continue
            self._fetcher.ready(unit)
            yield self._without(request, self._fetcher.lost)


def _batches(loader: DataLoader[Batch | Failure], fetcher: ShardFetcher | None) -> Iterator[Batch]:
    """The batches in order; raises what a worker handed back instead. OmniloomError for a worker that is gone."""
    units = enumerate(loader)
    while True:
        try:
            unit, made = next(units)
        except StopIteration:
            return
        except (RuntimeError, ConnectionError, EOFError) as error:
            # a worker that is killed while it hands over a batch ends the connection
            if isinstance(error, RuntimeError) and not str(error).startswith("DataLoader "):
                raise
            said = (str(error) or type(error).__name__).splitlines()[0]
            raise OmniloomError(
                f"{said}; a worker was killed, often for lack of memory, or hangs: lower "
                "data.dataloader.num_workers or prefetch_factor, and go on from the last checkpoint"
            ) from error
        if isinstance(made, Failure):
            raise made.error()
        if fetcher is not None:
            fetcher.done(unit)
        yield made.owned()


def _as_it_is(item: Any) -> Any:
    return item


def _end_with_trainer(worker: int) -> None:
    """Ends this worker as soon as the trainer is gone, also when that was killed. (The watch that torch keeps looks at
    the parent process, which for a worker of a fork server is the server.)"""
    trainer = multiprocessing.parent_process()
    if trainer is None:
        return

    def watch() -> None:
        connection.wait([trainer.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name=f"watch-trainer-{worker}", daemon=True).start()
