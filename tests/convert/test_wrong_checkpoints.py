"""Tensors too many, too few or of another kind, other formats, contradicting arguments: a clear line, the exit code of
its kind, and nothing left behind."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from convert.dcp import DcpReader
from jobs.cli import main
from tests.convert.dcp_factory import save_megatron
from tests.convert.megatron_factory import language_model
from tests.convert.models import read_weights
from tests.convert.refusing import (
    EMBEDDING,
    INCOMPLETE,
    MEGATRON,
    UNSUPPORTED,
    USAGE,
    VERIFICATION,
    convert,
    saved,
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A whole, valid checkpoint: its iteration's directory."""
    return Path(shutil.copytree(MEGATRON / "singleton", tmp_path / "source")) / "iter_0000001"


# --- tensors

Tensors = dict[str, torch.Tensor]
CHANGES: dict[str, tuple[Callable[[Tensors], Any], int, str]] = {
    "unknown key": (lambda t: t.update({"decoder.surprise.weight": torch.zeros(2)}), UNSUPPORTED, "decoder.surprise"),
    "tower without a place": (
        lambda t: t.update({"visual.blocks.0.norm1.weight": torch.zeros(4)}), UNSUPPORTED, "visual.blocks.0.norm1"
    ),
    "multi-token prediction": (
        lambda t: t.update({"mtp.layers.0.eh_proj.weight": torch.zeros(2, 2)}), UNSUPPORTED, "mtp"
    ),
    "lora": (
        lambda t: t.update({"decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight": torch.zeros(2, 2)}),
        UNSUPPORTED, "merge",
    ),
    "wrapped by lora": (
        lambda t: t.update({"decoder.layers.0.mlp.linear_fc2.to_wrap.weight": torch.zeros(2, 2)}), UNSUPPORTED, "LoRA"
    ),
    "router bias": (
        lambda t: t.update({"decoder.layers.0.mlp.router.expert_bias": torch.zeros(4)}), UNSUPPORTED, "expert_bias"
    ),
    "shared experts": (
        lambda t: t.update({"decoder.layers.0.mlp.shared_experts.linear_fc1.weight": torch.zeros(4, 4)}),
        UNSUPPORTED, "shared experts",
    ),
    "attention bias": (
        lambda t: t.update({"decoder.layers.0.self_attention.linear_qkv.bias": torch.zeros(96)}), UNSUPPORTED, "biases"
    ),
    "live module names": (
        lambda t: t.update({"decoder.layers.0.mlp.experts.linear_fc1.weight0": torch.zeros(40, 32)}),
        UNSUPPORTED, "torch_dist",
    ),
    "a missing expert": (
        lambda t: t.pop("decoder.layers.1.mlp.experts.experts.3.linear_fc2.weight"), INCOMPLETE, "experts.3.down_proj"
    ),
    "a missing layer": (
        lambda t: [t.pop(name) for name in list(t) if ".layers.1." in name], INCOMPLETE, "layers.1."
    ),
    "a missing norm": (
        lambda t: t.pop("decoder.layers.0.mlp.linear_fc1.layer_norm_weight"), INCOMPLETE, "post_attention_layernorm"
    ),
    "a missing head": (lambda t: t.pop("output_layer.weight"), INCOMPLETE, "lm_head"),
    "a missing embedding": (lambda t: t.pop(EMBEDDING), INCOMPLETE, EMBEDDING),
    "a short vocabulary": (lambda t: t.update({EMBEDDING: t[EMBEDDING][:99].clone()}), INCOMPLETE, "99 rows"),
    "both norm places": (
        lambda t: t.update({"decoder.layers.0.pre_mlp_layernorm.weight": torch.ones(32)}), UNSUPPORTED, "twice"
    ),
    "repeated k and v": (
        lambda t: t.update({"decoder.layers.0.self_attention.linear_qkv.weight": torch.zeros(144, 32)}),
        UNSUPPORTED, "repeats k and v",
    ),
    "nan": (lambda t: t["decoder.final_layernorm.weight"].fill_(float("nan")), VERIFICATION, "NaN"),
    "inf": (lambda t: t["output_layer.weight"][5, 7].fill_(float("inf")), VERIFICATION, "lm_head.weight (1)"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_tensors_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    change, wanted, word = CHANGES[name]
    code, message = convert(saved(tmp_path, change), capsys)
    assert code == wanted
    assert word in message and "fault of omniloom" not in message


def test_nan_in_the_padding_harms_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path, lambda tensors: tensors[EMBEDDING][100:].fill_(float("nan")))
    assert convert(source, capsys)[0] == 0


@pytest.mark.parametrize(
    ("name", "count", "wanted"),
    [("num_experts", 9, INCOMPLETE), ("num_experts", 7, UNSUPPORTED), ("num_hidden_layers", 5, INCOMPLETE),
     ("num_hidden_layers", 3, UNSUPPORTED)],
)  # fmt: skip
def test_stacks_of_another_height_than_config_json_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, count: int, wanted: int
) -> None:
    source = Path(shutil.copytree(MEGATRON / "tp1" / "iter_0000001", tmp_path / "source" / "iter_0000001"))
    base = tmp_path / "base"
    base.mkdir()
    config = json.loads((MEGATRON / "tp1" / "hf_ref" / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, name: count}))
    code, message = convert(source, capsys, "--base", str(base))
    said = {"num_experts": "num_experts is 8", "num_hidden_layers": "num_layers is 4"}[name]
    assert code == UNSUPPORTED and said in message and str(count) in message
    torch.save({"iteration": 1}, source / "common.pt")  # without arguments the shapes tell
    code, message = convert(source, capsys, "--base", str(base))
    assert code == wanted and str(count) in message


# --- formats, arguments, options


@pytest.mark.parametrize("argument", ["apply_layernorm_1p", "rotary_interleaved", "add_bias_linear"])
def test_arguments_under_which_weights_mean_something_else(
    source: Path, capsys: pytest.CaptureFixture[str], argument: str
) -> None:
    torch.save({"args": argparse.Namespace(**{argument: True}), "iteration": 3}, source / "common.pt")
    code, message = convert(source, capsys)
    assert code == UNSUPPORTED and argument in message


def test_arguments_against_config_json(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"args": argparse.Namespace(num_query_groups=4, kv_channels=12)}, source / "common.pt")
    code, message = convert(source, capsys)
    assert code == UNSUPPORTED and "num_query_groups is 4" in message


@pytest.mark.parametrize("backend", ["zarr", "fsdp_dtensor"])
def test_other_backends(source: Path, capsys: pytest.CaptureFixture[str], backend: str) -> None:
    (source / "metadata.json").write_text(json.dumps({"sharded_backend": backend}))
    code, message = convert(source, capsys)
    assert code == UNSUPPORTED and backend in message


def test_the_legacy_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "source" / "iter_0000007" / "mp_rank_00"
    folder.mkdir(parents=True)
    (folder / "model_optim_rng.pt").write_bytes(b"x")
    code, message = convert(folder.parent, capsys)
    assert code == UNSUPPORTED and "mp_rank" in message


@pytest.mark.parametrize(
    ("latest", "wanted"), [("3", INCOMPLETE), ("../x", USAGE), ("", USAGE), ("release", INCOMPLETE)]
)
def test_a_tracker_that_names_no_iteration(
    source: Path, capsys: pytest.CaptureFixture[str], latest: str, wanted: int
) -> None:
    (source.parent / "latest_checkpointed_iteration.txt").write_text(latest)
    with pytest.raises(SystemExit) as ended:
        main(["convert", "megatron-to-hf", str(source.parent), str(source.parent / "out"), "--base", str(source)])
    assert ended.value.code == wanted


def test_several_iterations_and_no_tracker(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (source.parent / "latest_checkpointed_iteration.txt").unlink()
    assert convert(source.parent, capsys)[0] == 0
    shutil.rmtree(source.parents[1] / "out")
    shutil.copytree(source, source.parent / "iter_0000002")
    code, message = convert(source.parent, capsys)
    assert code == USAGE and "2 iterations" in message


def test_masters_that_are_not_there(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, message = convert(source, capsys, "--from-master")
    assert code == UNSUPPORTED and "without --from-master" in message


def test_a_base_that_lacks_a_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is told as the base's fault, not as one tensor too many in the source."""
    source = Path(shutil.copytree(MEGATRON / "tp2", tmp_path / "source"))
    base = Path(shutil.copytree(MEGATRON / "tp2" / "hf_ref", tmp_path / "base"))
    weights = read_weights(base)
    name = next(name for name in weights if name.endswith("layers.1.mlp.gate.weight"))
    lost = {name: weights.pop(name)}
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    code, message = convert(source, capsys, "--base", str(base))
    assert code == INCOMPLETE
    assert f"base: the base lacks 1 tensors that its own config.json asks for: {name}" in message
    save_file(weights | lost, base / "model.safetensors", metadata={"format": "pt"})
    assert convert(source, capsys, "--base", str(base))[0] == 0


def test_no_base(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["convert", "megatron-to-hf", str(source), str(source.parent / "out")])
    assert ended.value.code == USAGE and "--base" in capsys.readouterr().err


@pytest.mark.parametrize("tail", ["mlp.surprise.weight", "self_attention.linear_gate.weight", "surprise"])
def test_an_unknown_stacked_name_is_unknown_before_it_is_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tail: str
) -> None:
    """Its first dimension is no number of layers, but that is not what is wrong with it."""
    with DcpReader(MEGATRON / "tp1" / "iter_0000001") as reader:
        tensors = {name: reader.read(name) for name in reader.tensors}
    source = save_megatron(tmp_path / "changed", tensors | {f"decoder.layers.{tail}": torch.zeros(2, 3)})
    code, message = convert(source, capsys, "--base", str(MEGATRON / "tp1" / "hf_ref"))
    assert code == UNSUPPORTED and f"decoder.layers.{tail}" in message


@pytest.mark.parametrize("grouped", [False, None, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_without_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], grouped: bool | None, kv_heads: int
) -> None:
    """Megatron records one query group, its default, although no groups are made and every head has its own k and v."""
    base = tmp_path / "base"
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=56,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            head_dim=8,
            tie_word_embeddings=False,
        )
    )
    model.save_pretrained(base)
    weights = read_weights(base)
    source = save_megatron(tmp_path / "changed", language_model(weights, "model.", "", kv_heads))
    arguments = {"num_attention_heads": 4, "num_query_groups": 1, "group_query_attention": grouped, "kv_channels": 8}
    torch.save({"args": argparse.Namespace(**arguments), "iteration": 3}, source / "common.pt")
    code, message = convert(source, capsys, "--base", str(base))
    if grouped or kv_heads == 2:
        assert code == UNSUPPORTED and "num_query_groups" in message
        return
    assert code == 0
    made = read_weights(tmp_path / "out")
    assert made.keys() == weights.keys() and all(torch.equal(made[name], weights[name]) for name in weights)


def test_one_group_that_may_be_a_default(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing says whether there are groups; the shapes do."""
    torch.save({"args": argparse.Namespace(num_query_groups=1)}, source / "common.pt")
    assert convert(source, capsys)[0] == 0


@pytest.mark.parametrize("value", [0, 1, "no", [], 1.0])
def test_arguments_of_another_kind(source: Path, capsys: pytest.CaptureFixture[str], value: Any) -> None:
    """`0 == False` for Python, but no training run writes it: it is not known what is meant."""
    torch.save({"args": argparse.Namespace(rotary_interleaved=value)}, source / "common.pt")
    code, message = convert(source, capsys)
    assert code == UNSUPPORTED and "rotary_interleaved" in message
