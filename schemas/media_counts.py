"""What the media of a packed sample take in tokens, from its meta alone: no picture or sound is opened."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schemas.chat import ChatStyle, Grid, MediaCounts, VideoCount
from schemas.errors import UnsupportedError
from schemas.geometry import audio_tokens, processor_clip_size, processor_image_size
from schemas.sample import AudioMeta, ImageMeta, SampleMeta, VideoMeta

SAMPLE_RATE = 16000
STORED_TIME_STEP_S = 1e-6  # frame times are stored to the microsecond


def media_counts(meta: SampleMeta, style: ChatStyle) -> MediaCounts:
    """UnsupportedError for media that the model has no tower for, and for sound of another rate than the model's."""
    refuse_media(meta, style)
    return MediaCounts(
        videos=[video_count(video, style) for video in meta.videos],
        audios=[audio_tokens(sound_samples(sound)) for sound in meta.audios],
        images=[image_grid(image, style) for image in meta.images],
    )


def refuse_media(meta: SampleMeta, style: ChatStyle) -> None:
    """UnsupportedError, naming row and key, for a sample with media of a kind that is not in `style.media`."""
    held = {"video": len(meta.videos), "audio": len(meta.audios), "image": len(meta.images)}
    for kind, count in held.items():
        if count and kind not in style.media:
            raise UnsupportedError(
                f"row {meta.id}: {kind}s: holds {count}; the model has no tower for them and takes "
                f"{', '.join(('text', *style.media))}"
            )
    sounds = [number for number, video in enumerate(meta.videos) if video.audio]
    if sounds and takes_sound(style) and "audio" not in style.media:
        raise UnsupportedError(
            f"row {meta.id}: videos[{sounds[0]}].audio: the clip has sound and the model has no audio tower; write "
            "data.mm_configs.use_audio_in_video: false to leave the sound of clips out"
        )


def video_count(meta: VideoMeta, style: ChatStyle) -> VideoCount:
    """Grid, rate, sound tokens and grid times of one clip; the last frame of an odd number is taken twice."""
    grids = -(-meta.num_frames // style.temporal_patch)
    height, width = video_size(meta, style)
    return VideoCount(
        grid=(grids, height // style.patch_size, width // style.patch_size),
        second_per_grid=style.temporal_patch / meta.video_fps,
        audio_tokens=audio_tokens(sound_samples(meta.audio)) if meta.audio and takes_sound(style) else 0,
        grid_times_s=_grid_times(meta.frame_times_s, meta.video_fps, style.temporal_patch),
    )


def takes_sound(style: ChatStyle) -> bool:
    """Whether a clip's own sound becomes tokens."""
    return style.use_audio_in_video and style.form == "qwen3_omni"


def video_size(meta: VideoMeta, style: ChatStyle) -> tuple[int, int]:
    """(height, width) at which the model sees the frames: what its processor makes of them. So what packing brought to
    whole tokens within the processor's limits stays, and with `PixelLimits.video_floor` also what it made smaller to
    fit a budget. ValueError for an aspect ratio that the model does not take."""
    limits = style.pixel_limits
    factor = style.patch_size * style.merge_size
    low, high = limits.video
    if limits.per_clip:
        if limits.capped:
            per_frame = min(limits.max_video_tokens * factor * factor, high // meta.num_frames)
            high = max(per_frame, int(low * 1.05)) * meta.num_frames
        return processor_clip_size(meta.num_frames, meta.height, meta.width, factor, (low, high))
    if limits.capped:
        total = int(limits.max_video_tokens * factor * factor * 0.9)
        high = max(min(high, total * style.temporal_patch // meta.num_frames), int(low * 1.05))
    whole = meta.height % factor == 0 and meta.width % factor == 0
    if whole and limits.video_floor <= meta.height * meta.width <= high:
        return meta.height, meta.width
    return processor_image_size(meta.height, meta.width, factor, (low, high))


def image_size(meta: ImageMeta, style: ChatStyle) -> tuple[int, int]:
    """(height, width) at which the model sees an image; as `video_size`."""
    return processor_image_size(meta.height, meta.width, style.patch_size * style.merge_size, style.pixel_limits.image)


def image_grid(meta: ImageMeta, style: ChatStyle) -> Grid:
    """(1, h, w) in patches."""
    height, width = image_size(meta, style)
    return 1, height // style.patch_size, width // style.patch_size


def sound_samples(meta: AudioMeta) -> int:
    """Samples of a sound at the model's rate; UnsupportedError for another rate."""
    if meta.sample_rate != SAMPLE_RATE:
        raise UnsupportedError(
            f"{meta.origin.uri}: sound is stored at {meta.sample_rate} Hz and the model takes {SAMPLE_RATE}; "
            f"pack with audio.sample_rate: {SAMPLE_RATE}"
        )
    return meta.num_samples


def _grid_times(times_s: Sequence[float], fps: float, temporal_patch: int) -> tuple[float, ...]:
    """Mean of the first and the last frame of each grid."""
    stored = np.asarray(times_s, np.float64)
    exact = np.arange(len(stored)) / fps
    times = np.where(np.abs(stored - exact) <= STORED_TIME_STEP_S, exact, stored)
    first = times[::temporal_patch]
    last = times[np.minimum(np.arange(len(first)) * temporal_patch + temporal_patch - 1, len(times) - 1)]
    return tuple(((first + last) / 2).tolist())
