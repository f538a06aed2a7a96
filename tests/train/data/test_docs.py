"""The script of docs/streaming.md, run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import ROOT, environment
from tests.train.data.loading import write_clips, write_text


@pytest.mark.slow
def test_the_script_runs_with_the_configuration_before_it(tmp_path: Path) -> None:
    text = (ROOT / "docs/streaming.md").read_text()
    (config,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    (script,) = re.findall(r"```python\n(.*?)```", text, re.S)
    (tmp_path / "train.yaml").write_text(config + "train: {global_batch_size: 2}\n")
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    write_clips(tmp_path / "packed", 4)
    write_text(tmp_path / "chats.jsonl", 20)
    variables = environment(XDG_CACHE_HOME=str(tmp_path / "cache"))
    command = [sys.executable, "script.py"]
    run = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr
    for number in range(4):
        assert f"'clip{number}'" in run.stdout
    assert "'epoch': 0" in run.stdout
