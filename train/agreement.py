"""What one rank finds out, or fails at, told to all, so that none waits in a collective for one that gave up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from schemas.errors import OmniloomError

Result = TypeVar("Result")


class Agreement:
    """Of the ranks of a group of CPU tensors; None = this process alone. Its methods are collective calls. Not for
    every step: what is exchanged are Python objects."""

    def __init__(self, rank: int, world_size: int, group: dist.ProcessGroup | None) -> None:
        self.rank, self.world_size, self._group = rank, world_size, group

    def on_first(self, action: Callable[[], Result]) -> Result:
        """Runs on rank 0 and gives its result, or its error, to all."""
        found: list[Any] = _tried(action) if self.rank == 0 else [None, None]
        if self._group is not None:
            dist.broadcast_object_list(found, src=dist.get_global_rank(self._group, 0), group=self._group)
        return _result(found)

    def on_all(self, action: Callable[[], Result]) -> Result:
        """Runs on every rank and gives its own result; an error of any rank is raised on all."""
        found = _tried(action)
        if self._group is not None:
            errors: list[Any] = [None] * self.world_size
            dist.all_gather_object(errors, found[1], group=self._group)
            found[1] = found[1] or next((error for error in errors if error is not None), None)
        return _result(found)


def _tried(action: Callable[[], Any]) -> list[Any]:
    """[result, None], or [None, error] when it fails."""
    try:
        return [action(), None]
    except (OmniloomError, OSError) as error:
        return [None, error]
    except Exception as error:  # noqa: BLE001 (raised on every rank, in a form that any process can read)
        return [None, OmniloomError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)]


def _result(found: Sequence[Any]) -> Any:
    value, error = found
    if error is not None:
        raise error
    return value
