"""What commands say before imports that take seconds, and which mistakes they tell before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jobs.cli import main
from tests.environment import environment
from train import progress
from train.config import OmniConfig

# a process in which a command ends where it imports torch
WITHOUT_TORCH = """
import json, sys

class Ends:
    def find_spec(self, name, *_):
        if name == "torch":
            sys.stderr.write("TORCH\\n")
            raise SystemExit

sys.meta_path.insert(0, Ends())
from jobs.cli import main
for words in json.loads(sys.argv[1]):
    try:
        main(["train", *words])
    except SystemExit:
        sys.stderr.write("END\\n")
"""


def said_before_torch(commands: list[list[object]], **more: str) -> list[list[str]]:
    """Of each command the lines on stderr until torch is imported, of which the last is TORCH when it is."""
    words = json.dumps([[str(word) for word in command] for command in commands])
    command = [sys.executable, "-c", WITHOUT_TORCH, words]
    ended = subprocess.run(command, env=environment(**more), capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == ""
    return [said.splitlines() for said in ended.stderr.split("END\n")[:-1]]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "c.yaml"
    values = {"model": {"model_path": "m"}, "data": {"sources": [{"path": "packed"}]}}
    OmniConfig.model_validate(values)
    file.write_text(yaml.safe_dump(values))
    return file


def commands(config: Path) -> list[list[object]]:
    """Each that a user waits for, without a mistake that is known at once."""
    return [
        ["run", config],
        ["validate", config],
        ["logprobs", config],
        ["lengths", config],
        ["lengths", config.parent, "--processor", config.parent],
        ["compare-logprobs", config, config],
    ]


def test_a_line_comes_before_torch(config: Path) -> None:
    for loading, torch in said_before_torch(commands(config)):
        assert loading.startswith("loading torch") and loading.endswith(" ...") and torch == "TORCH"


def test_no_line_of_a_rank_nor_with_json(config: Path) -> None:
    assert said_before_torch(commands(config)[:3], RANK="0", WORLD_SIZE="2") == [["TORCH"]] * 3
    assert said_before_torch([[*words, "--json"] for words in commands(config)[3:]]) == [["TORCH"]] * 3


def test_mistakes_come_before_torch(config: Path) -> None:
    clips, text = config.parent, config.parent / "chat.jsonl"
    mistakes: dict[str, list[object]] = {
        "train.max_stepp: unknown key": ["run", config, "train.max_stepp=1"],
        "train.max_stepq: unknown key": ["validate", config, "train.max_stepq=1"],
        "train.max_stepr: unknown key": ["lengths", config, "train.max_stepr=1"],
        "--processor is missing": ["lengths", clips],
        "'--sourc-name' is no option": ["lengths", clips, "--processor", clips, "--sourc-name", "x"],
        "--source-name says": ["lengths", text, "--processor", clips],
        "write KEY=VALUE": ["lengths", text, "--processor", clips, "--source-name", "x", "--source-arg", "y"],
        "--max-samples 0: must be": ["logprobs", config, "--max-samples", "0"],
        "there is no such file": ["compare-logprobs", config, clips / "gone"],
    }
    for mistake, said in zip(mistakes, said_before_torch(list(mistakes.values())), strict=True):
        assert len(said) == 1 and said[0].startswith("error: ") and mistake in said[0], said


@pytest.mark.parametrize("words", [("run",), ("logprobs",)])
def test_a_launcher_says_how_many_ranks_it_starts(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    for module in ("train.run_cli", "train.logprobs_cli"):
        monkeypatch.setattr(f"{module}.launch", lambda how, arguments: None)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        main(["train", *words, str(config), "--nproc", "3"])
    assert capsys.readouterr().err == "starting 3 ranks, loading torch and the model's code ...\n"


def test_nothing_is_said_of_what_is_loaded(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", json)  # any module
    progress.say_loading()
    assert capsys.readouterr().err == ""
