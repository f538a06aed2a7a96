"""Which lines of a program wait for a GPU, as torch's sync debug mode tells."""

from __future__ import annotations

import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

SAID = "synchronizing CUDA"
LOADER = ("device-prefetch", "pin_memory")
ROOT = Path(__file__).resolve().parents[2]

Found = Counter[tuple[str, str]]


@contextmanager
def host_waits(device: torch.device) -> Iterator[Found]:
    """Counts (loader or trainer, `file:line` nearest to the operation) while inside; nothing on a CPU."""
    found: Found = Counter()
    if device.type != "cuda":
        yield found
        return

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if SAID in str(message):
            found[_who(), _where()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _who() -> str:
    name = threading.current_thread().name
    return "loader" if any(part in name for part in LOADER) else "trainer"


def _where() -> str:
    """The innermost line of this project, and what of others it called."""
    stack = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    ours = [frame for frame in stack if Path(frame.filename).is_relative_to(ROOT) and "packages" not in frame.filename]
    if not ours:
        return f"{Path(stack[-1].filename).name}:{stack[-1].lineno}" if stack else "no Python line"
    return f"{Path(ours[-1].filename).relative_to(ROOT)}:{ours[-1].lineno}"
