"""Which files beside the weights go along: those that describe a model, and none that is large."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from convert import small_files
from convert.job import Options, run
from convert.model_config import carried_files
from convert.trainer import dcp_to_hf_conversion, hf_to_dcp_conversion
from schemas.errors import ConfigError
from tests.convert.models import make_text

ALONG = (
    "tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "preprocessor_config.json",
    "generation_config.json", "README.md", "LICENSE", "LICENSE.txt", "NOTICE", "qwen.tiktoken", "configuration.json",
)  # fmt: skip
NOT_ALONG = (
    "__0_0.distcp", "pytorch_model.bin.index.json", "optimizer.pt", "training_args.bin", "rng_state_0.pth",
    "trainer_state.json",
    "events.out.tfevents.1", "modeling_qwen.py", "data.jsonl", "notes.txt", "core", "state.json", ".gitattributes",
    "model.safetensors.index.json", "consolidated.safetensors", "omniloom_conversion.json", "COMPLETE",
)  # fmt: skip


def test_only_what_describes_a_model(tmp_path: Path) -> None:
    for name in ALONG + NOT_ALONG:
        (tmp_path / name).write_text("x")
    (tmp_path / "LICENSE.d").mkdir()
    assert sorted(carried_files(tmp_path)) == sorted(ALONG)


def test_a_large_file_is_refused_and_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").touch()
    os.truncate(tmp_path / "tokenizer.json", 1 << 40)  # a hole: nothing on the disk
    with pytest.raises(ConfigError, match=r"tokenizer\.json: has 1099511627776 bytes"):
        carried_files(tmp_path)
    (tmp_path / "tokenizer.json").write_text("x" * 100)
    monkeypatch.setattr(small_files, "CARRIED_LIMIT", 99)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: has 100 bytes"):
        carried_files(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    assert carried_files(tmp_path) == {}


def test_a_training_checkpoint_gives_its_small_files_only(tmp_path: Path) -> None:
    """Without --base the folder of the checkpoint is the base: weights and states lie right beside config.json."""
    source, output = tmp_path / "text", tmp_path / "out"
    conversion = hf_to_dcp_conversion(make_text(tmp_path / "hf"))
    run(conversion, source, Options(workers=2), lambda count: None)
    (source / "optimizer.bin").write_bytes(b"x" * 1000)
    (source / "run").write_bytes(b"x" * 1000)
    run(dcp_to_hf_conversion(source, None), output, Options(workers=2), lambda count: None)
    assert {path.name for path in output.iterdir()} == {
        "README.md", "chat_template.jinja", "chat_template.json", "config.json", "generation_config.json", "merges.txt",
        "model.safetensors", "omniloom_conversion.json", "preprocessor_config.json", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
