from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from schemas.errors import ConfigError
from schemas.strict import check_config
from train.config_trainer import OptimizerConfig
from train.optim.schedule import LrScheduler, Schedule

LR, MIN, START, TOTAL = 2e-4, 2e-5, 1e-5, 100


def rates(**keys: Any) -> list[float]:
    """Of all steps and two more."""
    schedule = Schedule.of(check_config({"lr": LR} | keys, OptimizerConfig), TOTAL)
    return [LR * schedule.factor(step) for step in range(TOTAL + 2)]


def test_warm_up_is_linear_from_the_start() -> None:
    found = rates(lr_start=START, lr_warmup_steps=10, lr_decay_style="constant")
    assert found[:11] == pytest.approx([START + (LR - START) * step / 10 for step in range(11)])
    assert found[10:] == pytest.approx([LR] * 92)
    assert rates(lr_warmup_ratio=0.1, lr_start=START, lr_decay_style="constant") == found


def test_cosine_decays_to_the_minimum() -> None:
    found = rates(lr_min=MIN, lr_warmup_steps=20, lr_decay_ratio=0.8)
    for step in range(20, 80):
        assert found[step] == pytest.approx(MIN + (LR - MIN) * (1 + math.cos(math.pi * (step - 20) / 60)) / 2)
    assert found[80:] == pytest.approx([MIN] * 22)


def test_linear_decays_to_the_minimum() -> None:
    found = rates(lr_min=MIN, lr_decay_style="linear")
    assert found[:100] == pytest.approx([LR + (MIN - LR) * step / 100 for step in range(100)])
    assert found[100:] == pytest.approx([MIN, MIN])


def test_a_training_of_warm_up_alone_and_one_that_is_too_short() -> None:
    assert rates(lr_warmup_steps=100)[99] == pytest.approx(LR * 0.99)
    with pytest.raises(ConfigError, match="lr_warmup_steps: 101 steps of a training of 100"):
        rates(lr_warmup_steps=101)
    with pytest.raises(ConfigError, match=r"lr_min 0.5 is above lr 0.0002"):
        rates(lr_min=0.5)


def test_groups_keep_their_proportions_also_after_a_resume() -> None:
    def make() -> LrScheduler:
        groups = [
            {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr, "base_lr": lr, "name": name}
            for name, lr in (("default", LR), ("vit", LR / 10))
        ]
        config = OptimizerConfig(lr=LR, lr_min=MIN, lr_warmup_steps=3)
        return LrScheduler(torch.optim.SGD(groups), Schedule.of(config, 10))

    scheduler = make()
    seen = [scheduler.rates()]
    for _ in range(10):
        scheduler.step()
        seen.append(scheduler.rates())
    assert seen[0]["default"] == 0 and seen[3]["default"] == LR and seen[10]["default"] == pytest.approx(MIN)
    for found in seen:
        assert found["vit"] == pytest.approx(found["default"] / 10, rel=1e-12)
    resumed = make()
    resumed.load_state_dict({"steps": 6})
    assert resumed.rates() == seen[6] and resumed.state_dict()["steps"] == 6
    resumed.step()
    assert resumed.rates() == seen[7]


def test_another_schedule_than_the_saved_one_is_told() -> None:
    def make(total: int, **keys: Any) -> LrScheduler:
        group = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": LR, "base_lr": LR, "name": "default"}
        return LrScheduler(torch.optim.SGD([group]), Schedule.of(OptimizerConfig(lr=LR, **keys), total))

    short = make(12)
    short.steps = 12
    saved = json.loads(json.dumps(short.state_dict()))
    assert make(12).change_since(saved) is None
    said = make(20).change_since(saved)
    assert said is not None and "step at which decay ends 12 then, 20 now" in said
    now = 0.5 * (1 + math.cos(math.pi * 12 / 20))
    assert f"After step 12 the rate is {now:.3g} of its highest; by the checkpoint's schedule it would be 0" in said
    other = make(20, lr_decay_style="linear", lr_warmup_steps=2).change_since(saved) or ""
    assert "lr_decay_style cosine then, linear now" in other and "steps of warm-up 0 then, 2 now" in other
    steady = make(12, lr_decay_style="constant")
    assert make(20, lr_decay_style="constant", lr_min=1e-6).change_since(steady.state_dict()) is None
    assert make(20).change_since({"steps": 3}) is None  # of an older checkpoint
