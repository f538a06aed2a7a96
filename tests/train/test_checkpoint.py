"""Checkpoints of one process: exact resume, what is kept, what is refused. Two ranks: test_checkpoint_ranks."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from convert.trainer import find_step as convert_find_step
from schemas.errors import ConfigError, IncompleteSourceError, OmniloomError, UnsafeInputError, UnsupportedError
from tests.train.tiny_training import Training, checkpointer, equal
from train.checkpoint import Checkpointer
from train.checkpoint_io import StepWriter
from train.checkpoint_layout import begin, saved_steps, tidy
from train.checkpoint_state import clean_name
from train.config import CheckpointConfig


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output_dir with steps 1 and 2; do not change it."""
    folder = tmp_path_factory.mktemp("run") / "output"
    course, keeper = Training.start(1), checkpointer(folder, save_async=False)
    for step in (1, 2):
        course.step()
        course.save(keeper, step)
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


@pytest.mark.parametrize("save_async", [True, False])
def test_training_goes_on_exactly(tmp_path: Path, save_async: bool) -> None:
    """Losses, moments, step counters, learning rates and every generator; the model changes while it is written."""
    keeper = checkpointer(tmp_path, save_async=save_async)
    course = Training.start(1)
    course.steps(3)
    course.save(keeper, 3)
    losses, rates, whole = course.steps(4), course.rates(), course.whole()
    keeper.wait()
    again = Training.start(1, seed=8)
    assert not again.optimizer.state
    state = again.load(checkpointer(tmp_path), tmp_path / "step_3")
    assert state["step"] == 3 and state["scheduler"]["last_epoch"] == 3
    assert again.steps(4) == losses
    assert again.rates() == rates and equal(again.whole(), whole)
    assert len(again.optimizer.state) == len(course.optimizer.state) == 4  # the unused parameter has none


def test_several_saves_share_staging_and_stay_apart(tmp_path: Path) -> None:
    keeper, course, wholes = checkpointer(tmp_path, keep_last=0), Training.start(1), {}
    for step in (1, 2, 3):
        course.step()
        wholes[step] = course.whole()
        course.save(keeper, step)
    keeper.wait()
    for step, whole in wholes.items():
        again = Training.start(1, seed=4)
        again.load(checkpointer(tmp_path), tmp_path / f"step_{step}")
        assert equal(again.whole(), whole)


def test_the_files_are_those_of_the_layout(run: Path) -> None:
    assert sorted(path.name for path in run.iterdir()) == ["LATEST", "step_1", "step_2"]
    assert (run / "LATEST").read_text() == "step_2"
    assert convert_find_step(run) == (run / "step_2", run / "step_2")
    names = {path.name for path in (run / "step_2").iterdir()}
    assert {".metadata", "COMPLETE", "state.json", "config.json", "rng"} <= names and "OWNER" not in names
    state = json.loads((run / "step_2" / "state.json").read_text())
    assert (state["version"], state["family"], state["step"], state["world_size"]) == (1, "qwen3", 2, 1)
    groups = state["optimizer"]["groups"]
    assert [group["params"] for group in groups] == [
        ["inner.weight", "head.weight"],
        ["unused", "inner.bias", "head.bias"],
    ]
    assert groups[1]["values"]["initial_lr"] == 0.02 and groups[0]["values"]["betas"] == [0.9, 0.95]
    metadata = torch.distributed.checkpoint.FileSystemReader(run / "step_2").read_metadata()
    assert "model.inner.weight" in metadata.state_dict_metadata
    assert "optimizer.state.head.bias.exp_avg_sq" in metadata.state_dict_metadata
    kinds = {type(entry).__name__ for entry in metadata.state_dict_metadata.values()}
    assert kinds == {"TensorStorageMetadata"}  # nothing is pickled


def test_only_the_newest_stay(tmp_path: Path) -> None:
    keeper, course = checkpointer(tmp_path, keep_last=2, save_async=False), Training.start(1)
    keeper.hold(tmp_path / "step_1")
    for step in (1, 2, 3, 4):
        course.step()
        course.save(keeper, step)
    assert [saved.step for saved in saved_steps(tmp_path)] == [1, 3, 4]
    keeper.release(tmp_path / "step_1")
    course.save(keeper, 5)
    assert [saved.step for saved in saved_steps(tmp_path)] == [4, 5]
    assert [path.name for path in keeper.take_committed()] == [f"step_{n}" for n in (1, 2, 3, 4, 5)]
    assert keeper.take_committed() == []


def test_a_step_is_written_once(tmp_path: Path) -> None:
    keeper, course = checkpointer(tmp_path), Training.start(1)
    course.step()
    course.save(keeper, 1)
    course.save(keeper, 1, final=True)
    first = (tmp_path / "step_1" / "COMPLETE").stat().st_mtime_ns
    again = checkpointer(tmp_path)
    course.load(again, tmp_path / "step_1")
    course.save(again, 1, final=True)
    assert (tmp_path / "step_1" / "COMPLETE").stat().st_mtime_ns == first


def test_after_going_back_the_new_course_counts(copy: Path) -> None:
    """Step 2 of the new course replaces that of the old one; the newest is the one that was saved last."""
    keeper = checkpointer(copy, load_path=str(copy / "step_1"), save_async=False)
    course = Training.start(1, seed=6)
    course.load(keeper, keeper.find() or Path())
    course.optimizer.param_groups[0]["weight_decay"] = 0.7
    course.step()
    course.save(keeper, 2)
    assert [(saved.number, saved.step) for saved in saved_steps(copy)] == [(1, 1), (3, 2)]
    again = Training.start(1)
    again.load(checkpointer(copy), copy / "step_2")
    assert again.optimizer.param_groups[0]["weight_decay"] == 0.7
    keeper = checkpointer(copy, load_path=str(copy / "step_1"), save_async=False, keep_last=1)
    course.load(keeper, copy / "step_1")
    course.save(keeper, 1, final=True)  # loaded from there, so nothing is written
    shutil.copytree(copy / "step_2", copy / "step_9")
    (copy / "step_9" / "COMPLETE").write_text("{}")  # a marker of somebody else is older than all of ours
    assert checkpointer(copy).find() == copy / "step_2"


def test_load_path(run: Path, tmp_path: Path) -> None:
    assert checkpointer(run).find() == run / "step_2"
    assert checkpointer(run, load_path=None).find() is None
    assert checkpointer(tmp_path / "new").find() is None
    assert checkpointer(tmp_path, load_path=str(run / "step_1")).find() == run / "step_1"
    assert checkpointer(tmp_path, load_path=str(run)).find() == run / "step_2"
    with pytest.raises(ConfigError, match=r"load_path: .*nowhere is no directory"):
        checkpointer(tmp_path, load_path=str(tmp_path / "nowhere")).find()
    with pytest.raises(ConfigError, match="is no checkpoint of a training run"):
        checkpointer(tmp_path, load_path=str(tmp_path)).find()


def test_a_half_written_step_is_never_taken(copy: Path) -> None:
    shutil.copytree(copy / "step_2", copy / "step_3.tmp-00ff00ff")
    shutil.copytree(copy / "step_2", copy / "step_4")
    (copy / "step_4" / "COMPLETE").unlink()
    (copy / "step_5").mkdir()
    (copy / "LATEST").write_text("step_4")
    assert checkpointer(copy).find() == copy / "step_2"
    for name in ("step_4", "step_3.tmp-00ff00ff"):
        with pytest.raises(IncompleteSourceError, match="was not saved to its end"):
            checkpointer(copy, load_path=str(copy / name)).find()


def test_what_dead_runs_left_is_removed_and_that_of_a_live_one_is_not(copy: Path) -> None:
    mine = begin(copy, 7)
    dead = begin(copy, 8)
    owner = json.loads((dead / "OWNER").read_text())
    (dead / "OWNER").write_text(json.dumps(owner | {"started": owner["started"] + 1}))  # its number is another's now
    gone = begin(copy, 9)
    (gone / "OWNER").write_text(json.dumps(owner | {"pid": 2**22 + 1}))
    elsewhere = begin(copy, 10)
    (elsewhere / "OWNER").write_text(json.dumps(owner | {"host": "other"}))
    (copy / "step_1.old-0123abcd").mkdir()
    tidy(copy, keep_last=0)
    assert {path.name for path in copy.iterdir()} == {"LATEST", "step_1", "step_2", mine.name, elsewhere.name}
    old = os.stat(copy).st_mtime - 2 * 24 * 3600
    for path in (*elsewhere.rglob("*"), elsewhere):
        os.utime(path, (old, old))
    tidy(copy, keep_last=0)
    assert not elsewhere.exists()


def test_a_save_that_fails_leaves_nothing_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    course = Training.start(1)
    course.step()
    keeper = checkpointer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("train.checkpoint_io.StepWriter.write_data", broken)
        course.save(keeper, 1)
        with pytest.raises(OmniloomError, match=r"could not be written: rank 0: OSError: .*No space left"):
            course.save(keeper, 2)
    assert list(tmp_path.iterdir()) == []
    course.save(keeper, 3, final=True)
    assert checkpointer(tmp_path).find() == tmp_path / "step_3"


def test_what_a_kill_left_undone_is_ended(copy: Path) -> None:
    """Between the rename of a checkpoint and what follows it."""
    newest = saved_steps(copy)[-1].path
    (copy / "LATEST").write_text("step_1")
    (newest / "OWNER").write_text("{}")
    checkpointer(copy).mend()
    assert (copy / "LATEST").read_text() == newest.name and not (newest / "OWNER").exists()
    before = (copy / "LATEST").stat().st_mtime_ns
    checkpointer(copy).mend()
    assert (copy / "LATEST").stat().st_mtime_ns == before
    checkpointer(copy / "nothing").mend()


def test_how_far_a_save_is_can_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, write = threading.Event(), StepWriter.write_data

    def slow(writer: StepWriter, *arguments: Any) -> Any:
        assert go_on.wait(60)
        return write(writer, *arguments)

    monkeypatch.setattr(StepWriter, "write_data", slow)
    keeper, course = checkpointer(tmp_path), Training.start(1)
    course.save(keeper, 1)
    assert keeper.status() == "saving step 1: 0.0 of 0.0 GB"
    assert keeper.take_committed() == []
    go_on.set()
    keeper.wait()
    assert keeper.status() is None and keeper.take_committed() == [tmp_path / "step_1"]


def load(folder: Path, **keys: Any) -> None:
    keeper = checkpointer(folder, **keys)
    Training.start(1).load(keeper, folder / "step_2")


def test_a_foreign_or_damaged_checkpoint_is_refused(copy: Path) -> None:
    step = copy / "step_2"
    with pytest.raises(ConfigError, match="is a checkpoint of a qwen3; the model is a qwen3_moe"):
        load(copy, family="qwen3_moe")
    state = json.loads((step / "state.json").read_text())
    for change, kind, message in (
        ({"version": 7}, UnsupportedError, "has version 7"),
        ({"world_size": "two"}, IncompleteSourceError, "world_size is missing or of the wrong kind"),
        ({"optimizer": {"groups": 5}}, IncompleteSourceError, "no valid record of the optimizer"),
    ):
        (step / "state.json").write_text(json.dumps(state | change))
        with pytest.raises(kind, match=message):
            load(copy)
    (step / "state.json").write_text("{")
    with pytest.raises(IncompleteSourceError, match=r"state\.json: is not valid JSON"):
        load(copy)
    (step / "state.json").unlink()
    with pytest.raises(ConfigError, match="it is no checkpoint of a training run"):
        load(copy)
    (step / "state.json").write_text(json.dumps(state))
    (step / "rng" / "rank_0.json").unlink()
    with pytest.raises(IncompleteSourceError, match=r"rank_0\.json: does not exist"):
        load(copy)
    shard = next(step.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-9])
    with pytest.raises(IncompleteSourceError, match="is truncated"):
        load(copy)
    shard.unlink()
    with pytest.raises(IncompleteSourceError, match="does not exist"):
        load(copy)


def test_a_flipped_bit_is_found(copy: Path) -> None:
    """In the data of one tensor, where torch itself sees nothing wrong."""
    weights = Training.start(1)
    weights.load(checkpointer(copy), copy / "step_2")
    data = weights.model.get_parameter("head.weight").detach().numpy().tobytes()
    (shard,) = [path for path in (copy / "step_2").glob("*.distcp") if data in path.read_bytes()]
    content = bytearray(shard.read_bytes())
    content[content.index(data) + 5] ^= 1
    shard.write_bytes(content)
    with pytest.raises(IncompleteSourceError, match=r"distcp: the record at byte \d+ is damaged: Bad CRC-32"):
        load(copy)


class Evil:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("ran",))


def test_no_pickle_is_executed(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copy)
    step = copy / "step_2"
    good = (step / ".metadata").read_bytes()
    (step / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UnsafeInputError) as found:
        load(copy)
    assert found.value.exit_code == 6
    metadata = pickle.loads(good)  # our own file
    name = "model.inner.weight"
    place = next(info for index, info in metadata.storage_data.items() if index.fqn == name)
    data = bytearray((step / place.relative_path).read_bytes())
    evil = pickle.dumps(Evil(), protocol=2).ljust(place.length, b" ")
    data[place.offset : place.offset + place.length] = evil
    (step / ".metadata").write_bytes(good)
    (step / place.relative_path).write_bytes(data)
    with pytest.raises(OmniloomError):
        load(copy)
    assert not (copy / "ran").exists()


def test_another_model_or_optimizer_is_named(copy: Path) -> None:
    keeper = checkpointer(copy)
    course = Training.start(1)
    course.model.extra = nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigError, match=r"lacks 1 tensors of the model: model\.extra"):
        course.load(keeper, copy / "step_2")
    course = Training.start(1)
    del course.model.unused
    with pytest.raises(ConfigError, match=r"has 1 tensors that the model does not have: model\.unused"):
        course.load(keeper, copy / "step_2")
    course = Training.start(1)
    course.model.bfloat16()
    with pytest.raises(ConfigError, match=r"model\.\S+ is float32 .* in the checkpoint and bfloat16 .* in the model"):
        course.load(keeper, copy / "step_2")
    course = Training.start(1)
    frozen = course.optimizer.param_groups[0]["params"].pop()
    with pytest.raises(ConfigError, match=r"head\.weight.*is not trained now"):
        course.load(keeper, copy / "step_2")
    course.optimizer.param_groups[1]["params"].append(frozen)
    with pytest.raises(ConfigError, match="2 groups of 2, 3 parameters, now 2 of 1, 4"):
        course.load(keeper, copy / "step_2")


def test_weights_alone_can_be_loaded(run: Path) -> None:
    reference, model = Training.start(1), Training.start(1, seed=3).model
    reference.load(checkpointer(run), run / "step_2")
    checkpointer(run).load(run / "step_2", model, None)
    assert equal(dict(model.state_dict()), dict(reference.model.state_dict()))


def test_changed_settings_are_told(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    course = Training.start(1)
    for group in course.optimizer.param_groups:
        group["betas"] = (0.5, 0.95)
    course.optimizer.param_groups[0]["weight_decay"] = 0.3
    course.load(checkpointer(run), run / "step_2")
    assert course.optimizer.param_groups[0]["weight_decay"] == 0.1
    said = [record.message for record in caplog.records if record.name == "omniloom.train"]
    assert len([line for line in said if "betas" in line]) == 1  # of all groups together
    (line,) = [line for line in said if "weight_decay" in line]
    assert line.startswith("optimizer, weight_decay of decay: 0.1 in the checkpoint and 0.3 in the configuration; ")
    assert "start from the exported weights" in line


def test_wrappers_do_not_change_names() -> None:
    assert clean_name("layers.0._checkpoint_wrapped_module.mlp.weight") == "layers.0.mlp.weight"
    assert clean_name("_orig_mod.layers.0.weight") == "layers.0.weight"


def test_an_object_store_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="s3://bucket/out is no folder"):
        Checkpointer(CheckpointConfig(output_dir="s3://bucket/out"), rank=0, world_size=1, family="qwen3")
