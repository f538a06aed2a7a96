"""Running megatron-to-hf on checkpoints that it must refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from convert.dcp import DcpReader
from jobs.cli import main
from tests.convert.dcp_factory import save_megatron

MEGATRON = Path(__file__).parent / "megatron"
UNSAFE, UNSUPPORTED, INCOMPLETE, VERIFICATION, USAGE = 6, 7, 8, 4, 2
EMBEDDING, NORM = "embedding.word_embeddings.weight", "decoder.final_layernorm.weight"


def convert(source: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    """(exit code, what stands on stderr) of the command; nothing of the output may be left unless it succeeds."""
    output = (source.parents[1] if source.parent.name in ("source", "changed") else source.parent) / "out"
    base = [] if "--base" in options else ["--base", str(MEGATRON / "singleton" / "base")]
    with pytest.raises(SystemExit) as ended:
        main(["convert", "megatron-to-hf", str(source), str(output), *base, *options])
    code = ended.value.code
    assert isinstance(code, int)
    left = sorted(path.name for path in output.parent.iterdir() if path.name.startswith("out"))
    assert left == (["out"] if code == 0 else [])
    return code, capsys.readouterr().err.replace(str(output.parent), "")  # the folder has the name of the test


def saved(tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """A valid checkpoint with other tensors."""
    with DcpReader(MEGATRON / "singleton" / "iter_0000001") as reader:
        tensors = {name: reader.read(name) for name in reader.tensors}
    change(tensors)
    return save_megatron(tmp_path / "changed", tensors)
