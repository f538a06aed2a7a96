"""A state.json that was changed by hand, or half lost, is told as such."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import IncompleteSourceError
from tests.train.tiny import omni_config, write_data
from train.config import OmniConfig
from train.trainer import make_trainer

DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "no trainer": lambda state: state.pop("trainer"),
    "no data": lambda state: state.pop("data"),
    "no scheduler": lambda state: state.pop("scheduler"),
    "a text": lambda state: state.update(data="x"),
    "below zero": lambda state: state["trainer"].update(step=-3),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[OmniConfig, Path]:
    folder = tmp_path_factory.mktemp("run")
    values = omni_config(folder, write_data(folder / "data"), max_steps=2).model_dump()
    values["train"]["checkpoint"] |= {"save_async": False, "save_hf_weights": False}
    config = OmniConfig.model_validate(values)
    trainer = make_trainer(config)
    trainer.train()
    return config, trainer.checkpointer.output_dir / "step_2" / "state.json"


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_damaged_is_named(saved: tuple[OmniConfig, Path], kind: str) -> None:
    config, file = saved
    whole = file.read_bytes()
    state = json.loads(whole)
    DAMAGE[kind](state)
    file.write_text(json.dumps(state))
    try:
        with pytest.raises(IncompleteSourceError):
            make_trainer(config).train()
    finally:
        file.write_bytes(whole)
