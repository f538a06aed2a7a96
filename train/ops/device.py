"""The device of this process, in the registry's words."""

from __future__ import annotations

import torch

from train.ops.registry import Device


def describe_device(device: torch.device | str) -> Device:
    """Type and, for a GPU, its capability."""
    found = torch.device(device)
    return Device(found.type, torch.cuda.get_device_capability(found) if found.type == "cuda" else None)
