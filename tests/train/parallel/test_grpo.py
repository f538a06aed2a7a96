"""The GRPO objective on any number of ranks and micro-steps: losses, gradients, parameters and statistics of one
process. Groups of unequal size and length, ranks of text alone, a group whose rewards are equal."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import dist as processes
from tests.train.grpo import Group, batch_of
from tests.train.models import media
from tests.train.parallel.steps import Outcome, assert_equal, fill, long_text, make_parts, meta_model, outcome
from train.data.batch import Batch
from train.mesh import Degrees
from train.models.foundation import FoundationModel
from train.objective import GrpoObjective, objective_metrics
from train.step import StepParts, train_step

OBJECTIVE = GrpoObjective(0.2, 0.28, 0.05)
# of a quarter of the ranks each
QUARTERS = [
    [Group(media.text_mix(), (1.0, 0.0, 0.0, 0.5, 0.25), 0)],
    [Group(long_text(), (0.0, 1.0), 1), Group(media.text_mix(), (0.3, 0.3), 2)],
    [Group(media.clip_with_sound_mix(), (-2.0, 3.0, 0.25), 3)],
    [Group(media.image_mix(), (1.0, 0.0), 4), Group(media.audio_mix(), (0.0, 2.0), 5)],
]
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{}, {"ulysses_size": 2}, {"ep_size": 2}, {"fsdp_config": {"fsdp_mode": "ddp"}}],
    4: [{}, {"ulysses_size": 2, "ep_size": 2}, {"ulysses_size": 4}, {"dp_replicate_size": 2, "ep_size": 2}],
}
COUNTED = ("responses", "reward", "reward_square", "no_advantage", "clip_low", "clip_high")


def parts_of(keys: dict[str, Any], *, coef: float, checkpointing: bool = False) -> StepParts:
    if "fsdp_config" in keys:
        keys = keys | {"fsdp_config": keys["fsdp_config"] | {"mixed_precision": {"enable": False}}}
    return replace(make_parts(keys, meta_model(coef), checkpointing=checkpointing), objective=OBJECTIVE)


def batches_of(rank: int, degrees: Degrees) -> list[Batch]:
    """All ranks together have all quarters in one micro-step."""
    share, (dp_rank, sp_rank) = 4 // degrees.dp, divmod(rank, degrees.ulysses)
    mine = [group for quarter in QUARTERS[dp_rank * share :][:share] for group in quarter]
    return [batch_of(mine, sp_rank=sp_rank, sp_size=degrees.ulysses)]


@cache
def one_process(coef: float = 0.05) -> Outcome:
    return outcome(parts_of({}, coef=coef), batches_of(0, Degrees()))


def statistics_of(parts: StepParts, batches: list[Batch]) -> dict[str, float]:
    """Of a step, summed over all ranks."""
    assert isinstance(parts.model, FoundationModel)
    fill(parts.model)
    result = train_step(parts, list(batches))
    sums = torch.stack(list(result.objective_sums.values()))
    if dist.is_initialized():
        dist.all_reduce(sums)
    return dict(zip(result.objective_sums, sums.tolist(), strict=True))


def _all(world_size: int) -> list[tuple[Outcome, dict[str, float]]] | None:
    found = []
    for number, keys in enumerate(LAYOUTS[world_size]):
        parts = parts_of(keys, coef=0.05, checkpointing=number % 2 == 1)
        batches = batches_of(dist.get_rank(), parts.mesh.degrees)
        found.append((outcome(parts, batches), statistics_of(parts, batches)))
    return found if dist.get_rank() == 0 else None


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_equal_one_process(world_size: int) -> None:
    wanted = statistics_of(parts_of({}, coef=0.05), batches_of(0, Degrees()))
    assert wanted["responses"] == 16 and min(wanted[name] for name in COUNTED) > 0
    for keys, (got, sums) in zip(LAYOUTS[world_size], processes.run(world_size, _all, world_size)[0], strict=True):
        try:
            assert_equal(got, one_process())
        except AssertionError as error:
            raise AssertionError(f"{world_size} ranks, {keys}: {error}") from error
        assert sums == pytest.approx(wanted, rel=1e-5), keys
        assert {name: sums[name] for name in ("responses", "no_advantage")} == {"responses": 16, "no_advantage": 2}
        assert objective_metrics(sums, 100.0) == pytest.approx(objective_metrics(wanted, 100.0), rel=1e-4)


def test_micro_steps_equal_one_batch() -> None:
    """The mean over all response tokens of the step, in however many micro-batches. Without the auxiliary loss, which
    depends on their number."""
    apart = [batch_of([group]) for quarter in QUARTERS for group in quarter]
    assert_equal(outcome(parts_of({}, coef=0.0), apart), one_process(0.0), aux=False)
