"""The device of this process, in the registry's words."""

from __future__ import annotations

import torch

from train.ops.registry import Device


def describe_device(device: torch.device | str, *, repeatable: bool = False) -> Device:
    """Type and, for a GPU, its capability. repeatable: as of `Device`."""
    found = torch.device(device)
    capability = torch.cuda.get_device_capability(found) if found.type == "cuda" else None
    return Device(found.type, capability, repeatable=repeatable)
