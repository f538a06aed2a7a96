from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest

from tests.train.data.plan_cases import mixed_lengths, planner, source
from train.data import plan_store
from train.data.plan import Planner
from train.data.plan_store import PlanStore


def make() -> Planner:
    return planner(source("a", mixed_lengths(400), 10))


def test_a_plan_is_made_once_and_found_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    first = PlanStore(make(), tmp_path, lambda done, of: told.append((done, of)))
    plan = first.epoch(1)
    assert told and told[-1][0] == told[-1][1]
    monkeypatch.setattr(Planner, "epoch", lambda *_: pytest.fail("made again"))
    again = PlanStore(make(), tmp_path)
    found = again.epoch(1)
    for name in ("rows", "bounds", "cost"):
        assert np.array_equal(getattr(found, name), getattr(plan, name))
    assert isinstance(found.rows, np.memmap) and not found.rows.flags.writeable
    assert again.steps(1) == plan.steps and again.epoch(1) is found


def test_steps_are_known_without_the_plan(tmp_path: Path) -> None:
    store = PlanStore(make(), tmp_path)
    total = store.total_steps(3)
    assert total == sum(make().epoch(epoch).steps for epoch in range(3))
    assert PlanStore(make(), None).total_steps(3) == total
    for folder in store._folder.iterdir():  # type: ignore[union-attr]
        if folder.is_dir():
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
    assert PlanStore(make(), tmp_path).total_steps(3) == total


def test_other_data_have_other_plans(tmp_path: Path) -> None:
    one = PlanStore(make(), tmp_path)
    two = PlanStore(planner(source("a", mixed_lengths(400), 10), seed=1), tmp_path)
    assert one.digest != two.digest
    assert not np.array_equal(one.epoch(0).rows[:100], two.epoch(0).rows[:100])


def test_old_epochs_make_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_store, "_KEPT_EPOCHS", 2)
    store = PlanStore(make(), tmp_path)
    mapped = store.epoch(0)
    for epoch in range(1, 5):
        store.epoch(epoch)
    kept = sorted(path.name for path in store._folder.iterdir() if path.is_dir())  # type: ignore[union-attr]
    assert kept == ["000003", "000004"]
    assert np.array_equal(mapped.rows, make().epoch(0).rows)  # its files are gone, its memory is not


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "plans").write_text("a file")
    store = PlanStore(make(), tmp_path)
    assert np.array_equal(store.epoch(0).rows, make().epoch(0).rows)
    assert "the plan of epoch 0 is not kept" in caplog.text


def test_many_epochs_keep_the_plans_near_the_one_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_store, "_KEPT_EPOCHS", 2)
    made: list[int] = []
    make_epoch = Planner.epoch
    monkeypatch.setattr(Planner, "epoch", lambda self, e, told=None: (made.append(e), make_epoch(self, e, told))[1])
    ranks = [PlanStore(make(), tmp_path) for _ in range(3)]
    assert len({store.total_steps(4) for store in ranks}) == 1
    assert made == [0, 1, 2, 3]  # counted once per node, and the first two kept
    for epoch in range(4):
        for store in ranks:
            store.epoch(epoch)
    assert made == [0, 1, 2, 3, 2, 3]


def test_a_damaged_plan_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = PlanStore(make(), tmp_path).epoch(0)
    for file in (tmp_path / "plans").rglob("*"):
        if file.suffix in (".npy", ".json"):
            file.write_bytes(b"")
    again = PlanStore(make(), tmp_path)
    assert again.steps(0) == plan.steps
    assert np.array_equal(again.epoch(0).cost, make().epoch(0).cost)
    assert "is damaged and is made again" in caplog.text


def _slowly(folder: str) -> int:
    """Steps of the plan; leaves a file for each time that this process made it."""

    def advance(done: int, of: int) -> None:
        if done == 1:
            (Path(folder) / f"made-{os.getpid()}-{time.monotonic_ns()}").touch()
        time.sleep(0.1)

    return PlanStore(make(), Path(folder), advance).epoch(0).steps


def test_processes_that_ask_at_once_make_one_plan(tmp_path: Path) -> None:
    with multiprocessing.get_context("forkserver").Pool(2) as pool:
        assert len(set(pool.map(_slowly, [str(tmp_path)] * 4, chunksize=1))) == 1
    assert len(list(tmp_path.glob("made-*"))) == 1
