"""What the demo says before it imports anything heavy, how its steps tell what they do, and the commands it prints."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from jobs import demo_steps
from jobs.typed import typed_command
from tests.environment import environment

# whatever the steps import, the first line is out before
STOPS = """
import sys

class Ends:
    def find_spec(self, name, *_):
        if name == "jobs.demo_steps":
            sys.exit(9)

sys.meta_path.insert(0, Ends())
from jobs.cli import main
main(["demo", *sys.argv[1:]])
"""


@pytest.mark.parametrize(("words", "what"), [((), "training"), (("--pack-only", "--out", "x [y]"), "x [y]")])
def test_the_first_line_comes_before_imports(tmp_path: Path, words: tuple[str, ...], what: str) -> None:
    command = [sys.executable, "-c", STOPS, *words]
    ended = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 9, ended.stderr
    (line,) = ended.stdout.splitlines()
    assert line.startswith("omniloom demo: ") and what in line


def test_a_step_tells_what_it_begins_does_and_came_to() -> None:
    console = Console(file=io.StringIO(), width=40)
    seen: list[str] = []
    with demo_steps._step(console, 6, "train", "two processes") as step:
        seen.append(console.file.getvalue())  # type: ignore[attr-defined]
        step.tell("step 1 of 12, " + "long " * 10 + "[x]")
        seen.append(console.file.getvalue())  # type: ignore[attr-defined]
        step.say("done")
    begun, told = seen
    assert begun == "6/9 train   two processes ...\n"
    assert told == begun + "    step 1 of 12, " + "long " * 10 + "[x]\n"  # not broken at 40
    ended = console.file.getvalue().removeprefix(told)  # type: ignore[attr-defined]
    assert re.fullmatch(r"6/9 train   done  \d+\.\d s\n", ended)


def test_commands_are_printed_as_they_can_be_typed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a b/.venv/bin"
    folder.mkdir(parents=True)
    python = folder / "python"
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.chdir(tmp_path / "a b")
    assert typed_command() == ".venv/bin/python -m jobs.cli"
    (folder / "omniloom").touch()
    assert typed_command() == ".venv/bin/omniloom"
    assert ("rejected", ".venv/bin/omniloom pack rejects out/packed") in demo_steps._places(Path("out"), True)
    monkeypatch.chdir("/")
    assert typed_command() in (f"'{str(folder)[1:]}/omniloom'", f"'{folder}/omniloom'")
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    assert typed_command() == f"'{folder}/omniloom'"
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/omniloom")
    assert typed_command() == "omniloom"
