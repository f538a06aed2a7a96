"""compare_logits passes what is the same model and refuses what is not, or what cannot be told."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from convert.directions import omni_to_text_conversion, omni_to_vl_conversion
from convert.job import Options, run
from convert.verify_logits import compare_logits
from schemas.errors import UnsupportedError, VerificationError
from tests.convert.models import make_omni, read_weights, rewrite_weights

BASE = Path(__file__).parent / "megatron" / "tp1" / "hf_ref"


def test_a_copy_is_the_same_model(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(BASE, tmp_path / "copy"))
    report = compare_logits(copy, BASE)
    assert (report.inputs, report.difference, report.agreement) == (("text",), 0.0, 1.0)
    assert report.largest > 0.1


@pytest.mark.parametrize("what", ["two experts changed places", "one weight changed"])
def test_another_model_is_found(tmp_path: Path, what: str) -> None:
    copy = Path(shutil.copytree(BASE, tmp_path / "copy"))
    weights = read_weights(copy)
    at = "model.layers.0.mlp.experts."
    if what.startswith("two"):
        for name in ("gate_proj", "up_proj", "down_proj"):
            first, second = f"{at}0.{name}.weight", f"{at}1.{name}.weight"
            weights[first], weights[second] = weights[second], weights[first]
    else:
        weights["model.norm.weight"][3] += 1e-3
    rewrite_weights(copy, weights)
    with pytest.raises(VerificationError, match="differ by"):
        compare_logits(copy, BASE)


def test_a_tensor_that_transformers_would_make_up(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(BASE, tmp_path / "copy"))
    weights = read_weights(copy)
    del weights["model.layers.3.self_attn.q_norm.weight"]
    rewrite_weights(copy, weights)
    with pytest.raises(VerificationError, match=r"missing=\['model.layers.3.self_attn.q_norm.weight'\]"):
        compare_logits(copy, BASE)


def test_a_thinker_and_what_is_made_of_it(omni: Path, tmp_path: Path) -> None:
    """Text and an image through the whole Omni's thinker and its pseudo Qwen3-VL; text through its text model."""
    run(omni_to_vl_conversion(omni), tmp_path / "vl", Options(), lambda n: None)
    run(omni_to_text_conversion(omni), tmp_path / "text", Options(), lambda n: None)
    report = compare_logits(tmp_path / "vl", omni)
    assert report.inputs == ("text", "image") and report.difference <= 1e-6 * max(1, report.largest)
    assert compare_logits(tmp_path / "text", omni).inputs == ("text",)
    weights = read_weights(tmp_path / "vl")
    weights["model.visual.merger.linear_fc2.weight"] *= 1.01
    rewrite_weights(tmp_path / "vl", weights)
    with pytest.raises(VerificationError, match="differ by"):
        compare_logits(tmp_path / "vl", omni)


@pytest.mark.parametrize(("sizes", "name"), [({"moe": 16}, "gate_up_proj"), ({"moe": 32}, "down_proj")])
def test_square_experts_prove_nothing(tmp_path: Path, sizes: dict[str, int], name: str) -> None:
    omni = make_omni(tmp_path / "omni", layers=1, **sizes)
    run(omni_to_vl_conversion(omni), tmp_path / "vl", Options(), lambda n: None)
    with pytest.raises(UnsupportedError, match=f"{name} is square"):
        compare_logits(tmp_path / "vl", omni)


def test_a_model_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convert.verify_logits.available_memory", lambda: 1000)
    with pytest.raises(UnsupportedError, match="larger machine"):
        compare_logits(BASE, BASE)


def test_the_input_is_seeded() -> None:
    first, second = compare_logits(BASE, BASE, seed=1), compare_logits(BASE, BASE, seed=1)
    assert first == second != compare_logits(BASE, BASE, seed=2)
