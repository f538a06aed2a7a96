"""The arithmetic of media tokens: picture sizes, grids, frame counts, sound lengths. Pure functions, no media.

Formulas are those of the Qwen3-VL and Qwen3-Omni processors: a picture's sides are multiples of `factor` (patch size x
spatial merge, 16 x 2 = 32), two frames make one temporal grid, and 100 log-mel frames (1 s) make 13 sound tokens.
"""

from __future__ import annotations

import math

MAX_ASPECT_RATIO = 200
TEMPORAL_PATCH = 2
IMAGE_MIN_TOKENS, IMAGE_MAX_TOKENS = 4, 16384
VIDEO_MIN_TOKENS, VIDEO_MAX_TOKENS = 128, 768
MODEL_SEQ_LEN = 128_000
MEL_HOP = 160  # samples of 16 kHz sound per log-mel frame
MEL_WINDOW = 100  # log-mel frames that the audio tower takes at a time
TOKENS_PER_WINDOW = 13


def smart_resize(height: int, width: int, factor: int, min_pixels: float, max_pixels: float) -> tuple[int, int]:
    """(height, width), both multiples of `factor`, of an area in [min_pixels, max_pixels], of nearly the same aspect.

    Raises ValueError for sides that differ by more than a factor of MAX_ASPECT_RATIO, or max_pixels < min_pixels.
    Rounds half to even, as the model's processor does.
    """
    if max_pixels < min_pixels:
        raise ValueError(f"max_pixels {max_pixels} is under min_pixels {min_pixels}")
    if (ratio := max(height, width) / min(height, width)) > MAX_ASPECT_RATIO:
        raise ValueError(f"{width}x{height} has an aspect ratio of {ratio:.0f}; the model takes {MAX_ASPECT_RATIO}")
    new_height = max(factor, round(height / factor) * factor)
    new_width = max(factor, round(width / factor) * factor)
    if new_height * new_width > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        new_height = math.floor(height / scale / factor) * factor
        new_width = math.floor(width / scale / factor) * factor
        # A side thinner than one patch would floor to 0: keep one patch, whatever the area.
        return max(factor, new_height), max(factor, new_width)
    if new_height * new_width < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * scale / factor) * factor
        new_width = math.ceil(width * scale / factor) * factor
    return new_height, new_width


def processor_image_size(height: int, width: int, factor: int, limits: tuple[int, int]) -> tuple[int, int]:
    """(height, width) that the model's image processor gives a picture. limits: (min, max) pixels of it.

    Not quite `smart_resize`: a side under half of `factor` counts as 0 pixels, so such a picture is scaled up. The
    formula of Qwen2VLImageProcessor. Raises ValueError for sides that differ by more than a factor of MAX_ASPECT_RATIO.
    """
    return _processor_size(height, width, factor, limits, 1, 1)


def processor_clip_size(
    num_frames: int, height: int, width: int, factor: int, limits: tuple[int, int]
) -> tuple[int, int]:
    """(height, width) that the processor of Qwen3-VL gives the frames of a clip. limits: (min, max) pixels of all of
    its frames together; as `processor_image_size`. One frame counts as the two of its grid."""
    frames = max(num_frames, TEMPORAL_PATCH)
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    return _processor_size(height, width, factor, limits, frames, round(frames / TEMPORAL_PATCH) * TEMPORAL_PATCH)


def _processor_size(
    height: int, width: int, factor: int, limits: tuple[int, int], frames: int, whole_frames: int
) -> tuple[int, int]:
    """whole_frames: `frames` in whole grids, which are held against the limits; the scale follows from `frames`."""
    low, high = limits
    if (ratio := max(height, width) / min(height, width)) > MAX_ASPECT_RATIO:
        raise ValueError(f"{width}x{height} has an aspect ratio of {ratio:.0f}; the model takes {MAX_ASPECT_RATIO}")
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if whole_frames * new_height * new_width > high:
        scale = math.sqrt(frames * height * width / high)
        new_height = max(factor, math.floor(height / scale / factor) * factor)
        new_width = max(factor, math.floor(width / scale / factor) * factor)
    elif whole_frames * new_height * new_width < low:
        scale = math.sqrt(low / (frames * height * width))
        new_height = math.ceil(height * scale / factor) * factor
        new_width = math.ceil(width * scale / factor) * factor
    return new_height, new_width


def frame_pixel_limits(
    num_frames: int, factor: int, min_pixels: int | None, max_pixels: int | None, total_pixels: int | None
) -> tuple[float, float]:
    """(min, max) pixels of one frame of a clip of num_frames; null limits are the model's own.

    The whole clip shares `total_pixels` per temporal grid, so long clips get smaller frames, but never under 1.05 x the
    minimum.
    """
    area = factor * factor
    low = float(VIDEO_MIN_TOKENS * area if min_pixels is None else min_pixels)
    total = MODEL_SEQ_LEN * area * 0.9 if total_pixels is None else total_pixels
    high = max(min(VIDEO_MAX_TOKENS * area, total / num_frames * TEMPORAL_PATCH), int(low * 1.05))
    if max_pixels is not None:
        high = max(min(high, max_pixels), low)
    return low, high


def image_pixel_limits(factor: int, min_pixels: int | None, max_pixels: int | None) -> tuple[int, int]:
    """(min, max) pixels of a standalone image; null limits are the model's own."""
    area = factor * factor
    low = IMAGE_MIN_TOKENS * area if min_pixels is None else min_pixels
    return low, max(low, IMAGE_MAX_TOKENS * area if max_pixels is None else max_pixels)


def smart_nframes(total_frames: int, source_fps: float, fps: float, min_frames: int, max_frames: int) -> int:
    """How many frames the online Qwen path takes of total_frames pictures: even, in [min_frames, max_frames].

    Raises ValueError when the clip has fewer than 2 pictures.
    """
    low = math.ceil(min_frames / TEMPORAL_PATCH) * TEMPORAL_PATCH
    high = math.floor(min(max_frames, total_frames) / TEMPORAL_PATCH) * TEMPORAL_PATCH
    wanted = min(min(max(total_frames / source_fps * fps, low), high), total_frames)
    num_frames = math.floor(wanted / TEMPORAL_PATCH) * TEMPORAL_PATCH
    if not TEMPORAL_PATCH <= num_frames <= total_frames:
        raise ValueError(f"{total_frames} pictures cannot give {TEMPORAL_PATCH} or more frames")
    return num_frames


def video_grid(num_frames: int, height: int, width: int, patch: int = 16) -> tuple[int, int, int]:
    """(t, h, w) of the processor's patch grid; an odd frame count is padded by repeating the last frame."""
    return math.ceil(num_frames / TEMPORAL_PATCH), height // patch, width // patch


def video_tokens(num_frames: int, height: int, width: int, factor: int = 32) -> int:
    """Language-model tokens of a clip of frames [num_frames, height, width], without markers."""
    return math.ceil(num_frames / TEMPORAL_PATCH) * (height // factor) * (width // factor)


def image_tokens(height: int, width: int, factor: int = 32) -> int:
    """Language-model tokens of an image, without markers."""
    return (height // factor) * (width // factor)


def mel_frames(num_samples: int) -> int:
    """Log-mel frames of num_samples of 16 kHz sound."""
    return num_samples // MEL_HOP


def audio_tokens(num_samples: int) -> int:
    """Language-model tokens of num_samples of 16 kHz sound, without markers (Qwen3-Omni's three strided convolutions,
    applied to windows of 100 log-mel frames)."""
    windows, rest = divmod(mel_frames(num_samples), MEL_WINDOW)
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return windows * TOKENS_PER_WINDOW + rest
