"""Qwen3-Omni <-> pseudo Qwen3-VL-MoE and text: bytes back again, and the thinker's own logits in transformers."""

from __future__ import annotations

import filecmp
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import (
    Qwen3MoeForCausalLM,
    Qwen3OmniMoeForConditionalGeneration,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
)

from convert.directions import (
    omni_to_text_conversion,
    omni_to_vl_conversion,
    relayout_conversion,
    vl_to_omni_conversion,
)
from convert.job import Conversion, Options, run
from convert.verify import verify_conversion
from schemas.errors import IncompleteSourceError, UnsupportedError
from tests.convert.models import IDS, edit_config, make_omni, read_weights, rewrite_weights


def convert(conversion: Conversion, output: Path, **options: int) -> Path:
    run(conversion, output, Options(workers=2, **options), lambda count: None, verify_conversion)
    return output


@pytest.fixture(scope="module")
def vl(omni: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(omni_to_vl_conversion(omni), tmp_path_factory.mktemp("vl") / "vl")


def text_input() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 300, (1, 23), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def image_input() -> dict[str, torch.Tensor]:
    """A picture of 6 x 4 patches between two stretches of text."""
    generator = torch.Generator().manual_seed(4)
    before, after = (torch.randint(0, 300, (1, n), generator=generator) for n in (5, 7))
    picture = torch.tensor([[IDS["vision_start_token_id"], *[IDS["image_token_id"]] * 6, IDS["vision_end_token_id"]]])
    ids = torch.cat([before, picture, after], 1)
    pixels = torch.randn(24, 3 * 2 * 4 * 4, generator=generator)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 6, 4]]),
    }


@torch.no_grad()
def test_vl_output_gives_the_thinkers_logits(omni: Path, vl: Path) -> None:
    whole = Qwen3OmniMoeForConditionalGeneration.from_pretrained(omni)
    thinker = whole.thinker
    model, info = Qwen3VLMoeForConditionalGeneration.from_pretrained(vl, output_loading_info=True)
    assert not any(info.values()), info
    torch.testing.assert_close(model(**text_input()).logits, thinker(**text_input()).logits, rtol=0, atol=1e-6)
    image = image_input()
    kinds = {"mm_token_type_ids": (image["input_ids"] == IDS["image_token_id"]).int()}
    ours = model(**image, **kinds).logits
    torch.testing.assert_close(ours, thinker(**image).logits, rtol=0, atol=1e-6)
    blank = {**image, "pixel_values": torch.zeros_like(image["pixel_values"])}
    assert (model(**blank, **kinds).logits - ours).abs().max() > 1e-3  # the picture does reach the logits


@torch.no_grad()
def test_text_output_gives_the_thinkers_logits(omni: Path, tmp_path: Path) -> None:
    output = convert(omni_to_text_conversion(omni), tmp_path / "text")
    model, info = Qwen3MoeForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not any(info.values()), info
    thinker = Qwen3OmniMoeForConditionalGeneration.from_pretrained(omni).thinker
    expected = thinker(**text_input()).logits
    torch.testing.assert_close(model(**text_input()).logits, expected, rtol=0, atol=1e-6)


def test_back_again_is_the_same_file(omni: Path, vl: Path, tmp_path: Path) -> None:
    output = convert(vl_to_omni_conversion(vl, omni), tmp_path / "back")
    assert filecmp.cmp(output / "model.safetensors", omni / "model.safetensors", shallow=False)
    assert filecmp.cmp(output / "config.json", omni / "config.json", shallow=False)
    report = json.loads((output / "omniloom_conversion.json").read_text())
    copied = {name for names in report["tensors_from_base"].values() for name in names}
    kept = ("thinker.audio_tower.", "talker.", "code2wav.")
    assert copied == {name for name in read_weights(omni) if name.startswith(kept)}


def test_trained_tensors_come_from_the_vl_side_and_the_rest_from_the_base(omni: Path, vl: Path, tmp_path: Path) -> None:
    """Another Omni as the base: what is not the base's must be the VL model's, tensor by tensor."""
    base = make_omni(tmp_path / "base", seed=1, dtype=torch.bfloat16, shards=3)
    output = convert(vl_to_omni_conversion(vl, base), tmp_path / "out")
    trained, kept, made = read_weights(omni), read_weights(base), read_weights(output)
    assert made.keys() == kept.keys()
    for name, tensor in made.items():
        from_base = name.startswith(("thinker.audio_tower.", "talker.", "code2wav."))
        expected = kept[name] if from_base else trained[name].to(torch.bfloat16)
        assert torch.equal(tensor, expected), name
    index = json.loads((output / "model.safetensors.index.json").read_text())
    original = json.loads((base / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == original["weight_map"]
    assert index["metadata"]["total_size"] == original["metadata"]["total_size"]


@pytest.mark.parametrize(("hidden", "moe"), [(32, 16), (24, 24)], ids=["2I == H", "I == H"])
@pytest.mark.parametrize("layout", ["hub", "v5"])
def test_square_sizes_come_back_byte_for_byte(hidden: int, moe: int, layout: str, tmp_path: Path) -> None:
    source = make_omni(tmp_path / "omni", hidden=hidden, moe=moe, experts=4, layers=2)
    vl = convert(omni_to_vl_conversion(source, experts=layout), tmp_path / "vl")
    experts, weights = read_weights(vl), read_weights(source)
    gate, up, down = (
        weights[f"thinker.model.layers.1.mlp.experts.3.{part}_proj.weight"] for part in ("gate", "up", "down")
    )
    fused, lowered = torch.cat([gate, up]), down
    if layout == "hub":
        fused, lowered = fused.T, lowered.T
    prefix = "model.language_model.layers.1.mlp.experts."
    assert torch.equal(experts[f"{prefix}gate_up_proj"][3], fused)
    assert torch.equal(experts[f"{prefix}down_proj"][3], lowered)
    output = convert(vl_to_omni_conversion(vl, source), tmp_path / "back")
    assert filecmp.cmp(output / "model.safetensors", source / "model.safetensors", shallow=False)


def test_experts_in_the_layout_of_the_hub(omni: Path, vl: Path) -> None:
    weights = read_weights(omni)
    with safe_open(vl / "model.safetensors", "pt") as file:
        gate_up = file.get_tensor("model.language_model.layers.2.mlp.experts.gate_up_proj")
        down = file.get_tensor("model.language_model.layers.2.mlp.experts.down_proj")
        head = file.get_tensor("lm_head.weight")
        block = file.get_tensor("model.visual.blocks.1.mlp.linear_fc1.weight")
        merger = file.get_tensor("model.visual.deepstack_merger_list.1.linear_fc2.bias")
    assert gate_up.shape == (8, 32, 48)
    assert down.shape == (8, 24, 32)
    experts = "thinker.model.layers.2.mlp.experts."
    for expert in range(8):
        assert torch.equal(gate_up[expert, :, :24], weights[f"{experts}{expert}.gate_proj.weight"].T)
        assert torch.equal(gate_up[expert, :, 24:], weights[f"{experts}{expert}.up_proj.weight"].T)
        assert torch.equal(down[expert], weights[f"{experts}{expert}.down_proj.weight"].T)
    assert torch.equal(head, weights["thinker.lm_head.weight"])
    assert torch.equal(block, weights["thinker.visual.blocks.1.mlp.linear_fc1.weight"])
    assert torch.equal(merger, weights["thinker.visual.merger_list.1.mlp.2.bias"])


def test_what_transformers_saved_again_is_read_right(omni: Path, vl: Path, tmp_path: Path) -> None:
    """transformers 5 saves the experts transposed, under the same names."""
    Qwen3VLMoeForConditionalGeneration.from_pretrained(vl).save_pretrained(tmp_path / "resaved")
    fused = read_weights(tmp_path / "resaved")["model.language_model.layers.0.mlp.experts.gate_up_proj"]
    assert fused.shape == (8, 48, 32)
    output = convert(vl_to_omni_conversion(tmp_path / "resaved", omni), tmp_path / "back")
    assert filecmp.cmp(output / "model.safetensors", omni / "model.safetensors", shallow=False)


def test_layouts_of_one_model_into_each_other(vl: Path, tmp_path: Path) -> None:
    v5 = convert(relayout_conversion(vl, "v5"), tmp_path / "v5")
    separate = convert(relayout_conversion(v5, "per-expert"), tmp_path / "separate")
    again = convert(relayout_conversion(separate, "hub"), tmp_path / "again")
    assert filecmp.cmp(again / "model.safetensors", vl / "model.safetensors", shallow=False)
    fused = read_weights(vl)["model.language_model.layers.0.mlp.experts.down_proj"]
    assert torch.equal(read_weights(v5)["model.language_model.layers.0.mlp.experts.down_proj"], fused.mT)


@torch.no_grad()
def test_thinker_saved_alone(omni: Path, tmp_path: Path) -> None:
    """No `thinker.` before its names; its output is that of the whole model, and transformers misses nothing."""
    alone = tmp_path / "thinker"
    thinker = Qwen3OmniMoeForConditionalGeneration.from_pretrained(omni).thinker
    thinker.save_pretrained(alone)
    whole = convert(omni_to_vl_conversion(omni), tmp_path / "whole")
    vl = convert(omni_to_vl_conversion(alone), tmp_path / "vl")
    assert filecmp.cmp(vl / "model.safetensors", whole / "model.safetensors", shallow=False)
    back = convert(vl_to_omni_conversion(vl, alone), tmp_path / "back")
    model, info = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(back, output_loading_info=True)
    assert not any(info.values()), info
    torch.testing.assert_close(model(**text_input()).logits, thinker(**text_input()).logits, rtol=0, atol=1e-6)


def test_dtype_is_kept_or_as_asked(tmp_path: Path) -> None:
    source = make_omni(tmp_path / "omni", dtype=torch.bfloat16, layers=1)
    kept = convert(omni_to_vl_conversion(source), tmp_path / "kept")
    wide = convert(omni_to_vl_conversion(source, torch.float32), tmp_path / "wide")
    assert {tensor.dtype for tensor in read_weights(kept).values()} == {torch.bfloat16}
    assert json.loads((kept / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in read_weights(wide).values()} == {torch.float32}
    assert json.loads((wide / "config.json").read_text())["dtype"] == "float32"
    report = json.loads((wide / "omniloom_conversion.json").read_text())
    assert report["casts"] == {"bfloat16 -> float32": len(read_weights(wide))}


@pytest.fixture
def damaged(omni: Path, tmp_path: Path) -> Path:
    shutil.copytree(omni, tmp_path / "damaged")
    return tmp_path / "damaged"


def test_missing_expert_is_named(damaged: Path, tmp_path: Path) -> None:
    tensors = read_weights(damaged)
    del tensors["thinker.model.layers.1.mlp.experts.5.up_proj.weight"]
    rewrite_weights(damaged, tensors)
    with pytest.raises(IncompleteSourceError, match=r"layers\.1\.mlp\.experts\.5\.up_proj\.weight"):
        omni_to_vl_conversion(damaged)


def test_missing_norm_is_named(damaged: Path, tmp_path: Path) -> None:
    tensors = read_weights(damaged)
    del tensors["thinker.model.layers.1.self_attn.q_norm.weight"]
    rewrite_weights(damaged, tensors)
    with pytest.raises(IncompleteSourceError, match=r"layers\.1\.self_attn\.q_norm\.weight"):
        omni_to_vl_conversion(damaged)


def test_unknown_tensor_is_named(damaged: Path) -> None:
    tensors = read_weights(damaged)
    tensors["thinker.visual.merger.mlp.7.weight"] = torch.zeros(2)
    rewrite_weights(damaged, tensors)
    with pytest.raises(UnsupportedError, match=r"thinker\.visual\.merger\.mlp\.7\.weight"):
        omni_to_vl_conversion(damaged)


def test_more_experts_than_the_configuration_says(damaged: Path) -> None:
    edit_config(damaged, "thinker_config", "text_config", num_experts=6)
    with pytest.raises(UnsupportedError, match=r"6 of \{expert\}.*experts\.[67]"):
        omni_to_vl_conversion(damaged)


def test_shape_that_the_configuration_contradicts(damaged: Path) -> None:
    edit_config(damaged, "thinker_config", "text_config", num_key_value_heads=4)
    with pytest.raises(UnsupportedError, match=r"k_proj\.weight would be \[20, 32\], config\.json says \[40, 32\]"):
        omni_to_vl_conversion(damaged)


def test_nan_leaves_no_output(damaged: Path, tmp_path: Path) -> None:
    tensors = read_weights(damaged)
    tensors["thinker.model.layers.1.mlp.experts.5.up_proj.weight"][3, 4] = float("nan")
    rewrite_weights(damaged, tensors)
    with pytest.raises(Exception, match=r"NaN.*gate_up_proj") as caught:
        convert(omni_to_vl_conversion(damaged), tmp_path / "out")
    assert getattr(caught.value, "exit_code", None) == 4
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_base_of_another_meaning_is_refused(omni: Path, vl: Path, tmp_path: Path) -> None:
    shutil.copytree(omni, tmp_path / "base")
    edit_config(tmp_path / "base", "thinker_config", "text_config", num_experts_per_tok=3)
    with pytest.raises(UnsupportedError, match=r"num_experts_per_tok is 2 .* and 3 "):
        vl_to_omni_conversion(vl, tmp_path / "base")


def test_source_of_another_family_is_refused(vl: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'qwen3_vl_moe'.*takes qwen3_omni_moe"):
        omni_to_vl_conversion(vl)
