"""When checkpoints are exported: where it is due, also between saves, and what a stop left."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from schemas.errors import IncompleteSourceError, ResumableError
from tests import dist as processes
from tests.train.stand_in import Trainer
from tests.train.test_trainer import Watch
from tests.train.tiny import omni_config, write_data
from train.agreement import Agreement
from train.callbacks.export import ExportCallback
from train.config import OmniConfig
from train.export import Exporter
from train.trainer import make_trainer


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the checkpoints that were to be exported; none is."""
    names: list[str] = []
    monkeypatch.setattr("train.export.Exporter.start", lambda self, checkpoint: names.append(checkpoint.name))
    return names


def config_of(folder: Path, sources: list[dict[str, Any]], **checkpoint: Any) -> OmniConfig:
    values = omni_config(folder, sources, max_steps=7).model_dump()
    values["train"]["checkpoint"] |= {"save_async": False, "save_hf_weights": False, "keep_last": 0} | checkpoint
    return OmniConfig.model_validate(values)


@pytest.mark.parametrize("save_steps", [0, 2])
def test_a_step_that_is_exported_is_saved(
    tmp_path: Path, sources: list[dict[str, Any]], started: list[str], save_steps: int
) -> None:
    trainer = make_trainer(config_of(tmp_path, sources, save_steps=save_steps, hf_save_steps=3))
    trainer.train()
    assert started == ["step_3", "step_6"]
    assert (trainer.checkpointer.output_dir / "step_3").is_dir()


def test_what_a_stop_left_is_exported_when_training_goes_on(
    tmp_path: Path, sources: list[dict[str, Any]], started: list[str]
) -> None:
    config = config_of(tmp_path, sources, save_steps=2, hf_save_steps=2)
    with pytest.raises(ResumableError):
        make_trainer(config, callbacks=[Watch(stop_after=5)]).train()
    assert started == ["step_2", "step_4"]
    started.clear()
    trainer = make_trainer(config)
    trainer.train()
    assert any(isinstance(callback, ExportCallback) for callback in trainer.callbacks)
    assert started == ["step_2", "step_4", "step_6"]  # the exporter leaves alone what came to its end


def test_a_finished_training_leaves_its_export_alone(
    tmp_path: Path, sources: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, sources, save_hf_weights=True, hf_save_steps=4)
    make_trainer(config).train()
    exports = tmp_path / "output" / "hf"
    times = {path: path.stat().st_mtime_ns for path in exports.rglob("*")}
    assert {path.name for path in exports.iterdir()} == {"step_4", "step_4.log", "step_7", "step_7.log"}
    caplog.clear()
    with monkeypatch.context() as patched, caplog.at_level("INFO", "omniloom.train"):
        patched.setattr("sys.executable", "/bin/false")
        make_trainer(config).train()
    assert "nothing is left to train" in caplog.text
    for step in ("step_4", "step_7"):
        assert caplog.text.count(f"{exports / step}: is exported already") == 1
    assert {path: path.stat().st_mtime_ns for path in exports.rglob("*")} == times
    shutil.rmtree(exports / "step_7")  # the export had failed
    make_trainer(config).train()
    assert (exports / "step_7" / "omniloom_conversion.json").is_file()
    assert (exports / "step_4").stat().st_mtime_ns == times[exports / "step_4"]


class SlowExporter(Exporter):
    """Takes a second for the last export, and then fails or not."""

    def __init__(self, folder: Path, *, fails: bool) -> None:
        super().__init__(folder, None)
        self.fails = fails

    def start(self, checkpoint: Path) -> None:
        """Nothing runs."""

    def wait(self) -> None:
        time.sleep(1.0)
        if self.fails:
            raise IncompleteSourceError("no export today")


def _end(folder: Path) -> list[tuple[float, str]]:
    """(when the end of training was over on this rank, what it raised), for an export that ends well and one that
    does not."""
    rank, found = dist.get_rank(), []
    for fails in (False, True):
        exporter = SlowExporter(folder, fails=fails) if rank == 0 else None
        trainer = Trainer(folder, [ExportCallback(exporter)])
        trainer.ranks = Agreement(rank, dist.get_world_size(), dist.group.WORLD)
        said = ""
        try:
            trainer.call("on_train_end")
        except IncompleteSourceError as error:
            said = str(error)
        found.append((time.time(), said))
    return found


def test_all_ranks_wait_for_the_last_export(tmp_path: Path) -> None:
    """Else launchers of other nodes, whose ranks have ended, end the one that exports after some minutes."""
    began = time.time()
    for well, ill in processes.run(2, _end, tmp_path):
        assert well[0] - began >= 1.0 and ill[0] - well[0] >= 0.9
        assert (well[1], ill[1]) == ("", "no export today")
