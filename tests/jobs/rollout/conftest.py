"""One packed dataset and one tiny model for all tests of rollouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from jobs.bench.colours_data import pack_rows
from jobs.rollout.hub import load_model
from jobs.rollout.prompts import Prompt, make_prompt, prompt_assets
from pack.reader import PackedDataset
from tests.jobs.rollout.world import reward_rows, rollouts_config, write_model
from train.data.processor import ProcessorAssets
from train.data.transform import SampleTransform


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """packed/ and model/."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("rollouts")
    pack_rows(folder, reward_rows(folder), source_name="video_r1")
    write_model(folder / "model")
    return folder


@pytest.fixture(scope="session")
def assets(world: Path) -> ProcessorAssets:
    return prompt_assets(rollouts_config(world))


@pytest.fixture(scope="session")
def prompts(world: Path, assets: ProcessorAssets) -> dict[str, Prompt]:
    """By id of the row."""
    transform = SampleTransform(assets)
    return {sample.meta.id: make_prompt(sample, transform) for sample in PackedDataset(str(world / "packed"))}


@pytest.fixture(scope="session")
def model(world: Path):
    return load_model(world / "model", rollouts_config(world).local)
