"""Which operations run, as torch's dispatcher sees them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Computed(TorchDispatchMode):
    """Counts the operations that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function._schema.name] += 1
        return function(*args, **(kwargs or {}))
