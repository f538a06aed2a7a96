"""What blocks keep for the backward pass, and where, changes no number on several ranks either."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch.distributed as dist

from tests import dist as processes
from tests.train.parallel.steps import Outcome, assert_equal, make_parts, meta_model, outcome
from tests.train.parallel.test_equal_to_serial import batches_of, degrees_of
from train.mesh import Degrees
from train.models.checkpointing import CheckpointPolicy, keep_attention, keep_projections
from train.parallel.offload import ActivationOffload

KIND = "mixed"
LAYOUTS: dict[str, dict[str, int]] = {
    "shards": {},
    "sequence": {"ulysses_size": 2},
    "experts": {"ep_size": 2},
    "sequence and experts": {"ulysses_size": 2, "ep_size": 2},
}


def policies() -> dict[str, CheckpointPolicy]:
    return {
        "attention": CheckpointPolicy(keep_attention),
        "projections": CheckpointPolicy(keep_projections),
        "half, elsewhere": CheckpointPolicy(share=0.5, carry=ActivationOffload()),
        "projections, elsewhere": CheckpointPolicy(keep_projections, carry=ActivationOffload(20_000)),
    }


@cache
def one_process() -> Outcome:
    return outcome(make_parts({}, meta_model()), batches_of(KIND, 0, Degrees()), 1)


def _all() -> dict[tuple[str, str], Outcome] | None:
    found = {}
    for layout, keys in LAYOUTS.items():
        degrees = degrees_of(dist.get_world_size(), keys)
        for name, policy in policies().items():
            accelerator: dict[str, Any] = dict(keys)
            parts = make_parts(accelerator, meta_model(), checkpointing=policy)
            found[layout, name] = outcome(parts, batches_of(KIND, dist.get_rank(), degrees), 1)
    return found if dist.get_rank() == 0 else None


@pytest.mark.slow
def test_ranks_equal_one_process_without_recomputing() -> None:
    found = processes.run(2, _all)[0]
    assert len(found) == len(LAYOUTS) * len(policies())
    for name, got in found.items():
        try:
            assert_equal(got, one_process())
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
