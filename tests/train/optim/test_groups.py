from __future__ import annotations

from typing import Any

import pytest
import torch

from schemas.errors import ConfigError, UnsupportedError
from schemas.strict import check_config
from tests.train.models import families
from train.config import TrainConfig
from train.config_trainer import OptimizerConfig
from train.models.omni_thinker import OmniThinker
from train.ops.registry import eager_ops
from train.optim.adamw import fill_missing_gradients, make_optimizer
from train.optim.groups import learning_rates, parameter_groups

TOWERS = {"vit": "visual.", "audio": "audio_tower."}


def model() -> OmniThinker:
    with torch.device("meta"):
        return OmniThinker(families.omni(), eager_ops())


def groups(found: OmniThinker, **keys: Any) -> list[dict[str, Any]]:
    config = check_config(keys, TrainConfig)
    return parameter_groups(found, config.optimizer, learning_rates(config, TOWERS))


def by_name(found: OmniThinker, made: list[dict[str, Any]]) -> dict[str, tuple[float, float, str]]:
    names = {id(parameter): name for name, parameter in found.named_parameters()}
    listed = [
        (names[id(p)], (group["lr"], group["weight_decay"], group["name"])) for group in made for p in group["params"]
    ]
    assert len(listed) == len(dict(listed))  # each once
    return dict(listed)


def test_later_patterns_win_and_every_parameter_is_in_one_group() -> None:
    found = model()
    rates = {"model.layers.*": 3e-4, "model.layers.1": 4e-4, "*.mlp.experts.*": 5e-4, "visual.blocks.0": 6e-4}
    made = by_name(found, groups(found, vit_lr=1e-6, audio_lr=2e-6, module_lr=rates, optimizer={"lr": 1e-3}))
    assert made.keys() == dict(found.named_parameters()).keys()
    expected = {
        "lm_head.weight": (1e-3, "default"),
        "visual.pos_embed.weight": (1e-6, "vit"),
        "visual.blocks.0.norm1.weight": (6e-4, "visual.blocks.0"),
        "audio_tower.proj2.bias": (2e-6, "audio"),
        "model.layers.0.mlp.gate.weight": (3e-4, "model.layers.*"),
        "model.layers.1.mlp.gate.weight": (4e-4, "model.layers.1"),
        "model.layers.1.mlp.experts.down_proj": (5e-4, "*.mlp.experts.*"),
    }
    assert {name: (made[name][0], made[name][2]) for name in expected} == expected


def test_weight_decay_by_class_and_name() -> None:
    found = model()
    config = {
        "weight_decay": 0.1,
        "no_decay_modules": ["RMSNorm", "Embedding"],
        "no_decay_params": ["bias", "mlp.gate."],
    }
    made = by_name(found, groups(found, optimizer=config))
    plain = {name for name, (_, decay, _) in made.items() if decay == 0}
    norms = {
        f"{path}.weight" for path, module in found.named_modules() if type(module).__name__ in ("RMSNorm", "Embedding")
    }
    assert plain == norms | {name for name in made if "bias" in name or "mlp.gate." in name}
    assert {group for _, _, group in made.values()} == {"default", "default, no decay"}


def test_frozen_parameters_are_in_no_group() -> None:
    found = model()
    found.visual.requires_grad_(False)
    made = by_name(found, groups(found))
    assert made.keys() == {name for name, p in found.named_parameters() if p.requires_grad}
    with pytest.raises(ConfigError, match=r"train.vit_lr: 'visual' names frozen parameters only"):
        groups(found, vit_lr=1e-5)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"module_lr": {"lm_haed": 1e-3}},
            "train.module_lr: 'lm_haed' matches no module or parameter; did you mean 'lm_head'?",
        ),
        ({"optimizer": {"no_decay_modules": ["RMSNrm"]}}, "no_decay_modules: no module is a 'RMSNrm'"),
        ({"optimizer": {"no_decay_params": ["biaz"]}}, "no parameter has 'biaz' in its name"),
        ({"vit_lr": 1e-5, "freeze_vit": True}, "vit_lr is given for a tower that is frozen"),
    ],
)
def test_what_matches_nothing_is_an_error(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        groups(model(), **keys)
    assert said in str(caught.value)


def test_a_model_without_towers() -> None:
    with pytest.raises(ConfigError, match=r"train.audio_lr: the model has no such tower"):
        learning_rates(TrainConfig(audio_lr=1e-4), {"vit": "visual.", "audio": None})


def test_adamw_is_torchs_and_unused_parameters_go_on() -> None:
    used, unused = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    config = OptimizerConfig(lr=0.1, betas=[0.8, 0.9], eps=1e-6)
    optimizer = make_optimizer([{"params": [used, unused], "lr": 0.1, "weight_decay": 0.5}], config)
    used.grad = torch.tensor([1.0, -2.0, 0.0])
    fill_missing_gradients(optimizer)
    optimizer.step()
    assert unused.tolist() == pytest.approx([0.95] * 3)  # decay alone
    moment = used.grad / (used.grad.abs() + 1e-6)
    assert torch.allclose(used, torch.full((3,), 0.95) - 0.1 * moment)
    assert len(optimizer.state) == 2


@pytest.mark.parametrize(("keys", "said"), [({"type": "muon"}, "muon"), ({"state_dtype": "bf16"}, "bf16")])
def test_what_is_not_built_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        make_optimizer([{"params": [torch.nn.Parameter(torch.ones(1))]}], check_config(keys, OptimizerConfig))
