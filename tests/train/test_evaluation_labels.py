"""An evaluation of a few batches that hold no label is refused: its loss would be 0 of nothing, the best of all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import ConfigError
from tests.train.data.loading import omni_assets
from tests.train.tiny import omni_config
from train.evaluation import HeldOut

ROWS = 8


def held_out(folder: Path, seed: int, max_batches: int | None) -> HeldOut:
    """Of rows that fill a sequence each; one has an answer."""
    question = {"role": "user", "content": "Where? " * 130}
    rows: list[Any] = [{"messages": [question]}] * (ROWS - 1)
    rows.append({"messages": [question, {"role": "assistant", "content": "Here."}]})
    file = folder / "t.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [{"path": str(file), "name": "t", "source_name": "openai_messages"}]
    evaluation = {"sources": sources, "steps": 1, "max_batches": max_batches}
    config = omni_config(folder, sources, seed=seed, evaluation=evaluation)
    return HeldOut.open(config.data, config.train, omni_assets(), 1, show=False)


def test_batches_without_a_label(tmp_path: Path) -> None:
    assert held_out(tmp_path, 0, None).plans.steps(0) == ROWS  # a row is a batch
    opened = []
    for seed in range(12):
        try:
            held = held_out(tmp_path, seed, 2)
        except ConfigError as error:
            assert str(error).startswith("train.evaluation.max_batches: none of the rows in the first 2 of 8 steps")
            continue
        plan, labels = held.plans.epoch(0), held.sources[0].lengths.labels
        assert sum(int(labels[plan.step_rows(step)].sum()) for step in range(2)) > 0
        opened.append(seed)
    assert 0 < len(opened) < 12


@pytest.mark.parametrize("max_batches", [None, ROWS, 100])
def test_all_batches(tmp_path: Path, max_batches: int | None) -> None:
    held_out(tmp_path, 0, max_batches)
