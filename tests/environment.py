"""What processes that tests start find in their environment."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(**more: str) -> dict[str, str]:
    """This process's own, in which the source tree comes first, and then what it has on PYTHONPATH already: packages
    may lie there that are not installed."""
    before = os.environ.get("PYTHONPATH")
    path = str(ROOT) if not before else os.pathsep.join([str(ROOT), before])
    return {**os.environ, "PYTHONPATH": path, **more}
