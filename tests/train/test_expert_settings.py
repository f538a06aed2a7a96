"""From the configuration to the experts: how rows reach them, and how many there may be. A run's folder is its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from schemas.errors import ConfigError
from schemas.strict import check_config
from tests.train.tiny import omni_config, write_data
from train import model_build, trainer_build
from train.config import OmniConfig, TrainConfig
from train.mesh import Degrees, Mesh
from train.run_lock import RunLock
from train.trainer import make_trainer


class ReachedError(Exception):
    """Where the test ends."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return write_data(tmp_path_factory.mktemp("data"))


def config_of(folder: Path, sources: list[dict[str, Any]], **train: Any) -> OmniConfig:
    return omni_config(folder, sources, **train)


@pytest.mark.parametrize(
    ("micro", "ulysses", "multiple", "rows"), [(1, 1, 8, 256), (2, 1, 8, 512), (2, 4, 8, 128), (1, 2, 96, 192)]
)
def test_most_rows_of_a_rank(
    tmp_path: Path, sources: list[dict[str, Any]], micro: int, ulysses: int, multiple: int, rows: int
) -> None:
    config = config_of(tmp_path, sources)
    accelerator = config.train.accelerator.model_copy(update={"ulysses_size": ulysses})
    update = {"micro_batch_size": micro, "pad_multiple": multiple, "accelerator": accelerator}
    data = config.data.model_copy(update={"max_seq_len": 256})
    config = config.model_copy(update={"data": data, "train": config.train.model_copy(update=update)})
    assert config.rows_per_rank == rows


def test_the_trainer_says_how_many_rows(
    tmp_path: Path, sources: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def reached(*_: Any, **keys: Any) -> None:
        seen.update(keys)
        raise ReachedError

    monkeypatch.setattr(trainer_build, "parallelize", reached)
    config = config_of(tmp_path, sources)
    trainer = make_trainer(config)
    with pytest.raises(ReachedError):
        trainer.build()
    assert seen["rows"] == config.rows_per_rank > 0
    assert trainer.run_lock is not None
    RunLock(Path(config.train.checkpoint.output_dir)).release()  # what could not be built holds no folder


def test_wrapping_passes_on_dispatch_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(model_build, "needs_wrapping", lambda *_: True)
    monkeypatch.setattr(model_build, "fsdp_units", lambda *_, **__: [])
    monkeypatch.setattr(model_build, "apply_parallel", lambda *_, **keys: seen.update(keys))
    train = check_config({"accelerator": {"expert_dispatch": "all_gather"}}, TrainConfig)
    model: Any = None
    assert model_build.wrap(model, Mesh(Degrees(), 0, model_build.torch.device("cpu")), train, None, 640)
    assert seen == {"dispatch": "all_gather", "rows": 640}


def test_a_second_trainer_in_one_folder_is_refused_until_the_first_has_ended(
    tmp_path: Path, sources: list[dict[str, Any]]
) -> None:
    config = config_of(tmp_path, sources, max_steps=1)
    first = make_trainer(config)
    first.build()
    with pytest.raises(ConfigError, match=r"output_dir: process .* is training into"):
        make_trainer(config).build()
    first.train()
    RunLock(Path(config.train.checkpoint.output_dir)).release()
