"""How the command can be typed where this process was started."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def typed_command() -> str:
    """`omniloom` where it is on the path, else its script in the virtual environment, which `make` does not activate,
    else the module."""
    if shutil.which("omniloom"):
        return "omniloom"
    script = Path(sys.executable).with_name("omniloom")
    program = script if script.is_file() else Path(sys.executable)
    if program.is_relative_to(Path.cwd()):
        program = program.relative_to(Path.cwd())
    return shlex.quote(str(program)) + ("" if program.name == "omniloom" else " -m jobs.cli")
