"""What is told while the data are opened."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from schemas.errors import ConfigError
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


@pytest.mark.parametrize(("whose", "key"), [("", "data.sources"), ("evaluation", "train.evaluation.sources")])
def test_data_that_nothing_can_be_learned_from_are_refused(tmp_path: Path, whose: str, key: str) -> None:
    """The loss would be 0 of nothing."""
    file = tmp_path / "t.jsonl"
    question = {"role": "user", "content": "Where?"}
    answered = {"messages": [question, {"role": "assistant", "content": "Here."}]}

    def opened(rows: list[object], weight: float = 1.0) -> None:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = {"path": str(file), "name": "t", "source_name": "openai_messages", "weight": weight}
        data = data_config([source], tmp_path / "cache", lanes=1)
        open_data(data, BatchConfig(global_batch_size=1, max_steps=2), omni_assets(), whose=whose)

    with pytest.raises(ConfigError, match=rf"^{key}: no row has a token to train on"):
        opened([{"messages": [question]}] * 3)
    with pytest.raises(ConfigError, match=rf"^{key}: the first epoch has no row \(t 3 rows\); raise the weights"):
        opened([answered] * 3, 1e-4)
    opened([{"messages": [question]}, answered])
