"""Every random generator goes on where it was, from text."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from schemas.errors import IncompleteSourceError, UnsupportedError
from train.rng import load_rng, rng_bytes, rng_state, set_rng_state, write_rng


def draw() -> list[Any]:
    """Numbers of every kind; an odd count of gaussians leaves one over in Python and in numpy."""
    numbers: list[Any] = [random.random(), random.gauss(0, 1), random.randrange(10**9)]
    numbers += [np.random.rand(), np.random.standard_normal(), int(np.random.randint(10**6))]
    return [*numbers, torch.rand(3).tolist(), torch.randperm(5).tolist()]


@pytest.mark.parametrize("before", [0, 1, 2])
def test_all_generators_go_on_exactly(tmp_path: Path, before: int) -> None:
    for _ in range(before):
        draw()
    write_rng(tmp_path / "rank_0.json", rng_bytes())
    expected = [draw() for _ in range(3)]
    load_rng(tmp_path / "rank_0.json")
    assert [draw() for _ in range(3)] == expected


def test_the_file_is_plain_json(tmp_path: Path) -> None:
    write_rng(tmp_path / "r.json", rng_bytes())
    state = json.loads((tmp_path / "r.json").read_text())
    assert set(state) == {"version", "python", "numpy", "torch", "cuda"} and len(state["python"]["internal"]) == 625


def test_what_is_no_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IncompleteSourceError, match="does not exist"):
        load_rng(tmp_path / "r.json")
    (tmp_path / "r.json").write_text("{")
    with pytest.raises(IncompleteSourceError, match=r"r\.json: is not valid JSON"):
        load_rng(tmp_path / "r.json")
    state = rng_state()
    with pytest.raises(UnsupportedError, match="version 9"):
        set_rng_state(state | {"version": 9})
    for broken in ({"torch": "AAAA"}, {"python": {"version": 3, "internal": [1], "gauss_next": None}}, {"numpy": {}}):
        with pytest.raises(IncompleteSourceError, match="is no state of the random generators"):
            set_rng_state(state | broken)
    set_rng_state(state)
