"""What a rank of expert parallelism holds of the experts' adapters."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from train.ops.lora_types import ExpertLora
from train.parallel.loading import local_part

NO_EXPERT = -1


def local_lora(lora: ExpertLora | None, rank: int, experts: int) -> ExpertLora | None:
    """The adapters of the experts of a rank of the group, which has so many; those that all share stay as they are."""
    if lora is None:
        return None
    first = rank * experts
    changes: dict[str, Any] = {}
    for name in (field.name for field in fields(lora) if field.name != "scale"):
        part: Tensor = getattr(lora, name)
        whole = not isinstance(part, DTensor) and len(part) > 1
        changes[name] = part[first : first + experts] if whole else local_part(part)
    return replace(lora, **changes)
