from __future__ import annotations

from typing import Any

import pytest
import torch

from schemas.errors import ConfigError
from schemas.strict import check_config
from tests.train.models import families
from train.config import TrainConfig
from train.config_optimizer import OptimizerConfig
from train.models.omni_thinker import OmniThinker
from train.ops.registry import eager_ops
from train.optim.adamw import fill_missing_gradients
from train.optim.build import make_optimizer
from train.optim.groups import learning_rates, parameter_groups
from train.optim.muon_parameters import head_blocks, muon_names

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
    model = torch.nn.ParameterDict({"used": torch.ones(3), "unused": torch.ones(3)})
    used, unused = model["used"], model["unused"]
    config = OptimizerConfig(lr=0.1, betas=[0.8, 0.9], eps=1e-6)
    optimizer = make_optimizer(model, [{"params": [used, unused], "lr": 0.1, "weight_decay": 0.5}], config)
    assert type(optimizer) is torch.optim.AdamW
    used.grad = torch.tensor([1.0, -2.0, 0.0])
    fill_missing_gradients(optimizer)
    optimizer.step()
    assert unused.tolist() == pytest.approx([0.95] * 3)  # decay alone
    moment = used.grad / (used.grad.abs() + 1e-6)
    assert torch.allclose(used, torch.full((3,), 0.95) - 0.1 * moment)
    assert len(optimizer.state) == 2


def kinds(found: OmniThinker, **keys: Any) -> dict[str, dict[str, Any]]:
    names = {id(parameter): name for name, parameter in found.named_parameters()}
    return {names[id(parameter)]: group for group in groups(found, **keys) for parameter in group["params"]}


def test_muon_takes_matrices_but_not_embeddings_head_routers_and_convolutions() -> None:
    found = model()
    made = kinds(found, optimizer={"type": "muon"})
    muon = {name for name, group in made.items() if group["kind"] == "muon"}
    shapes = {name: parameter.ndim for name, parameter in found.named_parameters()}
    others = {name for name in made if name not in muon and shapes[name] in (2, 3)}
    assert others == {
        "lm_head.weight",
        "model.embed_tokens.weight",
        "visual.pos_embed.weight",
        *(name for name in made if name.endswith("mlp.gate.weight")),
    }
    assert all(shapes[name] in (2, 3) for name in muon)
    assert {"model.layers.1.mlp.experts.gate_up_proj", "visual.blocks.0.attn.qkv.weight"} <= muon


def test_rates_and_decay_of_modules_hold_for_muon() -> None:
    given = {"type": "muon", "lr": 1e-3, "muon_lr": 2e-2, "muon_weight_decay": 0.1, "weight_decay": 0.2}
    given |= {"module_weight_decay": {"visual": 0.3}}
    made = kinds(model(), vit_lr=1e-4, optimizer=given)
    expected = {
        "model.layers.0.self_attn.q_proj.weight": ("muon", 2e-2, 0.1, "muon"),
        "visual.blocks.0.attn.qkv.weight": ("muon", 2e-3, 0.3, "vit, muon, decay 0.3"),
        "visual.blocks.0.norm1.weight": ("adamw", 1e-4, 0.3, "vit, decay 0.3"),
        "lm_head.weight": ("adamw", 1e-3, 0.2, "default"),
    }
    for name, (kind, lr, decay, title) in expected.items():
        group = made[name]
        assert (group["kind"], group["weight_decay"], group["name"]) == (kind, decay, title)
        assert group["lr"] == group["base_lr"] == pytest.approx(lr)


@pytest.mark.parametrize(("how", "factor"), [("match_rms_adamw", 1.0), ("original", 25.0)])
def test_muon_without_its_own_rate(how: str, factor: float) -> None:
    made = kinds(model(), optimizer={"type": "muon", "lr": 1e-3, "muon_adjust_lr_fn": how})
    assert made["model.layers.0.self_attn.q_proj.weight"]["lr"] == pytest.approx(factor * 1e-3)


def test_what_must_not_decay_is_not_muons() -> None:
    made = kinds(model(), optimizer={"type": "muon", "no_decay_params": ["q_proj"]})
    assert made["model.layers.0.self_attn.q_proj.weight"]["kind"] == "adamw"
    with pytest.raises(ConfigError, match="muon, but no trained parameter is a matrix"):
        groups(model(), optimizer={"type": "muon", "no_decay_params": ["weight", "_proj"]})


@pytest.mark.parametrize(
    ("size", "modules", "said"),
    [
        (3, ["q_proj"], "muon_head_group_size: 3 does not divide the"),
        (1, ["q_porj"], "in a module 'q_porj'; did you mean 'q_proj'?"),
        (1, ["gate_proj"], "in a module 'gate_proj'"),
        (1, ["linear_fc1"], "states no number of heads"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(size: int, modules: list[str], said: str) -> None:
    keys = {"type": "muon", "muon_head_group_size": size, "muon_head_split_modules": modules}
    with pytest.raises(ConfigError) as caught:
        groups(model(), optimizer=keys)
    assert said in str(caught.value)


def test_blocks_of_heads() -> None:
    found = model()
    config = check_config(
        {"type": "muon", "muon_head_group_size": 2, "muon_head_split_modules": ["q_proj", "qkv"]}, OptimizerConfig
    )
    blocks = head_blocks(found, muon_names(found), config)
    text, vision = found.config.text_config, found.config.vision_config
    assert blocks["model.layers.0.self_attn.q_proj.weight"] == text.num_attention_heads // 2
    assert blocks["visual.blocks.0.attn.qkv.weight"] == 3 * vision.num_heads // 2
    assert not any("k_proj" in name for name in blocks)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"muon_head_group_size": 1}, "go together"),
        ({"muon_head_split_modules": ["q_proj"]}, "go together"),
        ({"muon_ns_coefficients": [[3.0, -4.0, 2.0]] * 3}, "has 3 triples for muon_ns_steps 5"),
        ({"muon_ns_steps": 100}, "muon_ns_steps"),
        ({"muon_head_group_size": -1}, "muon_head_group_size"),
    ],
)
def test_keys_of_muon_that_do_not_fit(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_config({"type": "muon"} | keys, OptimizerConfig)


def test_bf16_masters_need_bf16_computation() -> None:
    exact = {"fsdp_config": {"mixed_precision": {"enable": False}}}
    with pytest.raises(ConfigError, match=r"master_dtype bf16 needs mixed_precision"):
        check_config({"optimizer": {"master_dtype": "bf16"}, "accelerator": exact}, TrainConfig)
