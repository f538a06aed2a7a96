"""A clip within `video.max_tokens`: fewer frames first, then smaller ones."""

from __future__ import annotations

import math
from collections.abc import Callable

from pack.config import VideoConfig
from pack.media.timeline import Grid, fewer_frames
from schemas.errors import RowError
from schemas.geometry import video_tokens

Size = tuple[int, int]
SizeOf = Callable[[int, float | None], Size]


def fit_budget(
    grid: Grid, end_s: float, video: VideoConfig, sound_tokens: int, size_of: SizeOf, uri: str
) -> tuple[Grid, Size]:
    """(grid, (height, width)) of the clip. sound_tokens: of its sound, which count, too; size_of(num_frames, at_most):
    (height, width) of that many frames, of at most so many pixels each.

    Raises RowError `over_budget` when min_frames frames of one patch are still too many.
    """
    size = size_of(grid.num_frames, None)
    if video.max_tokens is None:
        return grid, size
    room, factor = video.max_tokens - sound_tokens, video.factor
    least = min(video.min_frames, grid.num_frames)
    for num_frames in range(grid.num_frames, least - 1, -1):
        size = size_of(num_frames, None)
        if video_tokens(num_frames, *size, factor) <= room:
            return fewer_frames(grid, end_s, num_frames, video.fps), size
    pixels = room * factor * factor / math.ceil(least / 2)
    while pixels >= factor * factor:
        size = size_of(least, pixels)
        if video_tokens(least, *size, factor) <= room:
            return fewer_frames(grid, end_s, least, video.fps), size
        pixels *= 0.9  # rounding to whole patches went over
    tokens = video_tokens(least, *size, factor) + sound_tokens
    raise RowError(
        "over_budget",
        f"{uri}: {least} frames of {size[1]}x{size[0]} and {sound_tokens} sound tokens make {tokens}, over "
        f"video.max_tokens {video.max_tokens}; cut the clip (video.split_s)",
        "video",
    )
