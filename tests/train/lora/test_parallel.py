"""Adapters on several ranks: every combination gives what one process gives, and leaves the base alone."""

from __future__ import annotations

import pickle
from functools import cache
from typing import Any

import pytest

from tests import dist as processes
from tests.train.lora import ranks
from tests.train.parallel.steps import FP32, Outcome

COMBINATIONS: dict[int, list[dict[str, Any]]] = {
    2: [{}, {"dp_replicate_size": 2}, {"ep_size": 2}, {"ulysses_size": 2, "ep_size": 2}],
    4: [
        {"ep_size": 2},
        {"ep_size": 4},
        {"dp_replicate_size": 2},
        {"dp_replicate_size": 2, "ep_size": 2},
        {"dp_replicate_size": 2, "ulysses_size": 2, "ep_size": 2},
        {"ulysses_size": 2, "ep_size": 4},
        {"fsdp_config": {**FP32, "fsdp_mode": "ddp"}},
        {"ep_size": 2, "fsdp_config": {**FP32, "offload": True, "sync_every_micro_batch": False}},
        {"ep_size": 2, "fsdp_config": {**FP32, "reshard_after_forward": False, "reshard_after_backward": False}},
    ],
}


@cache
def alone(case: str) -> Outcome:
    return ranks.steps_of(ranks.parts_of({}, case))


@pytest.mark.parametrize("case", ranks.CASES)
def test_adapters_train_on_one_process(case: str) -> None:
    found = alone(case)
    assert found.losses[-1] < found.losses[0]
    assert all(gradient.abs().max() > 0 for name, gradient in found.gradients.items() if "merger" not in name)


@pytest.mark.parametrize("case", ranks.CASES)
def test_two_processes_equal_one(case: str) -> None:
    for seen in processes.run(2, ranks.compare, case, COMBINATIONS[2], pickle.dumps(alone(case))):
        assert all("Shard(dim=0)" in placement or "Shard(0)" in placement for placement in seen[0])


@pytest.mark.slow
@pytest.mark.parametrize("case", ranks.CASES)
def test_four_processes_equal_one(case: str) -> None:
    processes.run(4, ranks.compare, case, COMBINATIONS[4], pickle.dumps(alone(case)))


def test_bfloat16_base_and_float32_adapters_in_one_group() -> None:
    for found in processes.run(2, ranks.mixed_precision, pickle.dumps(alone("independent"))):
        assert found == {"adapters": "{torch.float32}", "base": "{torch.bfloat16}", "gradients": "{torch.float32}"}
