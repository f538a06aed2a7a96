"""The device part of the transform: uint8 pictures -> normalised patches, sound samples -> log-mel. Torch, the same
code on a CPU and a GPU; equal to the Hugging Face processors within 1e-4."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch

from train.data.processor import SoundSpec, VisionSpec

MIN_LOG = 1e-10  # power under which the logarithm is cut off
DYNAMIC_RANGE = 8.0  # in log10 of power below the clip's loudest bin
BREAK_HZ, BREAK_MEL = 1000.0, 15.0  # Slaney's scale: linear below, logarithmic above
MEL_PER_LOG = 27.0 / math.log(6.4)
MAX_HZ = 8000.0


def frames_to_patches(frames: torch.Tensor, size: tuple[int, int], spec: VisionSpec) -> torch.Tensor:
    """float32 [t * h * w, channels * temporal_patch * patch_size ** 2] of uint8 [frames, height, width, channels].

    size: (height, width) that the model sees; frames of another size are resized. The last frame of an incomplete
    grid is repeated, and so is the one frame of an image. Rows stand merged patch by merged patch, as the vision tower
    wants them.
    """
    pictures = _resized(frames.permute(0, 3, 1, 2), size)
    missing = -len(pictures) % spec.temporal_patch
    if missing:
        pictures = torch.cat([pictures, pictures[-1:].expand(missing, -1, -1, -1)])
    _, channels, height, width = pictures.shape
    patch, merge = spec.patch_size, spec.merge_size
    rows, columns = height // (patch * merge), width // (patch * merge)
    blocks = pictures.view(-1, spec.temporal_patch, channels, rows, merge, patch, columns, merge, patch)
    flat = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, channels, spec.temporal_patch * patch * patch)
    return _normalised(flat, spec).flatten(1)


def _normalised(pixels: torch.Tensor, spec: VisionSpec) -> torch.Tensor:
    """float32 of uint8 [patches, channels, values]."""
    mean, std = (
        torch.tensor(values, dtype=torch.float32, device=pixels.device)[:, None] * 255
        for values in (spec.mean, spec.std)
    )
    return pixels.float().sub_(mean).div_(std)  # in place: a fresh tensor per step costs more than the step on a CPU


def _resized(pictures: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """uint8 [n, channels, *size], by the bicubic filter with antialiasing that the processors use."""
    if tuple(pictures.shape[-2:]) == tuple(size):
        return pictures
    # seconds to import, and only pictures that were packed without a resize get here
    from torchvision.transforms.v2 import functional as vision  # noqa: PLC0415

    resized: torch.Tensor = vision.resize(
        pictures.contiguous(), list(size), interpolation=vision.InterpolationMode.BICUBIC, antialias=True
    )
    return resized


def log_mel(samples: torch.Tensor, spec: SoundSpec) -> torch.Tensor:
    """float32 [num_mel, n // hop_length] of one whole sound [n]: int16, or float32 in [-1, 1].

    The range of the logarithm follows the loudest bin of the whole sound, so a sound is never cut before this.
    """
    frames = len(samples) // spec.hop_length
    sound = samples.float() / 32768 if samples.dtype == torch.int16 else samples.float()
    if frames == 0:
        return sound.new_zeros(spec.num_mel, 0)
    edge = spec.n_fft // 2
    if len(sound) <= edge:  # too short to be mirrored at its ends
        sound = torch.nn.functional.pad(sound, (0, edge + 1 - len(sound)))
    window = torch.hann_window(spec.n_fft, device=sound.device)
    spectrum = torch.stft(sound, spec.n_fft, spec.hop_length, window=window, return_complex=True)
    power = spectrum[:, :frames].abs() ** 2
    filters = torch.from_numpy(mel_filters(spec)).to(power.device)
    # in double: a GPU may be set to round float32 products to 10 bits, and this one is small
    mel = (filters @ power.double()).clamp(min=MIN_LOG).log10()
    return ((torch.maximum(mel, mel.max() - DYNAMIC_RANGE) + 4) / 4).float()


@functools.cache
def mel_filters(spec: SoundSpec) -> np.ndarray:
    """float64 [num_mel, n_fft / 2 + 1]: triangles on Slaney's mel scale up to 8 kHz, each of unit area in Hz."""
    bins = np.linspace(0, spec.sample_rate / 2, spec.n_fft // 2 + 1)
    corners = _mel_to_hz(np.linspace(0, _hz_to_mel(MAX_HZ), spec.num_mel + 2))
    low, middle, high = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    rising, falling = (bins - low) / (middle - low), (high - bins) / (high - middle)
    filters: np.ndarray = np.maximum(0, np.minimum(rising, falling)) * (2 / (high - low))
    return filters


def _hz_to_mel(hz: float) -> float:
    if hz < BREAK_HZ:
        return hz * BREAK_MEL / BREAK_HZ
    return BREAK_MEL + math.log(hz / BREAK_HZ) * MEL_PER_LOG


def _mel_to_hz(mel: np.ndarray) -> np.ndarray:
    hz: np.ndarray = np.where(
        mel < BREAK_MEL, mel * BREAK_HZ / BREAK_MEL, BREAK_HZ * np.exp((mel - BREAK_MEL) / MEL_PER_LOG)
    )
    return hz
