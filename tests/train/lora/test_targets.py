"""Which modules a configuration means, and what it says when it means none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from schemas.errors import ConfigError
from schemas.strict import check_config
from tests.train.lora.adapted import DENSE, EXPERTS, add, lora_config, meta_model
from train.config_lora import LoraConfig
from train.lora.apply import adapter_names, trained_table
from train.lora.layers import ExpertAdapters, LoraLinear, PairSettings
from train.lora.plan import LoraPlan
from train.lora.targets import Targets, find_targets
from train.models.freeze import freeze
from train.models.initialize import initializers


def targets(name: str, **keys: Any) -> Targets:
    return find_targets(meta_model(name), lora_config(**keys), ())


def test_names_of_both_kinds_mean_the_same() -> None:
    ours = check_config({"rank": 4, "alpha": 2.0, "lora_modules": ["q_proj"]}, LoraConfig)
    theirs = check_config({"r": 4, "lora_alpha": 2.0, "target_modules": ["q_proj"]}, LoraConfig)
    assert ours == theirs and (ours.rank, ours.alpha, ours.lora_modules) == (4, 2.0, ["q_proj"])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"rank": 4, "r": 4, "lora_modules": ["q"]}, "rank and r are two names of one key; give one of them"),
        ({}, "needs lora_modules (q_proj, gate_proj, ...) or target_parameters"),
        ({"lora_modules": []}, "needs lora_modules"),
        ({"r": 0, "lora_modules": ["q"]}, "rank: is 0 (integer); it must be an integer > 0"),
        ({"lora_modules": ["q"], "bias": "all"}, "bias all is not supported: biases of the base stay as they are"),
        ({"lora_modules": ["q"], "is_trainable": False}, "is_trainable false would leave nothing to train"),
        ({"lora_modules": ["q"], "init_lora_weights": "pissa"}, "init_lora_weights: is 'pissa'"),
        ({"lora_modules": "(a"}, "lora_modules: '(a' is no regular expression"),
        ({"lora_modules": ["q"], "rank_pattern": {"(a+)+b": 2}}, "repeats a repetition"),
        ({"lora_adapter": "x", "r": 4}, "lora_adapter brings its own rank; leave rank out"),
        ({"lora_modules": ["q"], "lora_dropuot": 0.1}, "lora_dropuot: unknown key; did you mean 'lora_dropout'"),
    ],
)
def test_mistakes_in_the_configuration(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(keys, LoraConfig, "lora")
    assert said in str(caught.value)


def test_what_is_written_out_loads_again() -> None:
    for keys in ({"lora_adapter": "x", "lora_dropout": 0.1}, {"r": 4, "target_modules": "all-linear"}):
        config = check_config(dict(keys), LoraConfig)
        assert check_config(config.model_dump(mode="json"), LoraConfig) == config


def test_lists_match_ends_and_texts_whole_names() -> None:
    found = targets("moe", lora_modules=["q_proj", "layers.1.self_attn.o_proj"])
    assert list(found.linears) == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.o_proj",
        "model.layers.2.self_attn.q_proj",
    ]
    found = targets("moe", lora_modules=r"model\.layers\.[01]\.(self_attn\.v_proj|mlp\.experts\.up_proj)")
    assert list(found.linears) == [f"model.layers.{n}.self_attn.v_proj" for n in (0, 1)]
    assert {path: list(pairs) for path, pairs in found.experts.items()} == {
        f"model.layers.{n}.mlp.experts": ["up_proj"] for n in (0, 1)
    }


def test_projections_mean_dense_layers_and_experts_alike() -> None:
    found = targets("mixed_moe", lora_modules=EXPERTS, exclude_modules=["layers.0.mlp.down_proj"])
    dense = {path.rpartition(".")[0] for path in found.linears}
    assert dense and all(path.endswith(".mlp") for path in dense)
    assert "model.layers.0.mlp.down_proj" not in found.linears and "model.layers.0.mlp.up_proj" in found.linears
    assert all(list(pairs) == EXPERTS for pairs in found.experts.values()) and found.experts


def test_parameters_of_experts_by_name_and_by_pattern() -> None:
    by_end = targets("moe", target_parameters=["experts.gate_up_proj"])
    assert {tuple(pairs) for pairs in by_end.experts.values()} == {("gate_proj", "up_proj")}
    whole_omni = targets("moe", target_parameters=["thinker.model.layers.*.mlp.experts.gate_up_proj"])
    assert whole_omni.experts == by_end.experts  # names of a whole Qwen3-Omni
    assert targets("moe", lora_modules=["thinker.model.layers.0.self_attn.q_proj"]).linears.keys() == {
        "model.layers.0.self_attn.q_proj"
    }
    by_pattern = targets("moe", target_parameters=["*layers.2.*.down_proj"])
    assert {p: list(pairs) for p, pairs in by_pattern.experts.items()} == {"model.layers.2.mlp.experts": ["down_proj"]}


def test_all_linear_leaves_the_head_out() -> None:
    found = targets("omni", lora_modules="all-linear")
    assert "lm_head" not in found.linears and "visual.merger.mlp.0" in found.linears and len(found.experts) == 3


def test_patterns_set_pairs_apart_the_first_that_fits() -> None:
    found = targets(
        "moe",
        lora_modules=[*DENSE, *EXPERTS],
        use_rslora=True,
        rank_pattern={"layers.1.self_attn.q_proj": 7, "q_proj": 2, "experts.gate_up_proj": 4},
        alpha_pattern={"down_proj": 9.0, ".*experts.*": 1.0},
    )
    assert found.linears["model.layers.1.self_attn.q_proj"] == PairSettings(7, 5.0, True)
    assert found.linears["model.layers.0.self_attn.q_proj"] == PairSettings(2, 5.0, True)
    assert found.linears["model.layers.0.self_attn.k_proj"].scale == 5.0 / 3**0.5
    assert found.experts["model.layers.0.mlp.experts"] == {
        "gate_proj": PairSettings(4, 1.0, True),
        "up_proj": PairSettings(4, 1.0, True),
        "down_proj": PairSettings(3, 9.0, True),
    }


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        (
            "moe",
            {"lora_modules": ["q_porj"]},
            "lora_modules: 'q_porj' matches nothing; did you mean 'q_proj'? there are",
        ),
        (
            "moe",
            {"lora_modules": ["qkv"]},
            "linear layers lm_head, q_proj, k_proj, v_proj, o_proj; of experts gate_proj",
        ),
        ("dense", {"target_parameters": ["experts.down_proj"]}, "the model has no fused experts"),
        ("moe", {"target_parameters": ["down_porj"]}, "there are experts.down_proj, experts.gate_up_proj"),
        ("moe", {"lora_modules": ["q_proj"], "exclude_modules": ["x"]}, "exclude_modules: 'x' matches nothing"),
        (
            "moe",
            {"lora_modules": ["q_proj"], "exclude_modules": ["q_proj"]},
            "leaves nothing of what lora_modules names",
        ),
        (
            "moe",
            {"lora_modules": ["q_proj"], "rank_pattern": {"k_proj": 2}},
            "rank_pattern: 'k_proj' matches nothing that",
        ),
        ("moe", {"lora_modules": ["q_proj"], "alpha_pattern": {"x": 2}}, "adapted are q_proj"),
        ("moe", {"lora_modules": ["q_proj"], "modules_to_save": ["lm_haed"]}, "did you mean 'lm_head'?"),
        (
            "moe",
            {"lora_modules": ["q_proj"], "modules_to_save": ["self_attn"]},
            "has an adapter (model.layers.0.self_attn",
        ),
        ("tied", {"lora_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, "which is tied to the head"),
        ("tied", {"lora_modules": ["lm_head"]}, "'lm_head' matches nothing"),
        ("moe", {"lora_modules": ["up_proj"], "lora_dropout": 0.1}, "lora_dropout: 0.1 with adapters of experts"),
        ("moe", {"lora_modules": ["q_proj"], "share_expert_lora": True}, "share_expert_lora: no experts are adapted"),
    ],
)
def test_what_matches_nothing_is_told(name: str, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        targets(name, **keys)
    assert said in str(caught.value)


def test_what_is_frozen_by_name_gets_no_adapter() -> None:
    model = meta_model("omni")
    frozen = freeze(model, audio_tower=True, modules=["model.layers.1"])
    found = find_targets(model, lora_config(lora_modules=["q_proj", "up_proj"]), frozen)
    assert list(found.linears) == [f"model.layers.{n}.self_attn.q_proj" for n in (0, 2)]
    assert list(found.experts) == [f"model.layers.{n}.mlp.experts" for n in (0, 2)]
    with pytest.raises(ConfigError, match="'fc1' matches only what train"):
        find_targets(model, lora_config(lora_modules=["fc1"]), frozen)


def test_everything_else_is_frozen_in_the_dtype_that_is_computed_in() -> None:
    model = meta_model("moe")
    add(model, lora_config(lora_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"]), torch.bfloat16)
    trained = [*adapter_names(model), "lm_head.weight"]
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (name in trained), name
        assert parameter.dtype == (torch.float32 if name in trained else torch.bfloat16), name
    layer = model.get_submodule("model.layers.0")
    assert isinstance(layer.self_attn.q_proj, LoraLinear) and isinstance(layer.mlp.expert_lora, ExpertAdapters)


def test_the_table_adds_up() -> None:
    model = meta_model("moe")
    add(model, lora_config(lora_modules=["q_proj", "up_proj"]))
    head, *lines = trained_table(model)
    # q: 3 layers x 3 x (48 + 64); up: 3 layers x 8 experts x 3 x (48 + 20)
    assert head.startswith(f"{3 * 3 * 112 + 3 * 8 * 3 * 68:,} of ")
    assert len(lines) == 4
    assert "model.layers.*.mlp.expert_lora.up_proj.lora_A.weight" in lines[2] and "3 of 8 x 3 x 48" in lines[2]


@pytest.mark.parametrize("init", [True, "gaussian", False])
def test_initial_values(init: bool | str) -> None:
    """As PEFT's: A uniform within 1 / sqrt(inputs), or normal with 1 / rank; B zero, or uniform."""
    model = meta_model("moe")
    plan = LoraPlan.make(model, lora_config(lora_modules=["q_proj", "up_proj"], rank=16, init_lora_weights=init), ())
    plan.freeze(model, torch.float32)
    plan.add(model, torch.float32)
    values = {name: value.make() for name, value in plan.start(model, 7).items()}
    assert list(values) == adapter_names(model)
    again = {name: found.make(7) for name, found in initializers(model).items() if name in values}
    assert all(torch.equal(values[name], again[name]) for name in values)
    a, b = (values[f"model.layers.0.mlp.expert_lora.up_proj.lora_{x}.weight"] for x in "AB")
    assert a.shape == (8, 16, 48) and b.shape == (8, 20, 16)
    if init == "gaussian":
        assert a.std() == pytest.approx(1 / 16, rel=0.05)
    else:
        assert 0.99 * 48**-0.5 < a.abs().max() <= 48**-0.5 and a.std() == pytest.approx((48 * 3) ** -0.5, rel=0.05)
    assert (b.abs().max() == 0) == (init is not False)
    other = {name: value.make() for name, value in plan.start(model, 8).items()}
    assert not torch.equal(a, other["model.layers.0.mlp.expert_lora.up_proj.lora_A.weight"])
