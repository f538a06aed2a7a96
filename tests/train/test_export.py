"""Checkpoints of native models exported by a process of its own: the weights come back bit by bit."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from convert.output import REPORT
from schemas.errors import ConfigError, OmniloomError
from tests.convert.models import make_omni, make_text, read_weights
from train.checkpoint import Checkpointer
from train.config import CheckpointConfig
from train.export import Exporter, check_exportable, main
from train.models.spec import build_foundation_model
from train.ops.registry import eager_ops


def trained(base: Path, folder: Path, *steps: int) -> nn.Module:
    """The model of a directory after a step of AdamW on random gradients, saved."""
    model = build_foundation_model(base, eager_ops())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    files = {"config.json": (base / "config.json").read_bytes(), "tokenizer.json": b"{}"}
    config = CheckpointConfig(output_dir=str(folder), keep_last=0)
    keeper = Checkpointer(config, rank=0, world_size=1, family=model.config.model_type, files=files)
    for step in steps:
        keeper.save(step, model, optimizer, {}, final=True)
    return model


def same(model: nn.Module, exported: Path) -> bool:
    again = dict(build_foundation_model(exported, eager_ops()).named_parameters())
    return all(torch.equal(parameter, again[name]) for name, parameter in model.named_parameters())


def test_a_text_model_needs_no_base(tmp_path: Path) -> None:
    base, folder = make_text(tmp_path / "base"), tmp_path / "output"
    model = trained(base, folder, 1, 2)
    held: list[str] = []
    exporter = Exporter(folder, None, hold=lambda it: held.append(it.name), release=lambda it: held.remove(it.name))
    exporter.start(folder / "step_1")
    exporter.start(folder / "step_2")
    exporter.start(folder / "step_2")  # it waits already
    assert held == ["step_1", "step_2"]
    assert exporter.poll() == "exporting step_1"
    exporter.wait()
    assert held == [] and exporter.poll() is None
    for step in ("step_1", "step_2"):
        assert same(model, folder / "hf" / step)
    assert set(read_weights(folder / "hf" / "step_2")) == set(read_weights(base))
    assert (folder / "hf" / "step_2" / "tokenizer.json").is_file()


def test_a_thinker_becomes_a_whole_omni(tmp_path: Path) -> None:
    base, folder = make_omni(tmp_path / "base"), tmp_path / "output"
    model = trained(base, folder, 7)
    exporter = Exporter(folder, base)
    exporter.start(folder / "step_7")
    exporter.wait()
    assert same(model, folder / "hf" / "step_7")
    before, after = read_weights(base), read_weights(folder / "hf" / "step_7")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) != name.startswith("thinker."), name


def script(folder: Path, text: str) -> str:
    """Stands for the interpreter that runs the export."""
    path = folder / "script"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_what_fails_is_told_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", script(tmp_path, 'echo "writing: 1 GB"; echo "error: no config"; exit 2'))
    exporter = Exporter(tmp_path, tmp_path / "base")
    exporter.start(tmp_path / "step_1")
    with pytest.raises(ConfigError) as found:
        exporter.wait()
    source, output = tmp_path / "step_1", tmp_path / "hf" / "step_1"
    assert str(found.value) == (
        f"{output}: the export failed: no config; again by: omniloom convert dcp-to-hf {source} {output} "
        f"--base {tmp_path}/base"
    )
    exporter.wait()  # told once
    monkeypatch.setattr("sys.executable", script(tmp_path, "exit 1"))
    exporter.start(tmp_path / "step_2")
    with pytest.raises(OmniloomError, match=r"ended with 1, see \S+/hf/step_2\.log"):
        exporter.wait()


def test_an_export_can_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.executable", script(tmp_path, "exec sleep 60"))
    exporter = Exporter(tmp_path, None)
    exporter.start(tmp_path / "step_2")
    assert exporter.poll() == "exporting step_2"
    process = exporter._running
    assert process is not None
    began = time.monotonic()
    exporter.start(tmp_path / "step_4")
    with caplog.at_level("WARNING", logger="omniloom.train"):
        exporter.stop()
    assert time.monotonic() - began < 30 and exporter.poll() is None
    assert "step_4: is not exported yet" in caplog.text and f"dcp-to-hf {tmp_path / 'step_4'} " in caplog.text
    with pytest.raises(ProcessLookupError):
        os.kill(process.process.pid, 0)


def test_a_missing_configuration_is_an_error_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["export", str(tmp_path), str(tmp_path / "out")])
    monkeypatch.setattr("os.nice", lambda by: by)
    assert main() == 2
    assert (
        capfd.readouterr().err == f"error: {tmp_path}: holds no torch distributed checkpoints (.metadata); name one\n"
    )


def test_a_family_that_cannot_be_exported_is_told_at_the_start() -> None:
    check_exportable("qwen3_omni_moe_thinker")
    with pytest.raises(ConfigError, match="save_hf_weights: a llama cannot be exported"):
        check_exportable("llama")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(base, output) with an export of step 1."""
    folder = tmp_path_factory.mktemp("whole")
    base, output = make_text(folder / "base"), folder / "output"
    trained(base, output, 1)
    exporter = Exporter(output, base)
    exporter.start(output / "step_1")
    exporter.wait()
    return base, output


def copied(whole: tuple[Path, Path], folder: Path) -> tuple[Path, Path]:
    """With the times of the files, as an archive has them."""
    places = [Path(shutil.copytree(path, folder / path.name)) for path in whole]
    return places[0], places[1]


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}


def test_a_whole_export_is_left_alone(
    whole: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    base, output = copied(whole, tmp_path)
    before = contents(output / "hf" / "step_1")
    monkeypatch.setattr("sys.executable", script(tmp_path, "exit 1"))  # no process is started
    held: list[Path] = []
    exporter = Exporter(output, base, hold=held.append, release=held.remove)
    with caplog.at_level("INFO", logger="omniloom.train"):
        exporter.start(output / "step_1")
        exporter.start(output / "step_1")
    assert exporter.poll() is None and held == []
    exporter.wait()
    assert caplog.text.count(f"{output / 'hf' / 'step_1'}: is exported already") == 1
    assert contents(output / "hf" / "step_1") == before
    assert (output / "hf" / "step_1.log").read_bytes() == (whole[1] / "hf" / "step_1.log").read_bytes()


def unfinished(export: Path, fingerprint: str = "") -> None:
    """As a kill leaves it in the middle of the first file."""
    found = fingerprint or json.loads((export / REPORT).read_text())["fingerprint"]
    shutil.rmtree(export)
    partial = export.with_name("step_1.partial")
    partial.mkdir()
    (partial / "journal.jsonl").write_text(json.dumps({"fingerprint": found, "begun": "this"}) + "\n")
    (partial / "model.safetensors.tmp").write_bytes(b"half")


MISSING: dict[str, Callable[[Path], object]] = {
    "there is none": shutil.rmtree,
    "an empty folder": lambda export: (shutil.rmtree(export), export.mkdir()),
    "it was not finished": lambda export: unfinished(export),
    "one of another checkpoint was not finished": lambda export: unfinished(export, "0" * 64),
}


@pytest.mark.parametrize("what", MISSING)
def test_a_missing_export_is_made(whole: tuple[Path, Path], tmp_path: Path, what: str) -> None:
    base, output = copied(whole, tmp_path)
    export = output / "hf" / "step_1"
    weights = read_weights(export)
    MISSING[what](export)
    exporter = Exporter(output, base)
    exporter.start(output / "step_1")
    assert exporter.poll() == "exporting step_1"
    exporter.wait()
    again = read_weights(export)
    assert again.keys() == weights.keys() and all(torch.equal(again[name], it) for name, it in weights.items())
    assert {path.name for path in export.parent.iterdir()} == {"step_1", "step_1.log"}


def rewrite(path: Path) -> None:
    """With other bytes of the same number."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


OTHER: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "the checkpoint was saved anew": (lambda base, output: trained(base, output, 1), "it was made of other inputs"),
    "a file is gone": (lambda base, output: (output / "hf/step_1/config.json").unlink(), "its config.json is missing"),
    "a file was changed": (lambda base, output: rewrite(output / "hf/step_1/model.safetensors"), "written to later"),
    "its record is damaged": (lambda base, output: (output / "hf/step_1" / REPORT).write_text("{"), "is damaged"),
}


@pytest.mark.parametrize("what", OTHER)
def test_another_export_is_moved_aside(
    whole: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """It may be the only one of its weights."""
    base, output = copied(whole, tmp_path)
    change, said = OTHER[what]
    change(base, output)
    before = contents(output / "hf" / "step_1")
    (output / "hf" / "step_1.before-1").mkdir()
    exporter = Exporter(output, base)
    exporter.start(output / "step_1")
    assert exporter.poll() == "exporting step_1"
    assert said in caplog.text and "it is called step_1.before-2 now" in caplog.text
    exporter.wait()
    assert contents(output / "hf" / "step_1.before-2") == before
    again = Exporter(output, base)
    again.start(output / "step_1")
    assert again.poll() is None and again.done == [output / "hf" / "step_1"]


def test_another_base_is_told(whole: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It may be the same one, downloaded again at each start: no copy of the export for each."""
    base, output = copied(whole, tmp_path)
    os.utime(base / "model.safetensors", (1, 1))
    before = contents(output / "hf" / "step_1")
    exporter = Exporter(output, base)
    exporter.start(output / "step_1")
    assert exporter.poll() is None and exporter.done == []
    assert "step_1: was made with another base; rename it, and it is made anew" in caplog.text
    assert contents(output / "hf" / "step_1") == before
    assert [path.name for path in (output / "hf").iterdir() if path.is_dir()] == ["step_1"]


def test_what_is_in_the_way_is_told(whole: tuple[Path, Path], tmp_path: Path) -> None:
    """A checkpoint or base that cannot be read moves nothing; a link or a file is another's."""
    base, output = copied(whole, tmp_path)
    export = output / "hf" / "step_1"
    (base / "config.json").unlink()
    exporter = Exporter(output, base)
    exporter.start(output / "step_1")
    with pytest.raises(OmniloomError, match=r"config\.json"):
        exporter.wait()
    assert export.is_dir() and not export.with_name("step_1.before-1").exists()
    base, output = copied(whole, tmp_path / "linked")
    export = output / "hf" / "step_1"
    export.rename(tmp_path / "elsewhere")
    export.symlink_to(tmp_path / "elsewhere")
    exporter = Exporter(output, base)
    exporter.start(output / "step_1")
    assert exporter.poll() is None and exporter.done == [export]  # it is what it should be
    (export / "config.json").unlink()
    exporter = Exporter(output, base)
    exporter.start(output / "step_1")
    with pytest.raises(ConfigError, match=r"is not the result of this conversion: its config\.json is missing"):
        exporter.wait()
    assert export.is_symlink() and not export.with_name("step_1.before-1").exists()
