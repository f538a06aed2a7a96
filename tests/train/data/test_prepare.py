"""What is told while the data are opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.train.data.loading import data_config, omni_assets, write_clips
from train.config import BatchConfig
from train.data import prepare
from train.data.prepare import open_data


def test_plans_are_told_while_somebody_waits_for_them_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    @contextmanager
    def watched(title: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
        yield lambda count: told.append(title)

    monkeypatch.setattr(prepare, "progress", watched)
    write_clips(tmp_path / "clips", 6)
    data = data_config([{"path": str(tmp_path / "clips")}], tmp_path / "cache", lanes=1)
    open_data(data, BatchConfig(global_batch_size=1, num_train_epochs=3), omni_assets())
    assert told.count("planning") >= 3  # windows of every epoch of the training
    _, plans = open_data(data, BatchConfig(global_batch_size=1, max_steps=9, seed=1), omni_assets(), whose="evaluation")
    assert "evaluation: planning" in told
    told.clear()
    assert plans.epoch(1).steps > 0
    assert told == []  # in the middle of the training
