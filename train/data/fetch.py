"""Shards of remote datasets, fetched ahead of the plan and pinned from then until their last use.

Work is counted in units: one micro-batch of this rank, in the order in which it is trained. Before a unit is handed to
a worker its shards are `ready`; once its batch has arrived they are `done` with.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from schemas.errors import IncompleteSourceError, VerificationError
from train.data.shard_cache import ShardCache
from train.data.shard_index import Shard

log = logging.getLogger("omniloom.train")


@dataclass(frozen=True)
class Wanted:
    """One shard and the cache that it goes to."""

    cache: ShardCache
    shard: Shard

    @property
    def key(self) -> tuple[str, str]:
        return self.cache.dataset, self.shard.name


class ShardFetcher:
    """Keeps up to `ahead` units ready. needs: for each unit, in order, what it reads (empty for local sources).

    Errors of a download are raised by `ready` of the unit that needs it. mask_lost: a shard that the store does not
    have, or has with other bytes, is remembered in `lost` instead, by its key and with the reason, and is not fetched
    again.
    """

    def __init__(self, needs: Iterable[list[Wanted]], ahead: int, threads: int, mask_lost: bool = False) -> None:
        self.lost: dict[tuple[str, str], str] = {}
        self._mask_lost = mask_lost
        self._needs: Iterator[list[Wanted]] = iter(needs)
        self._ahead = ahead
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fetch")
        self._units: dict[int, list[Wanted]] = {}  # pinned, not done
        self._users: dict[tuple[str, str], int] = {}  # number of such units per shard
        self._running: dict[tuple[str, str], Future[None]] = {}
        self._held: list[Wanted] | None = None  # the next unit, for which there was no room yet
        self._next = self._done = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._warned = False

    def ready(self, unit: int) -> None:
        """Waits until the shards of a unit are there. Units are asked for in order, from 0."""
        with self._lock:
            while self._next <= unit and self._start(forced=True):
                pass
            while self._next < self._done + self._ahead and self._start(forced=False):
                pass
            waiting = {w.key: self._running[w.key] for w in self._units.get(unit, []) if w.key in self._running}
        for key, future in waiting.items():
            try:
                future.result()
            except (IncompleteSourceError, VerificationError) as error:
                if not self._mask_lost:
                    raise
                self.lost[key] = str(error)

    def done(self, unit: int) -> None:
        """The unit's batch has arrived."""
        with self._lock:
            for wanted in self._units.pop(unit, []):
                self._users[wanted.key] -= 1
                if not self._users[wanted.key]:
                    del self._users[wanted.key]
                    self._running.pop(wanted.key, None)
                    wanted.cache.unpin(wanted.shard)
            self._done = max(self._done, unit + 1)
            while self._next < self._done + self._ahead and self._start(forced=False):
                pass

    def close(self) -> None:
        """Ends the downloads that have not begun, waits for one try of the others, and lets go of every shard."""
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            pinned = {w.key: w for wanted in self._units.values() for w in wanted}
            for wanted in pinned.values():
                wanted.cache.unpin(wanted.shard)
            self._units.clear()
            self._users.clear()

    def _start(self, forced: bool) -> bool:
        """Pins the shards of the next unit and begins their downloads; False at the end, or when there is no room for
        them and they are not `forced`."""
        if self._stop.is_set():
            return False
        wanted = self._held if self._held is not None else next(self._needs, None)
        if wanted is None:
            return False
        self._held = wanted
        fresh = [w for w in wanted if w.key not in self._users]
        for w in fresh:
            w.cache.pin(w.shard)
        missing = [w for w in fresh if w.key not in self.lost and not w.cache.has(w.shard)]
        # `forced` goes over the limit instead of waiting, which could be for ever: other ranks may hold their shards
        # until this one takes part in the step
        if not self._reserve(missing, forced):
            for w in fresh:
                w.cache.unpin(w.shard)
            return False
        for w in wanted:
            self._users[w.key] = self._users.get(w.key, 0) + 1
        for w in missing:
            self._running[w.key] = self._pool.submit(w.cache.fetch, w.shard, stop=self._stop)
        self._units[self._next] = wanted
        self._next += 1
        self._held = None
        return True

    def _reserve(self, missing: list[Wanted], forced: bool) -> bool:
        """Room for all of them, or, unless `forced`, for none."""
        by_cache: dict[str, list[Wanted]] = {}
        for wanted in missing:
            by_cache.setdefault(wanted.cache.dataset, []).append(wanted)
        kept: list[list[Wanted]] = []
        for group in by_cache.values():
            fits = group[0].cache.reserve([w.shard for w in group], forced)
            if not fits and not forced:
                for other in kept:
                    other[0].cache.cancel([w.shard for w in other])
                return False
            if not fits and not self._warned:
                self._warned = True
                log.warning(
                    "data.cache.limit_gb: the shards of the steps in flight do not fit; the cache of this node grows "
                    "over its limit"
                )
            kept.append(group)
        return True
