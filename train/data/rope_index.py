"""Positions of one sample on the three axes time, height, width: TM-RoPE of Qwen3-Omni, mRoPE of Qwen3-VL.

They follow from the layout and the sizes of the media, never from searching ids, so clips of different rates, with and
without sound, may stand in one sample. The results are those of transformers' `get_rope_index` bit for bit: Qwen3-Omni
computes in float32 and in this order of operations, and clips whose grids fall between sound tokens leave every later
position fractional.
"""

from __future__ import annotations

import numpy as np

from schemas.chat import ChatLayout, ChatStyle, MediaCounts, MediaSlot, VideoCount


def position_ids(layout: ChatLayout, counts: MediaCounts, style: ChatStyle) -> np.ndarray:
    """[3, L] (time, height, width), from 0 on: float32 for qwen3_omni, int64 for qwen3_vl."""
    return _vl_positions(layout, counts, style) if style.form == "qwen3_vl" else _omni_positions(layout, counts, style)


def _omni_positions(layout: ChatLayout, counts: MediaCounts, style: ChatStyle) -> np.ndarray:
    positions = np.empty((3, len(layout.ids)), np.float32)
    cursor, position = 0, np.float32(0)
    for slot in layout.slots:
        markers = 2 if len(slot.sound_rows) else 1
        position = _run(positions, cursor, slot.start, position)
        position = _run(positions, slot.start, slot.start + markers, position)
        position = _fill(positions, slot, position, counts, style)
        position = _run(positions, slot.stop - markers, slot.stop, position)
        cursor = slot.stop
    _run(positions, cursor, len(layout.ids), position)
    return positions


def _run(positions: np.ndarray, start: int, stop: int, position: np.float32) -> np.float32:
    """Counts ids [start, stop) up from `position` on all axes; the position after them."""
    positions[:, start:stop] = np.arange(stop - start, dtype=np.float32) + position
    return position + np.float32(stop - start)


def _fill(
    positions: np.ndarray, slot: MediaSlot, base: np.float32, counts: MediaCounts, style: ChatStyle
) -> np.float32:
    """The positions of one medium, without its markers; the position after it."""
    if slot.kind == "audio":
        return _run(positions, slot.start + 1, slot.stop - 1, base)
    if slot.kind == "image":
        grid, times = counts.images[slot.index], np.zeros(1, np.float32)
    else:
        video = counts.videos[slot.index]
        grid, times = video.grid, _grid_times(video, style)
    block = _patches(times, grid, style) + base
    if not len(slot.sound_rows):
        positions[:, slot.rows] = block
        return block.max() + np.float32(1)
    sound = np.arange(len(slot.sound_rows), dtype=np.float32) + base
    return _merge(positions[:, slot.start + 2 : slot.stop - 2], block, sound, times + base)


def _merge(positions: np.ndarray, block: np.ndarray, sound: np.ndarray, times: np.ndarray) -> np.float32:
    """Fills a clip and its sound in the order of their float32 times; the position after them.

    transformers orders the ids in float64 and the positions in float32, each on its own. For a few rates (7 Hz) a grid
    that meets a sound token exactly is then before it in one and behind it in the other, here as there.
    """
    per_grid = block.shape[1] // len(times)
    before = np.searchsorted(sound, times, side="left")
    rows = (before + per_grid * np.arange(len(times)))[:, None] + np.arange(per_grid)
    positions[:, rows.ravel()] = block
    is_sound = np.ones(positions.shape[1], bool)
    is_sound[rows] = False
    positions[:, is_sound] = sound
    # It goes on after the last stretch of one kind, not after the greatest position of the clip: behind a tail of
    # sound, text may have the height or width of an earlier patch.
    last = sound[-1] if is_sound[-1] else block[:, before.searchsorted(len(sound)) * per_grid :].max()
    return np.float32(last) + np.float32(1)


def _grid_times(video: VideoCount, style: ChatStyle) -> np.ndarray:
    """float32 [t]: time of the first frame of each grid, in positions."""
    rate = np.float32(style.position_id_per_seconds)
    return np.arange(video.grid[0], dtype=np.float32) * np.float32(video.second_per_grid) * rate


def _patches(times: np.ndarray, grid: tuple[int, int, int], style: ChatStyle) -> np.ndarray:
    """float32 [3, t * h * w]: time, height and width of each merged patch, row-major."""
    height, width = grid[1] // style.merge_size, grid[2] // style.merge_size
    axes = np.meshgrid(times, np.arange(height, dtype=np.float32), np.arange(width, dtype=np.float32), indexing="ij")
    return np.stack(axes).reshape(3, -1)


def _vl_positions(layout: ChatLayout, counts: MediaCounts, style: ChatStyle) -> np.ndarray:
    """Time marks carry the time, so each grid is a picture of its own: constant on the time axis, and the text after
    it goes on behind its longer side."""
    positions = np.empty((3, len(layout.ids)), np.int64)
    cursor = position = 0
    for slot in layout.slots:
        grid = counts.images[slot.index] if slot.kind == "image" else counts.videos[slot.index].grid
        height, width = grid[1] // style.merge_size, grid[2] // style.merge_size
        block = np.indices((1, height, width)).reshape(3, -1)
        for rows in slot.rows.reshape(grid[0], -1):
            start, stop = int(rows[0]), int(rows[-1]) + 1
            positions[:, cursor:start] = np.arange(position, position + start - cursor)
            position += start - cursor
            positions[:, start:stop] = block + position
            position += max(height, width)
            cursor = stop
    positions[:, cursor:] = np.arange(position, position + len(layout.ids) - cursor)
    return positions
