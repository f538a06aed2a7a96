"""Checkpoints of two ranks, to two, to one, from one; what one rank meets, all hear. One process group for all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.train.checkpoint_worker import Ranks
from tests.train.tiny_training import Training, checkpointer, equal


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_two_ranks_go_on_exactly(ranks: Ranks, mode: str) -> None:
    for result in ranks.results:
        assert result["resumed"][mode] == {"losses": True, "rates": True, "whole": True, "committed": ["step_3"]}


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_one_process_goes_on_from_two(ranks: Ranks, mode: str) -> None:
    keeper = checkpointer(ranks.folder / mode)
    course = Training.start(1, seed=3)
    course.load(keeper, keeper.find() or Path())
    torch.manual_seed(1)  # random states of two ranks are not those of one
    assert course.optimizer.state_dict()["state"]
    reference = Training.start(1)
    reference.steps(3)
    expected, found = reference.whole(), course.whole()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-5, msg=name)
    assert course.rates() == reference.rates()


def test_what_two_ranks_saved_is_what_they_had(ranks: Ranks) -> None:
    """The three steps after the save, from the checkpoint in one process, on the noise of the ranks."""
    keeper = checkpointer(ranks.folder / "sync")
    course = Training.start(1, seed=3)
    course.load(keeper, keeper.find() or Path())
    noise = Training.start(1)
    noise.steps(3)  # brings the generators where those of the ranks were
    course.steps(3)
    expected = load_file(ranks.folder / "sync.safetensors")
    for name, value in course.whole().items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5, msg=name)


def test_one_process_goes_on_from_copies(ranks: Ranks) -> None:
    """Names have no trace of the wrapper; two equal gradients have themselves for a mean."""
    course = Training.start(1, seed=3)
    course.load(checkpointer(ranks.folder / "ddp"), ranks.folder / "ddp" / "step_3")
    assert equal(course.whole(), ranks.one)


def test_two_ranks_go_on_from_one(ranks: Ranks) -> None:
    assert equal(load_file(ranks.folder / "two_of_one.safetensors"), ranks.one)
    for result in ranks.results:
        assert result["elastic"]["rates"] == ranks.rates


def test_an_error_of_one_rank_is_one_of_all(ranks: Ranks) -> None:
    for result in ranks.results:
        code, message = result["failures"]["foreign"]
        assert code == 2 and "checkpoint of a qwen3; the model is a other" in message
        code, message = result["failures"]["one_rank"]
        assert code == 1 and "No space left on device" in message
        assert result["failures"]["left"] == []
        assert result["failures"]["after"] == ["step_1"]


def test_ranks_stop_at_the_same_step(ranks: Ranks) -> None:
    """The signal comes in step 1, after its exchange began, so step 2 is the last."""
    assert ranks.results[0]["stopping"] == {"step": 2, "reason": "another rank"}
    assert ranks.results[1]["stopping"] == {"step": 2, "reason": "SIGUSR1"}
