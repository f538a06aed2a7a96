"""megatron-to-hf on genuine checkpoints: bit for bit, as transformers loads them, with Megatron's own logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from convert.job import Options, run
from convert.megatron_to_hf import megatron_to_hf_conversion
from convert.verify import verify_conversion
from convert.verify_logits import compare_logits
from tests.convert.models import read_weights

MEGATRON = Path(__file__).parent / "megatron"
WITH_REFERENCE = ("tp1", "tp2", "opt", "local")
# saved by megatron-core itself, with the logits that its GPTModel gave for the tensors in them
WITH_LOGITS = ("per_layer", "singleton", "mixed", "dense_tied", "dense_singleton", "ep2_pp2")


def convert(source: Path, base: Path, output: Path, **options: bool) -> Path:
    run(
        megatron_to_hf_conversion(source, base, **options),
        output,
        Options(workers=2),
        lambda n: None,
        verify_conversion,
    )
    return output


def load(folder: Path) -> torch.nn.Module:
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert (info["missing_keys"], info["unexpected_keys"]) == (set(), set())
    return model


@pytest.mark.parametrize(("name", "from_master"), [*((name, False) for name in WITH_REFERENCE), ("opt", True)])
def test_handed_checkpoints_equal_their_reference(tmp_path: Path, name: str, from_master: bool) -> None:
    folder = MEGATRON / name
    output = convert(folder, folder / "hf_ref", tmp_path / "out", from_master=from_master)
    found, wanted = read_weights(output), read_weights(folder / "hf_ref")
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[key].view(torch.uint8), tensor.view(torch.uint8)), key
    assert compare_logits(output, folder / "hf_ref").difference == 0
    assert (output / "config.json").read_bytes() == (folder / "hf_ref" / "config.json").read_bytes()


@pytest.mark.parametrize("name", WITH_REFERENCE)
def test_a_base_without_weights_gives_the_same(tmp_path: Path, name: str) -> None:
    folder, base = MEGATRON / name, tmp_path / "base"
    base.mkdir()
    shutil.copy(folder / "hf_ref" / "config.json", base)
    found, wanted = read_weights(convert(folder, base, tmp_path / "out")), read_weights(folder / "hf_ref")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


@pytest.mark.parametrize("name", WITH_LOGITS)
def test_logits_are_those_that_megatron_gave(tmp_path: Path, name: str) -> None:
    folder = MEGATRON / name
    model = load(convert(folder, folder / "base", tmp_path / "out"))
    reference = load_file(folder / "logits.safetensors")
    vocabulary = model.config.vocab_size
    with torch.no_grad():
        logits = model(reference["ids"]).logits
    wanted = reference["logits"][..., :vocabulary]
    assert logits.shape == wanted.shape
    # two implementations in float32; the largest logit is about 3.5
    assert float((logits - wanted).abs().max()) < 4e-6
    assert torch.equal(logits.argmax(-1), wanted.argmax(-1))


def test_the_dtype_of_the_base_or_of_the_user(tmp_path: Path) -> None:
    folder, base = MEGATRON / "tp2", tmp_path / "base"
    shutil.copytree(folder / "hf_ref", base)
    wanted = read_weights(base)
    mixed = {key: tensor if "norm" in key else tensor.bfloat16() for key, tensor in wanted.items()}
    save_file(mixed, base / "model.safetensors", {"format": "pt"})
    found = read_weights(convert(folder, base, tmp_path / "as_base"))
    assert {key: tensor.dtype for key, tensor in found.items()} == {key: tensor.dtype for key, tensor in mixed.items()}
    assert all(torch.equal(found[key], tensor) for key, tensor in mixed.items())
    conversion = megatron_to_hf_conversion(folder, base, torch.float16)
    run(conversion, tmp_path / "asked", Options(), lambda n: None, verify_conversion)
    asked = read_weights(tmp_path / "asked")
    assert all(torch.equal(asked[key], tensor.half()) for key, tensor in wanted.items())
    report = json.loads((tmp_path / "asked" / "omniloom_conversion.json").read_text())
    assert report["casts"] == {"float32 -> float16": 135}


def test_the_source_may_be_the_iteration_or_its_parent(tmp_path: Path) -> None:
    folder = MEGATRON / "tp1"
    ours = megatron_to_hf_conversion(folder, folder / "hf_ref")
    theirs = megatron_to_hf_conversion(folder / "iter_0000001", folder / "hf_ref")
    assert ours.reader.fingerprint == theirs.reader.fingerprint
    assert ours.recipes == theirs.recipes
