"""Checkpoints of native models exported by a process of its own: the weights come back bit by bit."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

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
    assert time.monotonic() - began < 10 and exporter.poll() is None
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
