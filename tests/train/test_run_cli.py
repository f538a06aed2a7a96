"""What `omniloom train run` does around a training of one rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from schemas.errors import OmniloomError, SchemaError, StoppedError
from tests.environment import environment
from tests.train.tiny import omni_config
from train.config import OmniConfig
from train.run_cli import ALLOCATOR, run_rank


class Ends:
    """A trainer whose training ends like this, at once."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.environment: dict[str, str] = {}

    def train(self) -> None:
        self.environment = {name: value for name, value in os.environ.items() if name in ALLOCATOR}
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        if self.error is not None:
            raise self.error


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OmniConfig:
    for name in ALLOCATOR:  # set first, so that monkeypatch knows what to put back
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return omni_config(tmp_path, [{"path": "clips", "name": "clips"}])


@pytest.mark.parametrize(
    ("error", "left"), [(None, False), (StoppedError("stopped"), False), (OmniloomError("no memory"), True)]
)
def test_the_group_is_left_unless_a_rank_failed(
    config: OmniConfig, monkeypatch: pytest.MonkeyPatch, error: Exception | None, left: bool
) -> None:
    """NCCL complains of a group that nobody left; after a failure leaving it would wait for ranks that are gone."""
    trainer = Ends(error)
    monkeypatch.setattr("train.trainer.make_trainer", lambda settings: trainer)
    try:
        if error is None:
            run_rank(config, nullcontext())
        else:
            with pytest.raises(type(error)):
                run_rank(config, nullcontext())
        assert dist.is_initialized() == left
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("chosen", [None, *ALLOCATOR])
def test_segments_grow_unless_the_user_chose(
    config: OmniConfig, monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    if chosen is not None:
        monkeypatch.setenv(chosen, "max_split_size_mb:512")
    trainer = Ends(None)
    monkeypatch.setattr("train.trainer.make_trainer", lambda settings: trainer)
    run_rank(config, nullcontext())
    default = {ALLOCATOR[0]: "expandable_segments:True"}
    assert trainer.environment == (default if chosen is None else {chosen: "max_split_size_mb:512"})


RANK = """
import atexit, sys
from schemas.errors import OmniloomError, SchemaError
from train.run_cli import outcome_told

atexit.register(print, "taken down")
with outcome_told(1):
    print("said before")
    {end}
"""


@pytest.mark.parametrize(
    ("end", "ranks", "code"),
    [
        ("raise SchemaError('no such row')", 2, SchemaError.exit_code),
        ("raise RuntimeError('out of memory')", 2, 1),
        ("raise SchemaError('no such row')", 1, SchemaError.exit_code),
        ("pass", 2, 0),
    ],
)
@pytest.mark.parametrize("launched", [False, True])
def test_a_rank_that_failed_takes_no_groups_down(
    tmp_path: Path, end: str, ranks: int, code: int, launched: bool
) -> None:
    """Which would wait for others. What it said is not lost."""
    more = {"OMNILOOM_OUTCOMES": str(tmp_path)} if launched else {}
    variables = environment(RANK="1", WORLD_SIZE=str(ranks), **more)
    command = [sys.executable, "-c", RANK.format(end=end)]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    said = "said before\n" + ("taken down\n" if ranks == 1 or not code else "")
    assert ended.stdout == said, ended.stderr
    assert ended.returncode == (code if ranks == 2 or launched else 1), ended.stderr
    assert (tmp_path / "rank_1.json").exists() == launched


def test_a_fault_of_the_run_has_the_place_of_its_key(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {model_path: gone}\ndata:\n  sources: [{path: packed}]\n")
    command = [sys.executable, "-m", "jobs.cli", "train", "run", str(path), "train.init_device=cpu"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120, check=False)
    assert run.returncode == 2
    assert re.search(rf"error: {path}:\d+:\d+: (model|data)\.", run.stderr), run.stderr
