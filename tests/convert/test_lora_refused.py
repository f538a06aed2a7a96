"""Adapters whose merge is not the plain sum, and settings of a wrong kind: refused by the name of the key."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from convert.inspection import inspect_source
from convert.lora import merge_lora_conversion
from jobs.cli import main
from schemas.errors import ConfigError, UnsupportedError
from tests.convert.models import edit_config, make_text, read_weights, rewrite_weights
from tests.convert.test_lora import TEXT, H, R, adapter, factors

Q = f"{TEXT}0.self_attn.q_proj"
# as PEFT 0.21 writes the settings of a plain adapter
DEFAULTS: dict[str, Any] = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "base_model_name_or_path": "x", "bias": "none", "corda_config": None, "ensure_weight_tying": False,
    "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "kasa_config": None, "layer_replication": None, "layers_pattern": None,
    "layers_to_transform": None, "loftq_config": {}, "lora_bias": False, "lora_dropout": 0.1, "lora_ga_config": None,
    "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None, "monteclora_config": None,
    "peft_version": "0.21.2", "qalora_group_size": 16, "rank_pattern": {}, "revision": None,
    "target_modules": ["layers.0.self_attn.q_proj"], "target_parameters": None,
    "task_type": None, "trainable_token_indices": None,
    "use_bdlora": None, "use_dora": False, "use_qalora": False, "use_rslora": False, "velora_config": None,
}  # fmt: skip


def test_the_settings_that_are_changed_below_are_plain(omni: Path, tmp_path: Path) -> None:
    merge_lora_conversion(adapter(tmp_path / "lora", factors(Q, H, 40), **DEFAULTS), omni)


@pytest.mark.parametrize("start", [False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_starts_that_leave_the_base_alone(omni: Path, tmp_path: Path, start: Any) -> None:
    source = adapter(tmp_path / "lora", factors(Q, H, 40), **DEFAULTS | {"init_lora_weights": start})
    merge_lora_conversion(source, omni)


@pytest.mark.parametrize(
    "change",
    [{"init_lora_weights": start} for start in (
        "pissa", "pissa_niter_16", "PISSA", "olora", "lora_ga", "corda", "loftq", "next_year", ["pissa"], 3)]
    + [{"alora_invocation_tokens": [1, 2]}, {"kasa_config": {"a": 1}}, {"monteclora_config": {"a": 1}},
       {"velora_config": {"a": 1}}, {"arrow_config": {"a": 1}}, {"use_bdlora": {"a": 1}}, {"lora_bias": True},
       {"trainable_token_indices": [3]}, {"layer_replication": [[0, 2]]}, {"fan_in_fan_out": True},
       {"ensure_weight_tying": True}, {"megatron_config": {"a": 1}}, {"loftq_config": {"loftq_bits": 4}},
       {"use_of_next_year": True}, {"scale_of_next_year": 2.0}, {"bias": "lora_only"}, {"use_qalora": 1}],
    ids=str,
)  # fmt: skip
def test_what_a_merge_does_not_implement(
    omni: Path, tmp_path: Path, change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    source = adapter(tmp_path / "lora", factors(Q, H, 40), **DEFAULTS | change)
    with pytest.raises(SystemExit) as ended:
        main(["convert", "merge-lora", str(source), str(tmp_path / "out"), "--base", str(omni)])
    message = capsys.readouterr().err
    assert ended.value.code == 7
    assert "adapter_config.json" in message and next(iter(change)) in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lora"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("lora_alpha", "8"), ("lora_alpha", True), ("lora_alpha", math.nan), ("lora_alpha", 10**400),
     ("r", 10**400), ("lora_alpha", [8]), ("r", "3"), ("r", 0),
     ("r", -1), ("r", 3.0), ("r", True), ("rank_pattern", [1]), ("rank_pattern", {"q": "3"}), ("alpha_pattern", 3),
     ("alpha_pattern", {"q": None}), ("alpha_pattern", {"(": 3}), ("alpha_pattern", {"(a+)+b": 3}),
     ("use_rslora", "no")],
)  # fmt: skip
def test_settings_of_a_wrong_kind(omni: Path, tmp_path: Path, key: str, value: Any) -> None:
    source = adapter(tmp_path / "lora", factors(Q, H, 40), **DEFAULTS | {key: value})
    with pytest.raises(ConfigError, match=rf"adapter_config\.json: {key}"):
        merge_lora_conversion(source, omni)


@pytest.mark.parametrize("content", ["[]", "3", "", "{", '{"r": 3, "r": 4}', "[" * 100_000, "\xff"])
def test_settings_that_are_no_object(omni: Path, tmp_path: Path, content: str) -> None:
    source = adapter(tmp_path / "lora", factors(Q, H, 40))
    (source / "adapter_config.json").write_bytes(content.encode("latin1"))
    with pytest.raises(ConfigError, match=r"adapter_config\.json: (holds|is not valid JSON)"):
        merge_lora_conversion(source, omni)


def test_a_rank_that_the_settings_do_not_say(omni: Path, tmp_path: Path) -> None:
    """The scale is alpha over the rank, so one of the two is a mistake."""
    source = adapter(tmp_path / "lora", factors(Q, H, 40, rank=R + 1))
    with pytest.raises(UnsupportedError, match=r"q_proj\.lora_A\.weight .* has rank 4, its settings say 3"):
        merge_lora_conversion(source, omni)


def test_whole_numbers_are_no_weights(omni: Path, tmp_path: Path) -> None:
    tensors = {name: tensor.to(torch.int8) for name, tensor in factors(Q, H, 40).items()}
    with pytest.raises(UnsupportedError, match=r"q_proj\.lora_[AB]\.weight is int8"):
        merge_lora_conversion(adapter(tmp_path / "lora", tensors), omni)


@pytest.mark.parametrize("module", ["model.embed_tokens", "lm_head"])
def test_tied_weights_cannot_take_the_change_of_one(tmp_path: Path, module: str) -> None:
    """The adapter changed the embedding alone or the head alone; in the base they are one tensor."""
    base = make_text(tmp_path / "base", tied=True)
    tensors = factors(f"base_model.model.{module}", 32, 96)
    if module != "lm_head":
        tensors = {
            f"base_model.model.{module}.lora_embedding_A": torch.randn(R, 96),
            f"base_model.model.{module}.lora_embedding_B": torch.randn(32, R),
        }
    else:
        weights = read_weights(base)
        rewrite_weights(base, weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    with pytest.raises(UnsupportedError, match=r"tie"):
        merge_lora_conversion(adapter(tmp_path / "lora", tensors), base)


def test_inspect_shows_all_that_is_adapted(tmp_path: Path) -> None:
    """Modules and parameters, as PEFT names linear layers and fused experts."""
    source = adapter(
        tmp_path / "lora", factors(Q, H, 40), target_modules=["q_proj"], target_parameters=["experts.down_proj"]
    )
    assert "q_proj, experts.down_proj" in " ".join(inspect_source(source).lines())


def test_inspect_shows_no_control_characters(tmp_path: Path) -> None:
    source = adapter(tmp_path / "lora", factors(Q, H, 40), base_model_name_or_path="a\x1b[31mb\nc")
    assert all(line.isprintable() for line in inspect_source(source).lines())
    assert json.loads((source / "adapter_config.json").read_text())["base_model_name_or_path"] == "a\x1b[31mb\nc"


def test_an_adapter_of_a_base_with_wrong_types(omni: Path, tmp_path: Path) -> None:
    base = make_text(tmp_path / "base")
    edit_config(base, num_experts="4")
    with pytest.raises(ConfigError, match=r"config\.json\.num_experts: is '4'"):
        merge_lora_conversion(adapter(tmp_path / "lora", factors(Q, H, 40)), base)
