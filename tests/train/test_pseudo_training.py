"""Training a pseudo Qwen3-VL and a text model with ears from their files: what is frozen stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from convert.dcp import DcpReader
from schemas.sample import PackedSample
from schemas.strict import check_config
from tests.train import pseudo
from tests.train.data.dataset import write_dataset
from tests.train.data.loading import clip_sample, write_clips
from tests.train.data.packed import packed_sample
from train.config import OmniConfig
from train.data.prepare import plan_notes
from train.models.foundation import FoundationModel
from train.models.frozen_audio import FrozenAudioTower
from train.models.spec import build_foundation_model
from train.ops.registry import eager_ops
from train.trainer import make_trainer
from train.validate import validate_config


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("models")
    omni = pseudo.make_omni(top / "omni")
    return {"omni": omni, "vl": pseudo.make_pseudo(omni, top / "vl"), "text": pseudo.make_text(omni, top / "text")}


def built(folder: Path) -> FoundationModel:
    model = build_foundation_model(folder, eager_ops())
    assert isinstance(model, FoundationModel)
    return model


def config_of(folder: Path, data: dict[str, Any], train: dict[str, Any], **model: Any) -> OmniConfig:
    return check_config({"model": {"model_path": str(folder)} | model, "data": data, "train": train}, OmniConfig)


# key of the configuration -> what must not change, what must
FROZEN: list[tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
    (
        {"freeze_vit": True},
        ("model.visual.blocks.", "model.visual.patch_embed.", "model.visual.pos_embed."),
        ("model.visual.merger.", "model.visual.deepstack_merger_list.", "model.language_model.", "lm_head."),
    ),
    (
        {"freeze_vit": True, "freeze_modules": ["model.visual.*merger*"]},
        ("model.visual.",),
        ("model.language_model.", "lm_head."),
    ),
    (
        {"freeze_modules": ["model.visual.*merger*"]},
        ("model.visual.merger.", "model.visual.deepstack_merger_list."),
        ("model.visual.blocks.", "model.visual.patch_embed.", "model.language_model."),
    ),
]


@pytest.mark.parametrize(("keys", "still", "moving"), FROZEN, ids=["tower", "both", "projection"])
def test_frozen_parts_stay_as_they_are(
    folders: dict[str, Path], tmp_path: Path, keys: dict[str, Any], still: tuple[str, ...], moving: tuple[str, ...]
) -> None:
    """Bit by bit, under AdamW with weight decay."""
    data = {
        "sources": [{"path": str(write_clips(tmp_path / "clips", 8)), "name": "clips"}],
        "max_seq_len": 512,
        "lanes": 2,
        "cache": {"dir": str(tmp_path / "cache")},
        "dataloader": {"num_workers": 0},
        "mm_configs": {"use_audio_in_video": False},
    }
    train = {
        "global_batch_size": 2,
        "max_steps": 3,
        "optimizer": {"lr": 1e-2, "weight_decay": 0.5, "lr_decay_style": "constant"},
        "accelerator": {"fsdp_config": {"mixed_precision": {"enable": False}}},
        "checkpoint": {"output_dir": str(tmp_path / "output"), "save_steps": 0, "save_hf_weights": False},
    }
    trainer = make_trainer(config_of(folders["vl"], data, train | keys))
    trainer.build()
    before = {name: value.clone() for name, value in built(folders["vl"]).state_dict().items()}
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    trainer.train()
    for name, value in trainer.model.state_dict().items():
        same = torch.equal(value, before[name])
        if name.startswith(still):
            assert same, name
        elif name.startswith(moving):
            assert not same, name
    assert all(any(name.startswith(prefix) for name in before) for prefix in (*still, *moving))


def test_a_text_model_with_ears_trains_saves_and_goes_on(folders: dict[str, Path], tmp_path: Path) -> None:
    """The tower is in no checkpoint, and rows with pictures are left out and counted, by name."""
    rows = [_spoken(number) for number in range(8)]
    rows += [clip_sample(number, np.random.default_rng(number)) for number in (1, 2)]
    data = {
        "sources": [{"path": str(write_dataset(tmp_path / "sounds", rows, 5, 64 << 20)), "name": "sounds"}],
        "max_seq_len": 256,
        "lanes": 2,
        "cache": {"dir": str(tmp_path / "cache")},
        "dataloader": {"num_workers": 0},
    }
    train = {
        "global_batch_size": 2,
        "max_steps": 4,
        "optimizer": {"lr": 1e-3, "lr_decay_style": "constant"},
        "accelerator": {"fsdp_config": {"mixed_precision": {"enable": False}}},
        "checkpoint": {"output_dir": str(tmp_path / "output"), "save_steps": 2, "save_hf_weights": False},
    }
    config = config_of(folders["text"], data, train, audio_tower_path=str(folders["omni"]))
    trainer = make_trainer(config)
    trainer.train()
    assert isinstance(trainer.model, FoundationModel)
    tower = trainer.model.frozen_audio
    assert isinstance(tower, FrozenAudioTower) and tower.loaded
    found = [note for note in plan_notes(trainer.plans, trainer.sources) if "cannot be used" in note]
    assert found == [
        "data source sounds: 2 of 10 rows cannot be used; the first: row clip1: videos: holds 1; the model has "
        "no tower for them and takes text, audio"
    ]
    saved = DcpReader(tmp_path / "output" / "step_4")
    assert not [name for name in (*saved.tensors, *saved.skipped) if "audio" in name]
    after = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    again = make_trainer(config)
    again.build()
    again.train()
    assert all(torch.equal(value, after[name]) for name, value in again.model.state_dict().items())


def _spoken(number: int) -> PackedSample:
    noise = np.random.default_rng(number).integers(-9000, 9000, 9000 + 3000 * number).astype(np.int16)
    turns: list[Any] = [["user", ("audio", None), ("text", "What?")], ["assistant", ("text", f"It says {number}.")]]
    return packed_sample(turns, sounds=[noise], key=f"sound{number}")


def test_validate_sees_what_does_not_go_together(folders: dict[str, Path]) -> None:
    data = {"sources": [{"path": "packed"}], "mm_configs": {"use_audio_in_video": False}}
    config = config_of(folders["vl"], data, {}, audio_tower_path=str(folders["text"]))
    found = validate_config(config, 1, data=False)
    assert [str(fault) for fault in found.faults if "which has no audio tower" in str(fault)]
    good = validate_config(config_of(folders["vl"], data, {}, audio_tower_path=str(folders["omni"])), 1, data=False)
    said = dict(good.facts)["audio tower"]
    assert not good.faults and said.startswith("frozen, beside the model, ") and said.endswith(" MB")
    assert "0.0" not in said  # of a tiny tower, too
