"""Adapters to PEFT and back: it loads ours and gives our logits, we load what it trained and give its logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from torch import Tensor, nn

from convert.adapter_config import CONFIG_FILE
from convert.job import Options, run
from convert.lora import merge_lora_conversion
from convert.verify import verify_conversion
from schemas.errors import ConfigError, IncompleteSourceError, UnsupportedError
from tests.train.lora.adapted import DENSE, EXPERTS, adapted, add, base_of, fill, lora_config, meta_model
from tests.train.lora.test_layers import CASES
from tests.train.models import families, media
from tests.train.models.checkpoints import save_model
from train.lora.apply import adapter_names
from train.lora.settings import BLOCK
from train.lora.write import AdapterWriter, trained_tensors, write_adapter
from train.models.foundation import FoundationModel
from train.models.inputs import ModelInputs, text_inputs
from train.models.spec import build_foundation_model
from train.ops.registry import eager_ops
from train.parallel.loading import fill_adapters

SAVED: dict[str, tuple[str, dict[str, Any]]] = {
    "head trained whole": ("moe", {"lora_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "router trained whole": ("moe", {"lora_modules": EXPERTS, "modules_to_save": ["mlp.gate"]}),
    "text of an omni": (
        "omni",
        {"lora_modules": r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.experts\.(gate|up|down)_proj)"},
    ),
    "vl": ("vl_moe", {"lora_modules": ["linear_fc1", "qkv", "down_proj", "o_proj"], "share_expert_lora": True}),
}


def inputs_of(name: str) -> tuple[ModelInputs, dict[str, Tensor]]:
    if name == "omni":
        case = media.case_of(media.omni_assets(), [media.everything_mix()])
        return case.inputs, case.media
    return text_inputs([torch.randint(0, 200, (30,), generator=torch.Generator().manual_seed(1))]), {}


def reference_of(name: str) -> nn.Module:
    return families.make_pair(name).reference


@torch.no_grad()
def logits_of(reference: nn.Module, inputs: ModelInputs, more: dict[str, Tensor]) -> Tensor:
    rows = inputs.num_valid
    positions = torch.arange(rows)[None]
    if more:
        positions = torch.cat([positions, inputs.position_ids[:, :rows]])[:, None]
    found: Tensor = reference(input_ids=inputs.ids[None, :rows], position_ids=positions, use_cache=False, **more).logits
    return found[0]


@torch.no_grad()
def ours(model: FoundationModel, inputs: ModelInputs) -> Tensor:
    found: Tensor = model.eval()(inputs, logits=True).logits
    return found[: inputs.num_valid]


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def write(model: FoundationModel, folder: Path) -> dict[str, Tensor]:
    writer, trained = AdapterWriter(model, "base"), trained_tensors(model)
    write_adapter(folder, writer.tensors(trained), writer.settings())
    return trained


def from_adapter(name: str, folder: Path) -> FoundationModel:
    model = meta_model(name)
    plan = add(model, lora_config_of(folder))
    model.to_empty(device="cpu")
    fill(model, base_of(name))
    for name in adapter_names(model):
        model.get_parameter(name).data.fill_(float("nan"))
    fill_adapters(model, plan, seed=0)
    return model


def lora_config_of(folder: Path) -> Any:
    config = lora_config(lora_modules=["x"])
    return type(config)(lora_adapter=str(folder))


@pytest.mark.parametrize("case", [*CASES, *SAVED])
def test_peft_loads_ours_and_so_do_we(case: str, tmp_path: Path) -> None:
    name, keys = (CASES | SAVED)[case]
    model, _ = adapted(name, **keys)
    with torch.no_grad():
        for path in model_saved(model):
            model.get_parameter(path).mul_(1.3)
    trained = write(model, tmp_path / "lora")
    inputs, more = inputs_of(name)
    expected = ours(model, inputs)
    theirs = PeftModel.from_pretrained(reference_of(name), tmp_path / "lora")
    assert distance(logits_of(theirs, inputs, more), expected) < 1e-5
    with theirs.disable_adapter():
        assert distance(logits_of(theirs, inputs, more), expected) > 1e-2
    again = from_adapter(name, tmp_path / "lora")
    back = trained_tensors(again)
    assert back.keys() == trained.keys()
    exact = case != "ranks and scales of their own"  # a scale that went into B comes back within a rounding
    for path, value in trained.items():
        assert torch.allclose(back[path], value, rtol=0.0 if exact else 1e-6, atol=0.0), path


def model_saved(model: FoundationModel) -> list[str]:
    adapters = set(adapter_names(model))
    return [name for name, p in model.named_parameters() if p.requires_grad and name not in adapters]


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("name", ["dense", "moe", "omni"])
def test_we_load_what_peft_trained(name: str, rslora: bool, tmp_path: Path) -> None:
    inputs, more = inputs_of(name)
    config = PeftConfig(
        r=3,
        lora_alpha=7,
        use_rslora=rslora,
        target_modules=["q_proj", "v_proj", "lm_head"],
        target_parameters=None if name == "dense" else ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={"layers.1.self_attn.q_proj": 2},
        alpha_pattern={"v_proj": 5},
        modules_to_save=["o_proj"],
    )
    torch.manual_seed(5)
    model = get_peft_model(reference_of(name), config)
    train_peft(model, inputs, more)
    model.save_pretrained(tmp_path / "lora")
    expected = logits_of(model.eval(), inputs, more)
    assert distance(ours(base_of(name), inputs), expected) > 1e-3
    found = from_adapter(name, tmp_path / "lora")
    assert distance(ours(found, inputs), expected) < 1e-5
    write(found, tmp_path / "again")
    theirs = PeftModel.from_pretrained(reference_of(name), tmp_path / "again")
    assert distance(logits_of(theirs, inputs, more), expected) < 1e-5


def test_an_adapter_that_brings_another_base_along(tmp_path: Path) -> None:
    """PEFT saves the weight of an adapted head, which must be the one of our base."""
    torch.manual_seed(5)
    model = get_peft_model(reference_of("dense"), PeftConfig(r=2, target_modules=["lm_head"]))
    model.save_pretrained(tmp_path / "same", save_embedding_layers=True)
    found = from_adapter("dense", tmp_path / "same")
    assert [name for name, p in found.named_parameters() if p.requires_grad] == adapter_names(found)
    with torch.no_grad():
        model.base_model.model.lm_head.base_layer.weight.mul_(1.1)
    model.save_pretrained(tmp_path / "other", save_embedding_layers=True)
    with pytest.raises(UnsupportedError, match=r"holds another lm_head\.weight than the base"):
        from_adapter("dense", tmp_path / "other")


def train_peft(model: nn.Module, inputs: ModelInputs, more: dict[str, Tensor], steps: int = 3) -> None:
    """Until B is not zero any more."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    rows = inputs.num_valid
    positions = torch.arange(rows)[None]
    if more:
        positions = torch.cat([positions, inputs.position_ids[:, :rows]])[:, None]
    for _ in range(steps):
        found = model(input_ids=inputs.ids[None, :rows], position_ids=positions, use_cache=False, **more)
        nn.functional.cross_entropy(found.logits[0, :-1], inputs.ids[1:rows].clamp(max=200)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("case", ["dense", "head", "independent", "shared", "rslora", "text of an omni", "vl"])
@pytest.mark.parametrize("per_expert", [False, True])
def test_what_is_merged_gives_our_logits(case: str, per_expert: bool, tmp_path: Path) -> None:
    name, keys = (CASES | SAVED)[case]
    if per_expert and name in ("dense", "vl_moe"):
        pytest.skip("no experts, or a hub layout that has them fused")
    base = tmp_path / "base"
    save_model(name, base, "per-expert" if name != "vl_moe" else "v5")
    model, _ = adapted(name, **keys)
    writer, trained = AdapterWriter(model), trained_tensors(model)
    if per_expert:
        write_adapter(tmp_path / "lora", *writer.per_expert(trained))
    else:
        write_adapter(tmp_path / "lora", writer.tensors(trained), writer.settings())
    conversion = merge_lora_conversion(tmp_path / "lora", base)
    run(conversion, tmp_path / "merged", Options(workers=2), lambda count: None, verify_conversion)
    inputs, _ = inputs_of(name)
    merged = build_foundation_model(tmp_path / "merged", eager_ops())
    assert distance(ours(merged, inputs), ours(model, inputs)) < 1e-5
    assert distance(ours(base_of(name), inputs), ours(model, inputs)) > 1e-2


def test_settings_are_short_where_ends_of_names_say_enough(tmp_path: Path) -> None:
    model, _ = adapted("moe", lora_modules=[*DENSE, *EXPERTS], rank=4, alpha=8.0)
    write(model, tmp_path / "lora")
    settings = json.loads((tmp_path / "lora" / CONFIG_FILE).read_text())
    assert settings["target_modules"] == sorted(f"self_attn.{name}" for name in DENSE)
    assert settings["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert (settings["r"], settings["lora_alpha"]) == (4, 8.0)
    fused = r"mlp\.experts\.gate_up_proj"
    assert settings["rank_pattern"][fused] == 8 and settings["alpha_pattern"][fused] == 16.0
    assert settings["rank_pattern"][r"self_attn\.q_proj"] == 4


def test_an_adapter_of_another_model_or_a_damaged_one(tmp_path: Path) -> None:
    model, _ = adapted("moe", lora_modules=EXPERTS)
    write(model, tmp_path / "lora")
    with pytest.raises(ConfigError, match="are not in the model: model"):
        from_adapter("dense", tmp_path / "lora")
    file = tmp_path / "lora" / CONFIG_FILE
    settings = json.loads(file.read_text())

    def changed(**keys: Any) -> None:
        file.write_text(json.dumps({**settings, BLOCK: {**settings[BLOCK], **keys}}))

    changed(schema_version=9)
    with pytest.raises(UnsupportedError, match="reads schema_version 1"):
        from_adapter("moe", tmp_path / "lora")
    changed(experts={"model.layers.0.mlp.experts": {"gate_proj": {"rank": 0, "alpha": 1}}})
    with pytest.raises(IncompleteSourceError, match="is damaged"):
        from_adapter("moe", tmp_path / "lora")
    experts = json.loads(json.dumps(settings[BLOCK]["experts"]))
    experts["model.layers.0.mlp.experts"]["gate_proj"]["rank"] = 2
    changed(experts=experts)
    with pytest.raises(IncompleteSourceError, match="says rank 5 for model"):
        from_adapter("moe", tmp_path / "lora")
