"""Models whose head is their embedding: stored once, or twice, in the files of the base, of the source, or of both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from convert.directions import (
    omni_to_text_conversion,
    omni_to_vl_conversion,
    relayout_conversion,
    vl_to_omni_conversion,
)
from convert.job import Conversion, Options, run
from convert.megatron_to_hf import megatron_to_hf_conversion
from convert.trainer import dcp_to_hf_conversion, hf_to_dcp_conversion
from convert.verify import verify, verify_conversion
from schemas.errors import UnsupportedError
from tests.convert.dcp_factory import save, save_megatron
from tests.convert.megatron_factory import language_model
from tests.convert.models import edit_config, make_omni, make_text, read_weights, rewrite_weights

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def convert(conversion: Conversion, output: Path) -> Path:
    run(conversion, output, Options(workers=2), lambda count: None, verify_conversion)
    return output


@pytest.fixture(scope="module", params=["once", "twice"])
def tied(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A tied text model; "twice": its files hold the head as well."""
    folder = make_text(tmp_path_factory.mktemp("tied") / "hf", tied=True)
    weights = read_weights(folder)
    assert HEAD not in weights
    if request.param == "twice":
        rewrite_weights(folder, weights | {HEAD: weights[EMBEDDING].clone()})
    return folder


def trained(folder: Path, head: bool) -> dict[str, torch.Tensor]:
    """Other values than the base's, with the head as state_dict of a tied model has it, or without."""
    weights = {name: tensor + 1 for name, tensor in read_weights(folder).items() if name != HEAD}
    return weights | ({HEAD: weights[EMBEDDING].clone()} if head else {})


def check(output: Path, base: Path, weights: dict[str, torch.Tensor]) -> None:
    made = read_weights(output)
    assert made.keys() == read_weights(base).keys()
    for name, tensor in made.items():
        assert torch.equal(tensor, weights[EMBEDDING if name == HEAD else name]), name
    assert not verify(output, base).faults


@pytest.mark.parametrize("head", [True, False])
def test_training_checkpoint(tied: Path, tmp_path: Path, head: bool) -> None:
    weights = trained(tied, head)
    state = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts."
        gates = [torch.cat([weights[f"{at}{e}.{p}_proj.weight"] for p in ("gate", "up")]) for e in range(4)]
        state[f"{at}gate_up_proj"] = torch.stack(gates)
        state[f"{at}down_proj"] = torch.stack([weights[f"{at}{e}.down_proj.weight"] for e in range(4)])
    checkpoint = save(tmp_path / "dcp", state)
    check(convert(dcp_to_hf_conversion(checkpoint, tied), tmp_path / "out"), tied, weights)


@pytest.mark.parametrize("head", [True, False])
def test_megatron(tied: Path, tmp_path: Path, head: bool) -> None:
    weights = trained(tied, head)
    checkpoint = save_megatron(tmp_path / "megatron", language_model(weights, "model.", "", 2, rows=100))
    check(convert(megatron_to_hf_conversion(checkpoint, tied), tmp_path / "out"), tied, weights)


def test_a_head_of_its_own_is_not_lost(tmp_path: Path) -> None:
    """config.json ties it, the checkpoint has other values: one of the two is wrong."""
    base = make_text(tmp_path / "base", tied=True)
    weights = trained(base, True)
    weights[HEAD][3, 5] += 1
    checkpoint = save_megatron(tmp_path / "megatron", language_model(weights, "model.", "", 2, rows=100))
    with pytest.raises(UnsupportedError, match=r"ties lm_head\.weight to the embedding"):
        megatron_to_hf_conversion(checkpoint, base)


def test_other_directions(tied: Path, tmp_path: Path) -> None:
    before = read_weights(tied)
    fused = convert(relayout_conversion(tied, "v5"), tmp_path / "v5")
    assert (HEAD in read_weights(fused)) == (HEAD in before)
    checkpoint = convert(hf_to_dcp_conversion(tied), tmp_path / "dcp")
    back = convert(dcp_to_hf_conversion(checkpoint, tied), tmp_path / "back")
    after = read_weights(back)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("stored", [True, False])
def test_tied_omni(tmp_path: Path, stored: bool) -> None:
    omni = make_omni(tmp_path / "omni")
    edit_config(omni, "thinker_config", "text_config", tie_word_embeddings=True)
    edit_config(omni, "thinker_config", tie_word_embeddings=None)
    edit_config(omni, tie_word_embeddings=None)
    weights = read_weights(omni)
    head = weights.pop("thinker.lm_head.weight")
    rewrite_weights(omni, weights | ({"thinker.lm_head.weight": head} if stored else {}))
    vl = convert(omni_to_vl_conversion(omni), tmp_path / "vl")
    text = convert(omni_to_text_conversion(omni), tmp_path / "text")
    assert (HEAD in read_weights(vl)) == (HEAD in read_weights(text)) == stored
    back = convert(vl_to_omni_conversion(vl, omni), tmp_path / "back")
    assert (back / "model.safetensors").read_bytes() == (omni / "model.safetensors").read_bytes()
