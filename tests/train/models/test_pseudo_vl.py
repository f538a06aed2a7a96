"""A pseudo Qwen3-VL on Qwen3-Omni's layout computes what the thinker does, and so does a text model with its ears."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from convert.engine import resolve
from convert.geometry import Geometry
from convert.pieces import usage
from convert.tables.omni_vl import NO_AUDIO, OMNI_TO_VL
from convert.tensors import TensorInfo
from schemas.errors import ConfigError, UnsupportedError
from schemas.strict import check_config
from tests.train import pseudo
from tests.train.data.mixes import Mix
from tests.train.models import media
from tests.train.models.families import assert_equal_gradients, run_ours
from train.config import OmniConfig
from train.data.batch import BatchPlace
from train.data.collate import Collator
from train.data.model_inputs import model_inputs
from train.data.processor import ProcessorAssets
from train.data.transform import SampleTransform
from train.model_assets import training_assets
from train.models.flops import MicroBatch, ModelFlops
from train.models.foundation import FoundationModel
from train.models.freeze import freeze
from train.models.frozen_audio import FrozenAudioTower, add_audio_tower
from train.models.inputs import ModelInputs
from train.models.spec import build_foundation_model
from train.ops.registry import eager_ops

MIXES: dict[str, Callable[[], Mix]] = {
    "text": media.text_mix,
    "image": media.image_mix,
    "video": media.video_mix,
    "audio": media.audio_mix,
    "clip_with_sound": media.clip_with_sound_mix,
    "everything": media.everything_mix,
}
SILENT = ("text", "image", "video")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("models")
    omni = pseudo.make_omni(top / "omni")
    return {"omni": omni, "vl": pseudo.make_pseudo(omni, top / "vl"), "text": pseudo.make_text(omni, top / "text")}


def built(folder: Path) -> FoundationModel:
    model = build_foundation_model(folder, eager_ops())
    assert isinstance(model, FoundationModel)
    return model


def config_of(folder: Path, data: dict[str, Any] | None = None, train: Any = None, **model: Any) -> OmniConfig:
    values = {
        "model": {"model_path": str(folder)} | model,
        "data": {"sources": [{"path": "packed"}]} | (data or {}),
        "train": train or {},
    }
    return check_config(values, OmniConfig)


def inputs_of(assets: ProcessorAssets, names: Sequence[str]) -> ModelInputs:
    """With the ids of the tokenizer."""
    transform = SampleTransform(assets)
    samples = [transform.packed(MIXES[name]().sample(name), "made") for name in names]
    batch = Collator(position_dtype="float32", route_spec=media.ROUTE)(samples, BatchPlace(0, 0, 0))
    return model_inputs(batch, assets)


def as_vl(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A thinker's tensors, but for those of the audio tower, by the names of Qwen3-VL."""
    infos = {name: TensorInfo(tuple(value.shape), value.dtype) for name, value in tensors.items()}
    made = resolve((*OMNI_TO_VL, *NO_AUDIO), infos, Geometry({}, {})).made
    return {name: tensors[next(iter(usage(assembly.pieces)))] for name, assembly in made.items()}


def assert_same_inputs(one: ModelInputs, other: ModelInputs) -> None:
    assert torch.equal(one.ids, other.ids) and torch.equal(one.position_ids, other.position_ids)
    assert one.labels is not None and other.labels is not None and torch.equal(one.labels, other.labels)
    assert one.position_ids.dtype == torch.float32
    assert one.segments.lengths == other.segments.lengths and one.grids == other.grids


@pytest.mark.parametrize("names", [*[(name,) for name in SILENT], SILENT], ids="+".join)
def test_losses_and_gradients_are_those_of_the_thinker(folders: dict[str, Path], names: tuple[str, ...]) -> None:
    thinker, model = built(folders["omni"]), built(folders["vl"])
    expected_inputs = inputs_of(training_assets(config_of(folders["omni"])), names)
    no_sound = {"mm_configs": {"use_audio_in_video": False}}
    inputs = inputs_of(training_assets(config_of(folders["vl"], no_sound)), names)
    assert_same_inputs(inputs, expected_inputs)
    _assert_same(model, inputs, thinker, expected_inputs)


@pytest.mark.parametrize("names", [("audio",), ("clip_with_sound",), tuple(MIXES)], ids="+".join)
def test_with_the_audio_tower_beside_it_sound_is_the_same_too(folders: dict[str, Path], names: tuple[str, ...]) -> None:
    thinker, model = built(folders["omni"]), built(folders["vl"])
    add_audio_tower(model, folders["omni"], eager_ops(), torch.float32)
    expected_inputs = inputs_of(training_assets(config_of(folders["omni"])), names)
    inputs = inputs_of(training_assets(config_of(folders["vl"], audio_tower_path=str(folders["omni"]))), names)
    assert_same_inputs(inputs, expected_inputs)
    _assert_same(model, inputs, thinker, expected_inputs)


def _assert_same(
    model: FoundationModel, inputs: ModelInputs, thinker: FoundationModel, expected_inputs: ModelInputs
) -> None:
    """Losses within 1e-5, logits too, and the gradients of all that both have."""
    model.aux_loss_coef = thinker.aux_loss_coef = 0.05
    expected, gradients = run_ours(thinker, expected_inputs)
    found, got = run_ours(model, inputs)
    assert found.loss is not None and expected.loss is not None
    assert abs(float(found.loss.detach() - expected.loss.detach())) <= 1e-5
    assert found.logits is not None and expected.logits is not None
    assert (found.logits - expected.logits).abs().max() < 1e-5
    renamed = as_vl(gradients)
    assert got.keys() == renamed.keys()
    assert_equal_gradients(got, renamed)


@pytest.mark.parametrize("names", [("text", "audio"), ("audio",)], ids="+".join)
def test_a_text_model_hears_what_the_thinker_hears(folders: dict[str, Path], names: tuple[str, ...]) -> None:
    thinker, model = built(folders["omni"]), built(folders["text"])
    add_audio_tower(model, folders["omni"], eager_ops(), torch.float32)
    expected_inputs = inputs_of(training_assets(config_of(folders["omni"])), names)
    assets = training_assets(config_of(folders["text"], audio_tower_path=str(folders["omni"])))
    inputs = inputs_of(assets, names)
    assert_same_inputs(inputs, expected_inputs)
    model.aux_loss_coef = thinker.aux_loss_coef = 0.05
    expected, gradients = run_ours(thinker, expected_inputs)
    found, got = run_ours(model, inputs)
    assert found.loss is not None and expected.loss is not None
    assert abs(float(found.loss.detach() - expected.loss.detach())) <= 1e-5
    assert_equal_gradients(got, {name: gradients[name] for name in got})
    assert set(got) == {name for name in gradients if not name.startswith(("audio_tower.", "visual."))}


def test_the_frozen_tower_is_no_part_of_the_model(folders: dict[str, Path]) -> None:
    model = built(folders["text"])
    names = set(model.state_dict())
    add_audio_tower(model, folders["omni"], eager_ops(), torch.bfloat16)
    tower = model.frozen_audio
    assert isinstance(tower, FrozenAudioTower) and not tower.loaded
    assert set(model.state_dict()) == names and {name for name, _ in model.named_parameters()} == names
    assert not [module for module in model.modules() if "Audio" in type(module).__name__]
    mel = torch.randn(128, 150)
    rows = tower(mel, [150])
    assert tower.loaded and rows.dtype == torch.bfloat16 and not rows.requires_grad
    with torch.no_grad():
        expected = built(folders["omni"]).to(torch.bfloat16).audio_tower(mel, [150])  # type: ignore[operator]
    assert torch.equal(rows, expected)


def test_media_without_a_tower_are_refused(folders: dict[str, Path]) -> None:
    assets = training_assets(config_of(folders["omni"]))
    with pytest.raises(UnsupportedError, match="patches of 2 pictures for a model without a vision tower"):
        built(folders["text"])(inputs_of(assets, ["image"]))
    for name in ("text", "vl"):
        with pytest.raises(UnsupportedError, match="log-mel of 3 sounds for a model without an audio tower"):
            built(folders[name])(inputs_of(assets, ["audio"]))


def test_towers_that_do_not_fit_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="qwen3_omni_moe_thinker has its own audio tower"):
        add_audio_tower(built(folders["omni"]), folders["omni"], eager_ops(), torch.float32)
    text = built(folders["text"])
    with pytest.raises(ConfigError, match="is a qwen3_moe, which has no audio tower"):
        add_audio_tower(text, folders["text"], eager_ops(), torch.float32)
    with pytest.raises(ConfigError, match="makes rows of 48 numbers, the text model takes 40"):
        FrozenAudioTower(folders["omni"], eager_ops(), 40, torch.float32)
    text.config.vocab_size = pseudo.AUDIO
    with pytest.raises(ConfigError, match=f"audio_token_id {pseudo.AUDIO} of .* lies beyond"):
        add_audio_tower(text, folders["omni"], eager_ops(), torch.float32)


def test_a_tower_in_a_whole_qwen3_omni_is_read_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    """Behind `thinker.`, and with nothing else in the files."""
    weights = built(folders["omni"]).state_dict()
    config = pseudo.thinker_config()
    config.save_pretrained(tmp_path)
    pseudo.edit_config(
        tmp_path, lambda c: [c.update(thinker_config=dict(c), model_type="qwen3_omni_moe"), c.pop("text_config")]
    )
    pseudo.write(tmp_path, {f"thinker.{name}": value for name, value in weights.items() if "audio_tower" in name})
    mel = torch.randn(128, 230)
    one, other = (FrozenAudioTower(f, eager_ops(), 48, torch.float32) for f in (tmp_path, folders["omni"]))
    assert torch.equal(one(mel, [230]), other(mel, [230]))


@pytest.mark.parametrize("name", ["text", "vl"])
def test_what_the_tower_computes_is_counted(folders: dict[str, Path], name: str) -> None:
    """As that of a thinker whose audio tower is frozen, for the forward pass; nothing goes back through it."""
    thinker, model = built(folders["omni"]), built(folders[name])
    freeze(thinker, modules=["audio_tower"])
    deaf = ModelFlops(model)
    add_audio_tower(model, folders["omni"], eager_ops(), torch.float32)
    batch = MicroBatch([40, 25], [(1, 4, 4)] if name == "vl" else [], [230, 100])
    found, expected = ModelFlops(model).count(batch), ModelFlops(thinker).count(batch)
    assert found.forward == expected.forward and found.forward["audio"] > 0
    assert found.backward == deaf.count(batch).backward
