"""What the device part of the transform takes (uint8 frames -> patches, samples -> log-mel) beside a step's own work.

A step's work is taken from below: 48 layers' experts alone, forward and backward, without attention, head or towers. So
the shares are from above.
"""

from __future__ import annotations

from functools import partial

import torch

from jobs.bench.claims import Claim
from jobs.bench.kernel_moe import make
from jobs.bench.kernel_timing import milliseconds
from train.data.features import frames_to_patches, log_mel
from train.data.processor import SoundSpec, VisionSpec
from train.ops.triton_moe import moe_experts

TOKENS, LAYERS = 16384, 48
HEIGHT, WIDTH = 352, 672  # 11 x 21 tokens for two frames
VISION = VisionSpec(patch_size=16, temporal_patch=2, merge_size=2, mean=(0.5,) * 3, std=(0.5,) * 3)
SOUND = SoundSpec(sample_rate=16000, n_fft=400, hop_length=160, num_mel=128)
SOUND_TOKENS_PER_S = 13


def claims(quick: bool) -> list[Claim]:
    """All claims; quick changes nothing, it is a second's work."""
    layer = make(TOKENS)
    step = LAYERS * milliseconds(partial(layer.both, moe_experts))
    found = []
    for name, time, said in (video(), sound()):
        conditions = f"{said}; {time:.2f} ms beside {step:.0f} ms of {LAYERS} layers' experts"
        found.append(
            Claim(f"features, T={TOKENS} of {name}: at most", round(time / step * 100, 2), "%", "", None, conditions)
        )
    return found


def video() -> tuple[str, float, str]:
    """Frames for all tokens, in their size."""
    frames = 2 * -(-TOKENS * 32 * 32 // (HEIGHT * WIDTH))
    pictures = torch.randint(0, 256, (frames, HEIGHT, WIDTH, 3), dtype=torch.uint8, device="cuda")
    time = milliseconds(lambda: frames_to_patches(pictures, (HEIGHT, WIDTH), VISION))
    return "video alone", time, f"{frames} frames of {WIDTH}x{HEIGHT}"


def sound() -> tuple[str, float, str]:
    """Clips of a minute for all tokens, one after another."""
    clips = -(-TOKENS // (60 * SOUND_TOKENS_PER_S))
    samples = torch.randint(-(2**15), 2**15, (60 * SOUND.sample_rate,), device="cuda").to(torch.int16)
    time = milliseconds(lambda: [log_mel(samples, SOUND) for _ in range(clips)])
    return "sound alone", time, f"{clips} clips of a minute"
