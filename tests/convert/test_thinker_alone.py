"""A thinker that transformers took out of a whole Qwen3-Omni and saved: `thinker.` before its names, or not."""

from __future__ import annotations

import filecmp
from pathlib import Path

import pytest
import torch
from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

from convert.checks_cli import run_verification
from convert.directions import (
    omni_to_text_conversion,
    omni_to_vl_conversion,
    relayout_conversion,
    vl_to_omni_conversion,
)
from convert.inspection import inspect_source
from convert.job import Conversion, Options, run
from convert.megatron_to_hf import megatron_to_hf_conversion
from convert.trainer import dcp_to_hf_conversion, hf_to_dcp_conversion
from convert.verify import verify, verify_conversion
from schemas.errors import ConfigError, IncompleteSourceError
from tests.convert.dcp_factory import save_megatron
from tests.convert.megatron_factory import hub_tower, language_model
from tests.convert.models import read_weights, rewrite_weights, write_small_files


def convert(conversion: Conversion, output: Path) -> Path:
    run(conversion, output, Options(workers=2), lambda count: None, verify_conversion)
    return output


@pytest.fixture(scope="module", params=["thinker.", ""])
def thinker(omni: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Saved by transformers itself from the whole model, and the same under the other names."""
    folder = tmp_path_factory.mktemp("thinker") / "model"
    Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(omni).save_pretrained(folder)
    write_small_files(folder)
    weights = {name.removeprefix("thinker."): tensor for name, tensor in read_weights(folder).items()}
    rewrite_weights(folder, {request.param + name: tensor for name, tensor in weights.items()})
    return folder


def thinker_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for name, t in read_weights(folder).items() if not name.startswith(("talker.", "code2wav."))}


def test_what_transformers_writes(omni: Path, tmp_path: Path) -> None:
    Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(omni).save_pretrained(tmp_path / "thinker")
    assert {name.split(".")[0] for name in read_weights(tmp_path / "thinker")} == {"thinker"}


def test_there_and_back(thinker: Path, tmp_path: Path) -> None:
    for name, conversion in (
        ("vl", omni_to_vl_conversion(thinker)),
        ("v5", omni_to_vl_conversion(thinker, None, "v5")),
    ):
        vl = convert(conversion, tmp_path / name)
        back = convert(vl_to_omni_conversion(vl, thinker), tmp_path / f"{name} back")
        assert filecmp.cmp(back / "model.safetensors", thinker / "model.safetensors", shallow=False)


def test_same_files_as_from_the_whole_model(omni: Path, thinker: Path, tmp_path: Path) -> None:
    for build in (omni_to_vl_conversion, omni_to_text_conversion):
        whole = convert(build(omni), tmp_path / f"{build.__name__} whole")
        alone = convert(build(thinker), tmp_path / f"{build.__name__} alone")
        assert filecmp.cmp(whole / "model.safetensors", alone / "model.safetensors", shallow=False)


@pytest.mark.parametrize("style", ["native", "transformers"])
def test_training_checkpoints(thinker: Path, tmp_path: Path, style: str) -> None:
    checkpoint = convert(hf_to_dcp_conversion(thinker, style), tmp_path / "dcp")
    back = convert(dcp_to_hf_conversion(checkpoint, thinker), tmp_path / "back")
    assert filecmp.cmp(back / "model.safetensors", thinker / "model.safetensors", shallow=False)


def test_other_layouts_and_verify(omni: Path, thinker: Path, tmp_path: Path) -> None:
    fused = convert(relayout_conversion(thinker, "v5"), tmp_path / "v5")
    assert not verify(fused, thinker).faults
    assert inspect_source(thinker).refused is None
    result = run_verification(thinker, omni, logits=True, workers=2)
    assert not result.faults and result.logits is not None and result.logits["max_difference"] == 0


def test_both_names_are_compared_with_each_other(omni: Path, thinker: Path, tmp_path: Path) -> None:
    other = convert(relayout_conversion(thinker, "per-expert"), tmp_path / "other")
    weights = thinker_weights(thinker)
    bare = {name.removeprefix("thinker."): tensor for name, tensor in weights.items()}
    has_prefix = next(iter(weights)).startswith("thinker.")
    rewrite_weights(other, bare if has_prefix else {f"thinker.{name}": tensor for name, tensor in bare.items()})
    result = verify(other, thinker)
    assert not result.faults and result.counts()["compared"] == result.counts()["unchanged"] == len(weights)


def test_whole_model_whose_names_lack_the_prefix(omni: Path, tmp_path: Path) -> None:
    """Only the thinker was saved, beside the configuration of the whole."""
    source = convert(relayout_conversion(omni, "per-expert"), tmp_path / "source")
    rewrite_weights(source, {name.removeprefix("thinker."): t for name, t in thinker_weights(omni).items()})
    alone = convert(omni_to_vl_conversion(source), tmp_path / "alone")
    whole = convert(omni_to_vl_conversion(omni), tmp_path / "whole")
    assert filecmp.cmp(whole / "model.safetensors", alone / "model.safetensors", shallow=False)


def test_megatron_into_a_thinker(omni: Path, thinker: Path, tmp_path: Path) -> None:
    weights = {name: tensor + 1 for name, tensor in thinker_weights(omni).items()}
    tensors = language_model(weights, "thinker.model.", "thinker.", 2, prefix="thinker.language_model.")
    tensors |= hub_tower(weights, "thinker.visual.", "thinker.visual.")
    checkpoint = save_megatron(tmp_path / "megatron", tensors)
    made = read_weights(convert(megatron_to_hf_conversion(checkpoint, thinker), tmp_path / "out"))
    for name, tensor in made.items():
        whole = "thinker." + name.removeprefix("thinker.")
        wanted = read_weights(thinker)[name] if "audio_tower." in name else weights[whole]
        assert torch.equal(tensor, wanted), name


def test_a_trained_thinker_needs_no_weights_of_a_base(omni: Path, tmp_path: Path) -> None:
    """A run that began with random weights has only its config.json; a tower that is missing is still an error."""
    thinker = tmp_path / "model"
    Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(omni).save_pretrained(thinker)
    rewrite_weights(thinker, {n.removeprefix("thinker."): tensor for n, tensor in read_weights(thinker).items()})
    trained = convert(hf_to_dcp_conversion(thinker), tmp_path / "trained")
    back = convert(dcp_to_hf_conversion(trained, None), tmp_path / "back")
    weights = read_weights(thinker)
    found = read_weights(back)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    rewrite_weights(thinker, {name: tensor for name, tensor in weights.items() if not name.startswith("visual.")})
    with pytest.raises(IncompleteSourceError, match=r"visual\."):
        convert(hf_to_dcp_conversion(thinker), tmp_path / "without")
    (thinker / "model.safetensors").unlink()
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "config.json").write_bytes((omni / "config.json").read_bytes())
    with pytest.raises(ConfigError, match="has no weights"):
        dcp_to_hf_conversion(trained, whole)
