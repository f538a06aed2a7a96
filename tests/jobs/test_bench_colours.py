"""The colour-naming task: what its rows say and do not say, and a short course of it."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import numpy as np
import pytest
import torch

from jobs.bench.colours import GOAL, Course, Sizes, claims_of, run_course
from jobs.bench.colours_data import CHANCE, NAMES, draw_clip, make_rows, pack_clips
from jobs.rollout.scorers import by_kind
from pack.reader import PackedDataset
from train.data.rollout_files import read_rollouts
from train.data.transform import decode_pictures


def test_letters_of_the_warm_up_say_nothing_about_the_clips(tmp_path):
    rows = list(make_rows(tmp_path, 32, 5, right=False))
    pairs = Counter((number % len(NAMES), row["answer"]) for number, row in enumerate(rows))
    assert pairs == dict.fromkeys(itertools.product(range(4), range(4)), 2)
    rows = list(make_rows(tmp_path, 32, 5, right=True))
    assert all(number % len(NAMES) == row["answer"] for number, row in enumerate(rows))


def test_a_packed_clip_shows_the_colour_that_its_answer_names(tmp_path):
    """Nearest of the four mean colours, from the stored JPEG frames."""
    rng = np.random.default_rng(0)
    means = {name: np.mean([draw_clip(name, rng).mean((0, 1, 2)) for _ in range(8)], 0) for name in NAMES}
    dataset = PackedDataset(str(pack_clips(tmp_path, 16, 1, right=True)))
    assert len(dataset) == 16
    for sample in dataset:
        shown = decode_pictures(sample.videos[0].frames).mean((0, 1, 2))
        nearest = min(NAMES, key=lambda name: float(np.abs(means[name] - shown).sum()))
        assert sample.meta.extra["answer_text"] == nearest
        assert by_kind(sample.meta.extra["answer"], sample.meta.extra) == 1


def test_a_round_of_everything(tmp_path):
    """Two steps teach nothing; what counts is that each part takes what the one before it made."""
    torch.set_num_threads(1)
    sizes = Sizes(clips=16, held_out=16, warm_up=2, rounds=1, group=3, steps=2)
    course = run_course(tmp_path, 0, sizes)
    for name, reward in zip(("round0", "last", "others"), (*course.rewards, course.held_out), strict=True):
        rollouts = read_rollouts(tmp_path / "rollouts" / name)
        assert len(rollouts) == 16
        assert all(len(row.responses) == 3 for row in rollouts)
        assert reward == pytest.approx(np.mean([row.rewards for row in rollouts]))
    assert (tmp_path / "training/round0/model/model.safetensors").is_file()
    lines = (tmp_path / "training/round0/metrics.jsonl").read_text().splitlines()
    first = next(values for values in map(json.loads, lines) if "grpo/ratio" in values)
    assert first["grpo/ratio"] == pytest.approx(1, abs=1e-4)  # the engine's log-probabilities are the trainer's
    assert first["grpo/reward"] == pytest.approx(course.rewards[0], abs=1e-6)


@pytest.mark.slow
def test_rewards_rise_from_chance(tmp_path):
    torch.set_num_threads(1)
    course = run_course(tmp_path, 1, Sizes(rounds=4))
    assert abs(course.rewards[0] - CHANCE) < 0.08
    assert course.rewards[-1] > CHANCE + GOAL
    assert course.held_out > CHANCE + GOAL


def test_claims():
    courses = [Course(0, [0.25, 0.5], 0.44, 1.0), Course(1, [0.27, 0.4], 0.5, 1.0)]
    found = {claim.claim: claim for claim in claims_of(courses, Sizes())}
    assert (found["reward above chance, seed 0"].value, found["reward above chance, seed 0"].met) == (0.25, True)
    assert found["the same on other clips, seed 0"].met is False
    assert found["distance from chance before the first round, largest"].value == pytest.approx(0.02)
    assert found["mean reward after the last round, mean of seeds"].value == pytest.approx(0.45)
