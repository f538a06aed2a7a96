"""All handed media cases through the command line, judged from outside by tests/tools/check_media.py."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_handed_clip_comes_out_right():
    command = Path(sys.executable).parent / "omniloom"
    cases = ROOT / "tests/cases"
    judge = [sys.executable, str(ROOT / "tests/tools/check_media.py"), str(command)]
    done = subprocess.run(
        [*judge, str(cases / "media"), str(cases / "expected.json")], capture_output=True, text=True, timeout=280
    )
    assert done.stdout.splitlines()[-1:] == ["56 of 56 right"], done.stdout + done.stderr
