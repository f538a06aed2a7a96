"""Every way to divide a step gives the gradients, losses and parameters of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch.distributed as dist

from tests import dist as processes
from tests.train.parallel.steps import (
    FP32,
    ROWS,
    Outcome,
    assert_equal,
    batches_of,
    make_parts,
    meta_model,
    outcome,
    without_labels,
)

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "fsdp2": {},
        "ddp": {"fsdp_config": {**FP32, "fsdp_mode": "ddp"}},
        "whole between micro-batches": {
            "fsdp_config": {**FP32, "reshard_after_backward": False, "reshard_after_forward": False}
        },
        "summed once per step": {"fsdp_config": {**FP32, "sync_every_micro_batch": False, "forward_prefetch": False}},
        "towers by blocks": {"fsdp_config": {**FP32, "tower_units": "blocks"}},
        "ddp, summed once per step": {"fsdp_config": {**FP32, "fsdp_mode": "ddp", "sync_every_micro_batch": False}},
        "offloaded": {"fsdp_config": {**FP32, "offload": True}},
    },
    4: {
        "fsdp2": {},
        "hsdp": {"dp_replicate_size": 2, "dp_shard_size": 2},
        "hsdp, summed once per step": {
            "dp_replicate_size": 2,
            "fsdp_config": {**FP32, "sync_every_micro_batch": False},
        },
        "ddp": {"fsdp_config": {**FP32, "fsdp_mode": "ddp"}},
    },
}


@cache
def one_process() -> Outcome:
    return outcome(make_parts({}, meta_model()), batches_of(0, 1))


def _all_layouts(world_size: int) -> dict[str, Outcome] | None:
    batches = batches_of(dist.get_rank(), world_size)
    found = {
        name: outcome(make_parts(layout, meta_model(), checkpointing=number % 2 == 1), batches)
        for number, (name, layout) in enumerate(LAYOUTS[world_size].items())
    }
    return found if dist.get_rank() == 0 else None


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_ranks_equal_one_process(world_size: int) -> None:
    found = processes.run(world_size, _all_layouts, world_size)[0]
    assert found.keys() == LAYOUTS[world_size].keys()
    for name, got in found.items():
        try:
            assert_equal(got, one_process())
        except AssertionError as error:
            raise AssertionError(f"{world_size} ranks, {name}: {error}") from error


def _unequal(world_size: int) -> list[Outcome]:
    """As many micro-steps as ROWS has, and one more whose batch has no label anywhere."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    batches = batches_of(rank, world_size)
    some = outcome(make_parts({}, meta_model(coef=0.0)), [*batches, without_labels(batches[0])])
    none = outcome(make_parts({}, meta_model(coef=0.0)), [without_labels(batch) for batch in batches])
    return [some, none]


def test_ranks_and_micro_steps_with_unequal_labels() -> None:
    """The mean over all labelled tokens, whoever has them and in how many micro-steps. Without the auxiliary loss,
    which depends on the number of micro-steps."""
    merged = [[[make for part in parts for make in part] for parts in zip(*ROWS, strict=True)]]
    expected = outcome(make_parts({}, meta_model(coef=0.0)), batches_of(0, 1, merged))
    for some, none in (_unequal(1), processes.run(2, _unequal, 2)[0]):
        assert_equal(some, expected, aux=False)
        assert none.losses == [0.0] * len(none.losses) and none.norms == [0.0] * len(none.norms)
        assert all(not gradient.any() for gradient in none.gradients.values())


def _in_bfloat16(world_size: int) -> tuple[Outcome, set[str]]:
    parts = make_parts({"fsdp_config": {}}, meta_model())
    found = outcome(parts, batches_of(dist.get_rank(), world_size))
    return found, {str(parameter.dtype) for parameter in parts.model.parameters()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_mixed_precision_is_near_and_keeps_masters(world_size: int) -> None:
    found, dtypes = processes.run(world_size, _in_bfloat16, world_size)[0]
    assert dtypes == {"torch.float32"}
    assert found.losses == pytest.approx(one_process().losses, rel=2e-2)
    assert found.losses != one_process().losses
    wanted = one_process().gradients
    wrong = sum(float((found.gradients[name] - want).square().sum()) for name, want in wanted.items())
    assert wrong < 0.1**2 * sum(float(want.square().sum()) for want in wanted.values())  # some rows change experts
