from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pytest
import torch

from schemas.errors import ConfigError, OmniloomError, VerificationError
from tests.train.data.loader_driver import BATCH, EPOCHS, make_setup
from tests.train.data.loading import Setup, data_config, keys_of, omni_assets, write_clips, write_even_mix, write_text
from train.config import BatchConfig, DataloaderConfig
from train.data import device
from train.data.batch import Batch
from train.data.loader import _batches, made_ahead
from train.data.prepare import open_data, plan_notes
from train.data.rank_plan import DataRank

Rows = dict[tuple[int, int], list[str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_even_mix(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def setup(folder: Path) -> Setup:
    torch.set_num_threads(1)
    made = make_setup(folder)
    assert made.plans.planner.lanes.count == 4
    return made


@pytest.fixture(scope="module")
def reference(setup: Setup) -> Rows:
    """Rows of every global step, of one rank that was never stopped."""
    return {(step.epoch, step.step): sorted(keys_of(step)) for step in setup.loader()}


def test_every_row_is_used_once_per_epoch_or_as_often_as_its_weight_says(reference: Rows) -> None:
    for epoch in range(EPOCHS):
        used = Counter(key for (e, _), rows in reference.items() if e == epoch for key in rows)
        assert set(used.values()) == {1}
        assert sum(key.startswith("clip") for key in used) == 16
        assert 155 <= sum(key.startswith("text") for key in used) <= 165
    both = Counter(key for rows in reference.values() for key in rows if key.startswith("text"))
    assert set(both.values()) == {1}
    assert len(both) == 320


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 4), (2, 1), (4, 2)])
def test_resume_at_any_step_with_any_world_gives_the_same_rows_per_global_step(
    setup: Setup, reference: Rows, before: int, after: int
) -> None:
    steps = sorted(reference)
    end = setup.plans.steps(0)
    for stop in (0, 1, end // 2, end - 1, end, end + 1, len(steps) - 1, len(steps)):
        seen: Rows = {}
        state = None
        for dp_size, count in ((before, stop), (after, len(steps))):
            loaders = [setup.loader(DataRank(rank, dp_size)) for rank in range(dp_size)]
            if state is not None:
                for loader in loaders:
                    loader.load_state_dict(json.loads(json.dumps(state)))
            iterators = [iter(loader) for loader in loaders]
            for _, *parts in zip(range(count), *iterators, strict=False):
                place = (parts[0].epoch, parts[0].step)
                assert place not in seen
                assert len({len(part.micro_batches) for part in parts}) == 1
                seen[place] = sorted(key for part in parts for key in keys_of(part))
            states = [loader.state_dict() for loader in loaders]
            assert all(other == states[0] for other in states)
            state = states[0]
            for iterator in iterators:
                iterator.close()
        assert seen == reference


@pytest.mark.slow
def test_killed_at_random_moments_under_changing_worlds_and_workers(
    folder: Path, reference: Rows, tmp_path: Path
) -> None:
    for name in ("clips", "text"):
        (tmp_path / name).symlink_to(folder / name)
    chance = random.Random(3)
    log = tmp_path / "steps.jsonl"
    for dp_size, num_workers in [(1, 2), (2, 0), (4, 2)]:
        lines = len(log.read_text().splitlines()) if log.exists() else 0
        run = _drive(tmp_path, dp_size, num_workers)
        _wait_for_lines(run, log, lines + chance.randint(1, 4))
        time.sleep(chance.random() * 0.05)
        run.send_signal(signal.SIGKILL)
        run.wait()
    assert _drive(tmp_path, 1, 0).wait(120) == 0
    seen: Rows = {}
    for line in log.read_text().splitlines():
        if not line.endswith("}"):
            continue  # cut off by a kill
        for record in map(json.loads, line.replace("}{", "}\n{").splitlines()):
            place = (record["epoch"], record["step"])
            assert seen.setdefault(place, record["rows"]) == record["rows"]
    assert seen == reference


def _drive(folder: Path, dp_size: int, num_workers: int, **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.train.data.loader_driver", str(folder), str(dp_size), str(num_workers)]
    return subprocess.Popen(command, env=os.environ | environment)


def _wait_for_lines(run: subprocess.Popen[bytes], log: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while not log.exists() or len(log.read_text().splitlines()) < count:
        assert run.poll() is None, "the driver ended early"
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_workers_give_the_same_batches_as_none(setup: Setup) -> None:
    alone = list(islice(setup.loader(), 3))
    dataloader = setup.data.dataloader.model_copy(update={"num_workers": 2})
    iterator = iter(setup.loader(dataloader=dataloader))
    for one, two in zip(alone, islice(iterator, 3), strict=True):
        for a, b in zip(one.micro_batches, two.micro_batches, strict=True):
            assert a.keys == b.keys
            assert a.features is not None and b.features is not None
            assert torch.equal(a.features.patches, b.features.patches)
            assert torch.equal(a.features.mel, b.features.mel)
            for name, tensor in a.tensors().items():
                assert torch.equal(tensor, b.tensors()[name]), name
    iterator.close()


def test_a_second_loader_goes_on_where_a_state_says(setup: Setup, reference: Rows) -> None:
    first = setup.loader()
    iterator = iter(first)
    for _ in range(3):
        next(iterator)
    state = first.state_dict()
    iterator.close()
    second = setup.loader()
    second.load_state_dict(state)
    step = next(iter(second))
    assert (step.epoch, step.step) == sorted(reference)[3]
    assert sorted(keys_of(step)) == reference[step.epoch, step.step]


def test_the_same_loader_goes_on_when_it_is_iterated_again(setup: Setup, reference: Rows) -> None:
    loader = setup.loader()
    iterator = iter(loader)
    next(iterator)
    iterator.close()
    rest = {(step.epoch, step.step) for step in loader}
    assert rest == set(sorted(reference)[1:])
    assert list(loader) == []


def test_the_state_at_the_end_of_an_epoch_goes_on_with_the_next(setup: Setup, reference: Rows) -> None:
    loader = setup.loader()
    for step in loader:
        if step.last:
            break
    state = loader.state_dict()
    assert (state["epoch"], state["step"]) == (0, setup.plans.steps(0))
    resumed = setup.loader()
    resumed.load_state_dict(state)
    first = next(iter(resumed))
    assert (first.epoch, first.step) == (1, 0)
    assert sorted(keys_of(first)) == reference[1, 0]
    assert resumed.steps_done() == setup.plans.steps(0) + 1


def test_the_state_at_the_end_of_training_trains_nothing_more(setup: Setup) -> None:
    loader = setup.loader()
    for _ in loader:
        pass
    resumed = setup.loader()
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == []


def test_max_steps_decides_over_epochs(setup: Setup) -> None:
    per_epoch = setup.plans.steps(0)
    few = Setup(setup.data, setup.batch.model_copy(update={"max_steps": 2}))
    assert len(list(few.loader())) == few.loader().total_steps() == 2
    many = Setup(setup.data, setup.batch.model_copy(update={"max_steps": per_epoch * 3 + 1, "num_train_epochs": 1}))
    assert [step.epoch for step in many.loader()].count(0) == per_epoch
    assert many.loader().total_steps() == per_epoch * 3 + 1


def test_a_state_of_other_data_is_refused_by_name(setup: Setup, folder: Path) -> None:
    state = setup.loader().state_dict()
    data = setup.data.model_copy(update={"max_seq_len": 400})
    with pytest.raises(ConfigError, match="max_seq_len: 256 then, 400 now"):
        Setup(data, setup.batch).loader().load_state_dict(state)
    with pytest.raises(ConfigError, match="version 0"):
        setup.loader().load_state_dict(state | {"version": 0})
    with pytest.raises(ConfigError, match="step 9999 of the"):
        setup.loader().load_state_dict(state | {"step": 9999})


def test_data_ranks_read_disjoint_rows_and_sequence_ranks_the_same(setup: Setup, reference: Rows) -> None:
    ranks = [next(iter(setup.loader(DataRank(rank, 2)))) for rank in range(2)]
    first, second = (keys_of(step) for step in ranks)
    assert not set(first) & set(second)
    assert sorted(first + second) == reference[0, 0]
    slices = [next(iter(setup.loader(DataRank(0, 1, rank, 2)))) for rank in range(2)]
    assert keys_of(slices[0]) == keys_of(slices[1])
    for low, high in zip(slices[0].micro_batches, slices[1].micro_batches, strict=True):
        assert torch.equal(low.cu_seqlens, high.cu_seqlens)
        assert low.ids.shape == high.ids.shape == (1, low.length // 2)


def test_a_world_that_does_not_divide_the_batch_is_refused(setup: Setup) -> None:
    with pytest.raises(ConfigError, match=f"global_batch_size {BATCH} cannot be divided among 3"):
        setup.loader(DataRank(0, 3))
    batch = setup.batch.model_copy(update={"micro_batch_size": 3})
    with pytest.raises(ConfigError, match=r"no multiple of train[.]micro_batch_size 3"):
        Setup(setup.data, batch).loader()


def test_micro_batches_of_several_sequences_hold_the_same_rows(setup: Setup, reference: Rows) -> None:
    wide = Setup(setup.data, setup.batch.model_copy(update={"micro_batch_size": 2}))
    for step in islice(wide.loader(), 2):
        assert len(step.micro_batches) == BATCH // 2
        assert sorted(keys_of(step)) == reference[step.epoch, step.step]


def test_three_rows_train(tmp_path: Path) -> None:
    write_clips(tmp_path / "clips", 3)
    data = data_config([{"path": str(tmp_path / "clips")}], tmp_path / "cache", lanes=64)
    setup = Setup(data, BatchConfig(global_batch_size=64))
    assert setup.plans.planner.lanes.note.startswith("lanes lowered from 64 to 1")
    steps = [[*setup.loader(DataRank(rank, 4))] for rank in range(4)]
    assert [len(mine) for mine in steps] == [1] * 4
    assert sorted(key for mine in steps for key in keys_of(mine[0])) == ["clip0", "clip1", "clip2"]
    assert all((batch.labels == -100).all() for mine in steps for batch in mine[0].micro_batches if not batch.keys)


@pytest.mark.slow
def test_nothing_is_left_behind_by_a_killed_run(
    folder: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No shared memory and no lock file stays, so nothing has to be cleaned before the next run."""
    short_folder = tmp_path_factory.getbasetemp().parent / "t"  # leaves room for the name of a socket
    short_folder.mkdir(exist_ok=True)
    for name in ("clips", "text"):
        (tmp_path / name).symlink_to(folder / name)
    run = _drive(tmp_path, 1, 2, TMPDIR=str(short_folder))
    _wait_for_lines(run, tmp_path / "steps.jsonl", 1)
    family = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
    assert len(family) >= 3
    shared = {part.path for process in family for part in process.memory_maps() if part.path.startswith("/dev/shm/")}
    run.send_signal(signal.SIGKILL)
    run.wait()
    _, alive = psutil.wait_procs(family[1:], timeout=60)  # the workers notice that their parent is gone
    assert not alive
    assert not [path for path in shared if Path(path).exists()]
    assert not list(short_folder.rglob("*filelock*"))
    assert _drive(tmp_path, 1, 0).wait(120) == 0


def _damage(clips: Path, partition: int, at: float) -> None:
    """Flips a bit of a shard, at a share of its length."""
    (shard,) = (clips / "parts" / f"{partition:05d}").glob("*.mds")
    data = bytearray(shard.read_bytes())
    data[int(len(data) * at)] ^= 1
    shard.write_bytes(bytes(data))


def test_a_damaged_sample_ends_the_run_by_name_or_is_masked_and_counted(tmp_path: Path) -> None:
    write_clips(tmp_path / "clips", 8)
    text = write_text(tmp_path / "text.jsonl", 20)
    sources: list[dict[str, Any]] = [
        {"path": str(tmp_path / "clips")},
        {"path": str(text), "source_name": "openai_messages"},
    ]
    data = data_config(sources, tmp_path / "cache", max_seq_len=1024)
    setup = Setup(data, BatchConfig(global_batch_size=2))
    whole = {
        key: (batch, i) for step in setup.loader() for batch in step.micro_batches for i, key in enumerate(batch.keys)
    }
    _damage(tmp_path / "clips", 1, 0.5)
    with pytest.raises(
        VerificationError, match=r"parts/00001/shard.00000.mds: sample \d: .*crc.*data.dead_samples: mask"
    ):
        list(setup.loader())
    loader = setup.loader(dead_samples="mask")
    found = {key: (batch, i) for step in loader for batch in step.micro_batches for i, key in enumerate(batch.keys)}
    assert found.keys() == whole.keys()
    assert len(loader.dead) == 1
    dead = loader.dead[0]
    assert dead.source == "clips" and "crc" in dead.reason
    for key, (batch, i) in found.items():
        old, place = whole[key]
        assert batch.sample_tokens[i] == old.sample_tokens[place]
        assert batch.label_tokens[i] == (0 if key == dead.key else old.label_tokens[place])
    batch, i = found[dead.key]
    start, stop = batch.cu_seqlens[i : i + 2].tolist()
    old, place = whole[dead.key]
    assert torch.equal(batch.ids[0, start:stop], old.ids[0, slice(*old.cu_seqlens[place : place + 2].tolist())])
    assert (batch.labels[0, start:stop] == -100).all()
    assert batch.features is not None and old.features is not None
    assert batch.features.patches.shape == old.features.patches.shape
    assert batch.features.mel.shape == old.features.mel.shape


def test_rows_that_cannot_be_used_are_said_before_training(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.jsonl", 30)
    with open(text, "a") as file:
        file.write("no json\n")
        file.write(json.dumps({"messages": [{"role": "user", "content": "word " * 900}]}) + "\n")
    data = data_config([{"path": str(text), "source_name": "openai_messages"}], tmp_path / "cache")
    setup = Setup(data, BatchConfig(global_batch_size=2))
    notes = "\n".join(plan_notes(setup.plans, setup.sources))
    assert "1 of 32 rows are longer than data.max_seq_len 512 and are left out" in notes
    assert "1 of 32 rows cannot be used; the first: " in notes and "is no JSON" in notes
    used = [key for step in setup.loader() for key in keys_of(step)]
    assert sorted(used) == sorted(f"text{i}" for i in range(30))


def test_wait_is_measured(setup: Setup) -> None:
    loader = setup.loader()
    steps = list(islice(loader, 2))
    assert 0 < sum(step.wait_s for step in steps) == pytest.approx(loader.wait_s)
    assert np.isfinite(loader.wait_s)


@pytest.mark.parametrize(
    ("workers", "factor", "micro_steps", "each"), [(2, None, 8, 4), (2, None, 1, 2), (3, None, 8, 3), (2, 1, 8, 1)]
)
def test_workers_make_a_step_ahead(workers: int, factor: int | None, micro_steps: int, each: int) -> None:
    assert made_ahead(DataloaderConfig(num_workers=workers, prefetch_factor=factor), micro_steps) == each


def test_batches_of_workers_hold_no_file_descriptors_and_a_killed_worker_is_told(setup: Setup) -> None:
    dataloader = setup.data.dataloader.model_copy(update={"num_workers": 1, "prefetch_factor": 1})
    iterator = iter(setup.loader(dataloader=dataloader))
    step = next(iterator)
    assert not any(tensor.is_shared() for batch in step.micro_batches for tensor in batch.tensors().values())
    (worker,) = (p for p in psutil.Process().children(recursive=True) if p.name() == "pt_data_worker")
    worker.kill()
    with pytest.raises(OmniloomError, match="a worker was killed, often for lack of memory"):
        list(iterator)


@pytest.mark.parametrize("fault", [ConnectionResetError(104, "Connection reset by peer"), EOFError()], ids=repr)
def test_a_worker_killed_while_it_hands_over_a_batch_is_told(fault: Exception) -> None:
    def received() -> Iterator[Batch]:
        raise fault
        yield  # a generator

    with pytest.raises(OmniloomError, match="a worker was killed, often for lack of memory"):
        list(_batches(cast(Any, received()), None))


def test_the_end_does_not_wait_for_a_batch_in_the_making(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, going_on = threading.Event(), threading.Event()

    def slowly() -> Iterator[Batch]:
        asked.set()
        assert going_on.wait(60)
        yield from ()

    monkeypatch.setattr(device, "_CLOSE_S", 0.01)
    prefetcher = device.DevicePrefetcher(slowly(), device.Destination(torch.device("cpu")), omni_assets(), 1)
    assert asked.wait(60)
    prefetcher.close()
    assert prefetcher._thread.is_alive()
    going_on.set()
    prefetcher._thread.join(60)
    assert not prefetcher._thread.is_alive()


def test_opening_says_what_a_user_should_know(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_clips(tmp_path / "clips", 3)
    data = data_config([{"path": str(tmp_path / "clips")}], tmp_path / "cache", lanes=64)
    with caplog.at_level(logging.INFO, "omniloom.train"):
        open_data(data, BatchConfig(global_batch_size=8), omni_assets(), show=False)
        assert caplog.text == ""
        open_data(data, BatchConfig(global_batch_size=8), omni_assets())
    assert "data.lanes lowered from 64 to 1" in caplog.text
    assert "of 8 packed sequences of the first epoch hold padding alone" in caplog.text
    assert "the data fill less than one step: lower train.global_batch_size" in caplog.text
