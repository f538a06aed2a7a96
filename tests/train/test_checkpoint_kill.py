"""kill -9 at every point of a save, in the foreground and in the background."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.train.checkpoint_kill import CASES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.train.checkpoint_kill", str(tmp_path_factory.mktemp("kill"))]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize(("mode", "point"), CASES)
def test_the_newest_complete_checkpoint_is_in_charge(killed: dict[str, Any], mode: str, point: str) -> None:
    """Step 1 until step 2 has its name; then training ends as if it had never been killed, and nothing is left over."""
    result = killed["killed"][f"{mode}-{point}"]
    assert result["signal"] == 9
    whole = point in ("latest", "tidy")
    assert result["from"] == (2 if whole else 1)
    left = {"latest": ["LATEST", "step_1", "step_2"], "tidy": ["LATEST", "step_1.old", "step_2"]}
    assert result["left"] == left.get(point, ["LATEST", "step_1", "step_2.tmp"])
    assert result["loss"] == killed["loss"]
    assert result["at_end"] == ["LATEST", "step_4"]
