"""Dense bf16 peak of GPUs in operations per second, from the makers' data sheets, without sparsity."""

from __future__ import annotations

import torch

# matched on whole words of the device's name, in this order
PEAKS: tuple[tuple[str, float], ...] = (
    ("GB300", 2500e12),
    ("GB200", 2500e12),
    ("B300", 2250e12),
    ("B200", 2250e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("H800", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L20", 119.5e12),
    ("L4", 121e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("MI325X", 1307.4e12),
    ("MI300X", 1307.4e12),
)


def peak_flops(device: torch.device) -> float | None:
    """Of one GPU; None for a CPU and for what is not in the table."""
    return named_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def named_peak(name: str) -> float | None:
    """Of a GPU by its name, as `NVIDIA H200` or `NVIDIA A100-SXM4-80GB`."""
    words = f" {name.replace('-', ' ').replace('_', ' ')} "
    return next((peak for model, peak in PEAKS if f" {model} " in words), None)
