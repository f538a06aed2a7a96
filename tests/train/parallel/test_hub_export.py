"""The iterator over a model in training gives what the hub's files hold: transformers loads it whole, bit by bit the
weights of the model, from one process and from shards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from convert.engine import resolve
from convert.families import model_of
from convert.rules import inverse
from convert.tables.hub import FAMILIES as HUB
from convert.tables.trainer import STYLES
from convert.tensors import TensorInfo
from convert.trainer import to_hub
from schemas.errors import ConfigError, UnsupportedError
from tests import dist as processes
from tests.train import pseudo
from tests.train.models import media
from tests.train.models.families import FAMILIES, hub_names, make_ours, randomise
from tests.train.parallel.steps import fill, make_parts
from train.data.model_inputs import model_inputs
from train.models.foundation import FoundationModel
from train.models.freeze import freeze
from train.models.spec import build_foundation_model
from train.ops.registry import eager_ops
from train.parallel.hub_export import export_tensors, plan_export

# family, whose files, form of the experts, that released transformers load
LOADABLE = [
    ("omni", None, None),
    ("omni", "qwen3_omni_moe_thinker", "per-expert"),
    ("omni", "qwen3_omni_moe_thinker", "v5"),
    ("vl_moe", None, None),
    ("vl_moe", None, "v5"),
    ("moe", None, None),
    ("moe", None, "v5"),
    ("mixed_moe", None, None),
    ("dense", None, None),
    ("vl", None, None),
    ("vl_tied", None, None),
]


def save(folder: Path, name: str, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    FAMILIES[name].make_config().save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(("name", "to", "experts"), LOADABLE)
def test_transformers_loads_all_of_it(tmp_path: Path, name: str, to: str | None, experts: str | None) -> None:
    model = make_ours(name)
    folder = save(tmp_path / "files", name, dict(export_tensors(model, to=to, experts=experts)))
    loaded, report = FAMILIES[name].reference.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    again = hub_names(loaded)
    parameters = dict(model.named_parameters())
    assert again.keys() == parameters.keys()
    assert all(torch.equal(again[key], value) for key, value in parameters.items())


@pytest.mark.parametrize("experts", ["per-expert", "hub", "v5"])
@pytest.mark.parametrize("name", ["omni", "vl_moe", "moe"])
def test_the_trainer_loads_every_form(tmp_path: Path, name: str, experts: str) -> None:
    model = make_ours(name)
    folder = save(tmp_path / "files", name, dict(export_tensors(model, experts=experts)))
    again = dict(build_foundation_model(folder, eager_ops()).named_parameters())
    assert all(torch.equal(again[key], value) for key, value in model.named_parameters())


@pytest.mark.parametrize("experts", ["per-expert", "v5"])
def test_what_was_made_from_a_thinker_goes_back_into_it(tmp_path: Path, experts: str) -> None:
    """Every tensor that both have, under the thinker's name, with its bytes."""
    omni = pseudo.make_omni(tmp_path / "omni")
    made = {
        ("thinker.audio_tower.",): pseudo.make_pseudo(omni, tmp_path / "vl"),
        ("thinker.audio_tower.", "thinker.visual."): pseudo.make_text(omni, tmp_path / "text"),
    }
    expected = dict(export_tensors(build_foundation_model(omni, eager_ops()), experts=experts))
    for lacking, folder in made.items():
        model = build_foundation_model(folder, eager_ops())
        sent = dict(export_tensors(model, to="qwen3_omni_moe", experts=experts))
        assert sent.keys() == {name for name in expected if not name.startswith(lacking)}
        assert all(torch.equal(value, expected[name]) for name, value in sent.items())


def test_the_rules_are_those_of_the_conversion() -> None:
    """What the iterator makes of a thinker, the converter turns back into its parameters."""

    model = make_ours("omni")
    sent = dict(export_tensors(model))
    infos = {name: TensorInfo(tuple(value.shape), value.dtype) for name, value in sent.items()}
    own = {n: TensorInfo(tuple(p.shape), p.dtype) for n, p in model.named_parameters()}
    read = model_of(model.config.to_dict(), "config", own)
    target = replace(read, family=HUB["qwen3_omni_moe"])
    names = next(names for names in STYLES["qwen3_omni_moe"] if names.style == "native")
    rules = inverse(to_hub(names, target, "v5", "per-expert"))
    assert resolve(rules, infos, read.geometry).made.keys() == own.keys()


def test_tensors_are_the_receivers_own() -> None:
    model = make_ours("moe")
    sent = dict(export_tensors(model))
    before = {name: value.clone() for name, value in sent.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert all(torch.equal(sent[name], before[name]) for name in sent)
    places = {value.untyped_storage().data_ptr() for value in sent.values()}
    assert len(places) == len(sent) and all(value.is_contiguous() for value in sent.values())
    assert not any(value.requires_grad for value in sent.values())


def test_frozen_parts_are_left_out_by_declaration() -> None:
    model = make_ours("omni")
    with pytest.raises(ConfigError, match="'visual' would leave out what is trained"):
        plan_export(model, skip=["visual"])
    freeze(model, modules=["visual", "audio_tower"])
    everything = plan_export(model)
    assert any(name.startswith("thinker.visual.") for name in everything.names)  # frozen is not left out by itself
    plan = plan_export(model, skip=["visual", "audio_tower"])
    assert set(plan.names) == {n for n in everything.names if not n.startswith(("thinker.visual", "thinker.audio"))}
    assert all(name.startswith(("visual.", "audio_tower.")) for name in plan.skipped)
    assert [name for name, _ in export_tensors(model, skip=["visual", "audio_tower"])] == plan.names
    with pytest.raises(ConfigError, match=r"skip: 'visuals' matches no module or parameter; did you mean 'visual'\?"):
        plan_export(model, skip=["visuals"])


def test_what_has_no_name_in_the_files_fails_at_the_call() -> None:
    model = make_ours("moe")
    model.model.layers[0].self_attn.q_proj.lora_A = nn.Parameter(torch.zeros(2, 48))  # type: ignore[union-attr]
    with pytest.raises(UnsupportedError, match=r"no place in the target model: .*q_proj\.lora_A"):
        export_tensors(model)
    other = make_ours("dense")
    other.extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(UnsupportedError, match="known to no rule of this conversion: extra"):
        export_tensors(other)


@pytest.mark.parametrize(
    ("name", "how", "said"),
    [
        ("dense", {"to": "qwen3_omni_moe"}, "a qwen3 cannot be written as 'qwen3_omni_moe'"),
        ("omni", {"to": "qwen3_vl_moe"}, "cannot be written as 'qwen3_vl_moe'"),
        ("moe", {"experts": "fused"}, "'fused' is no form of experts"),
    ],
)
def test_mistakes_are_named(name: str, how: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        export_tensors(make_ours(name), **how)


# family, how it is exported
SENT: list[tuple[str, dict[str, Any]]] = [
    ("omni", {}),
    ("omni", {"experts": "v5", "ranks": "first"}),
    ("omni", {"dtype": torch.bfloat16, "skip": ["visual"]}),
    ("vl_moe", {}),
    ("vl_moe", {"to": "qwen3_omni_moe", "ranks": "first"}),
    ("moe", {"experts": "hub"}),
    ("moe", {"to": "qwen3_omni_moe"}),
]
COMBINATIONS: dict[int, list[dict[str, Any]]] = {
    2: [{}, {"ep_size": 2}, {"ulysses_size": 2, "ep_size": 2}, {"fsdp_config": {"fsdp_mode": "ddp"}}],
    4: [{"ep_size": 2}, {"dp_replicate_size": 2, "ep_size": 2}],
}
FP32 = {"mixed_precision": {"enable": False}}


def on_meta(name: str) -> FoundationModel:
    with torch.device("meta"):
        return FAMILIES[name].ours(FAMILIES[name].make_config(), eager_ops())


def sharded(name: str, keys: dict[str, Any]) -> FoundationModel:
    parts = make_parts(keys | {"fsdp_config": FP32 | keys.get("fsdp_config", {})}, _frozen(on_meta(name)))
    assert isinstance(parts.model, FoundationModel)
    fill(parts.model)
    return parts.model


def _frozen(model: FoundationModel) -> FoundationModel:
    if hasattr(model, "visual"):
        freeze(model, modules=["visual"])
    return model


def _sent(world_size: int) -> list[list[dict[str, Tensor]]]:
    found = []
    for keys in COMBINATIONS[world_size]:
        models = {name: sharded(name, keys) for name in dict.fromkeys(name for name, _ in SENT)}
        found.append([dict(export_tensors(models[name], **how)) for name, how in SENT])
    return found


@pytest.mark.parametrize("world_size", COMBINATIONS)
def test_shards_give_what_one_process_gives(world_size: int) -> None:
    by_rank: list[list[list[dict[str, Tensor]]]] = processes.run(world_size, _sent, world_size)
    for number, (name, how) in enumerate(SENT):
        model = _frozen(on_meta(name).to_empty(device="cpu"))
        randomise(model)
        expected = dict(export_tensors(model, **how))
        assert expected
        for combination, keys in enumerate(COMBINATIONS[world_size]):
            for rank in range(world_size):
                got = by_rank[rank][combination][number]
                if rank and how.get("ranks") == "first":
                    assert not got
                    continue
                assert list(got) == list(expected), f"{keys} {name} {how}"
                assert all(torch.equal(got[key], value) for key, value in expected.items()), f"{keys} {name} {how}"
                assert all(value.dtype == how.get("dtype", torch.float32) for value in got.values())


def _one_at_a_time() -> tuple[list[int], bool, bool]:
    """Parameters gathered before each tensor; whether what comes after an evaluation is the same, in float32."""
    precision = {"mixed_precision": {"enable": True, "param_dtype": "bfloat16"}}
    parts = make_parts({"fsdp_config": precision}, on_meta("vl_moe"))
    model = parts.model
    assert isinstance(model, FoundationModel) and isinstance(model, FSDPModule)
    calls, plain = [0], DTensor.full_tensor

    def counted(self: DTensor, **how: Any) -> Tensor:
        calls[0] += 1
        return plain(self, **how)

    DTensor.full_tensor = counted  # type: ignore[method-assign]
    try:
        seen, before = [], {}
        for name, tensor in export_tensors(model, experts="per-expert"):
            seen.append(calls[0])
            before[name] = tensor
    finally:
        DTensor.full_tensor = plain  # type: ignore[method-assign]
    batch = media.batch_of(media.omni_assets(), [media.image_mix()])
    with torch.no_grad():
        model(model_inputs(batch, media.omni_assets(), dummy_towers=True))
    gathered = not all(isinstance(parameter, DTensor) for parameter in model.parameters())
    after = dict(export_tensors(model, experts="per-expert"))
    same = all(torch.equal(after[name], value) and value.dtype == torch.float32 for name, value in before.items())
    return seen, gathered, same


def test_one_parameter_is_gathered_at_a_time() -> None:
    seen, gathered, same = processes.run(2, _one_at_a_time)[0]
    plan = plan_export(make_ours("vl_moe"), experts="per-expert")
    expected = [number for number, made in enumerate(plan.sources.values(), start=1) for _ in made]
    assert seen == expected
    assert gathered and same
