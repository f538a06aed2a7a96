"""One clip, or one standalone sound, on its time axis.

Positions are percent of the axis, so that pictures, waveform, ticks and playhead of a clip share one scale whatever the
width of the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from pack.preview import sound
from pack.preview.picture import Thumb, thumbnail
from pack.preview.texts import clock, damaged, flag_texts, origin_facts, seconds
from schemas.sample import AudioMeta, PackedVideo, VideoMeta

WAVE_WIDTH, WAVE_HEIGHT = 1000, 80  # units of the waveform's drawing; WAVE_WIDTH is the whole axis
FRAME_ROOM = 70  # pixels that a frame should get; sets how far a long clip can be scrolled
MAX_AXIS = 8000  # pixels
TICK_STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200)


@dataclass(frozen=True)
class Frame:
    thumb: Thumb
    index: int
    time_s: float
    shown_s: float
    left: float
    width: float


@dataclass(frozen=True)
class Band:
    """A marked stretch of the axis, in percent. lane: video or audio; kind: gap | lead | unplayed."""

    lane: str
    kind: str
    left: float
    width: float
    label: str


@dataclass(frozen=True)
class Sound:
    """What is heard: a player, its waveform, and what the page says about both."""

    url: str
    path: str
    facts: str
    note: str
    played_s: float
    rms_dbfs: float


@dataclass(frozen=True)
class Timeline:
    """One clip or one standalone sound. span_s: length of the axis; min_px: width under which it scrolls; end_left:
    where the picture ends, when the axis goes on."""

    anchor: str
    title: str
    facts: str
    span_s: float
    min_px: int
    ticks: list[tuple[float, str]]
    frames: list[Frame]
    frames_note: str
    sound: Sound | None
    bands: list[Band]
    end_left: float | None
    flags: list[tuple[str, str]]
    origins: list[tuple[str, list[tuple[str, str]]]]


def video_timeline(
    anchor: str, title: str, video: PackedVideo, meta: VideoMeta, max_frames: int, max_sound_bytes: int
) -> Timeline:
    chosen = spread(meta.num_frames, max_frames)
    times = [meta.frame_times_s[k] for k in chosen]
    gaps = [b - a for a, b in pairwise(times) if b > a]
    step = min(gaps) if gaps else max(meta.duration_s, 1 / meta.video_fps)
    end = max(meta.duration_s, times[-1] + step, meta.audio.duration_s if meta.audio else 0.0)
    width = max(100 * step / end, 100 * FRAME_ROOM / MAX_AXIS)
    frames = [
        Frame(thumbnail(video.frames[k]), k, t, meta.shown_times_s[k], 100 * t / end, width)
        for k, t in zip(chosen, times, strict=True)
    ]
    bands = [_gap("video", span, end) for span in meta.gaps_s]
    flags, origins = flag_texts(meta.flags), [("picture", origin_facts(meta.origin))]
    heard = None
    if meta.audio is not None and video.audio is not None:
        heard, more = _sound(video.audio, meta.audio, end, max_sound_bytes)
        bands += more
        flags = [*flags, *(pair for pair in flag_texts(meta.audio.flags) if pair not in flags)]
        origins.append(("sound", origin_facts(meta.audio.origin)))
    skipped = meta.num_frames - len(chosen)
    return Timeline(
        anchor, title, _video_facts(meta), end, min(MAX_AXIS, round(100 * FRAME_ROOM / width)), ticks(end), frames,
        f"{len(chosen)} of {meta.num_frames} frames are shown" if skipped else "", heard, bands,
        100 * meta.duration_s / end if meta.duration_s < 0.995 * end else None, flags, origins,
    )  # fmt: skip


def audio_timeline(anchor: str, title: str, data: bytes, meta: AudioMeta, max_sound_bytes: int) -> Timeline:
    end = max(meta.duration_s, 0.1)
    heard, bands = _sound(data, meta, end, max_sound_bytes)
    facts = f"{seconds(meta.duration_s)}, {meta.codec.upper()} at {meta.sample_rate:,} Hz{damaged(meta.decode_errors)}"
    origins = [("sound", origin_facts(meta.origin))]
    return Timeline(
        anchor, title, facts, end, 320, ticks(end), [], "", heard, bands, None, flag_texts(meta.flags), origins
    )


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the numbers 0..count-1, evenly, with the first and (for more than one) the last."""
    if count <= most:
        return list(range(count))
    if most == 1:
        return [0]
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def ticks(end: float) -> list[tuple[float, str]]:
    """(percent, label) of round times on an axis from 0 to `end` seconds, at most 13."""
    step = next((s for s in TICK_STEPS if end / s <= 12), 7200 * max(1, round(end / 86400)))
    places = [i * step for i in range(int(end / step + 1e-9) + 1)]
    return [(100 * t / end, clock(t)) for t in places if t <= end * 0.985 or t == 0]


def _sound(data: bytes, meta: AudioMeta, end: float, max_bytes: int) -> tuple[Sound, list[Band]]:
    played, played_s = sound.shorten(data, max_bytes)
    waveform = sound.measure(data)
    path = sound.outline_path(waveform, 0.0, WAVE_WIDTH * meta.duration_s / end, WAVE_HEIGHT)
    bands = [_gap("audio", span, end) for span in meta.gaps_s]
    if meta.start_s > 0:
        text = f"silence: the sound starts at {meta.start_s:.3f} s"
        bands.append(Band("audio", "lead", 0.0, 100 * min(meta.start_s, end) / end, text))
    note = ""
    if played is not data:
        note = f"The player has the first {seconds(played_s)} of {seconds(meta.duration_s)}, to keep this page small."
        bands.append(Band("audio", "unplayed", 100 * played_s / end, 100 * (meta.duration_s - played_s) / end, note))
    if waveform.peak_dbfs <= sound.FLOOR_DBFS:
        level = "digital silence"
    else:
        level = (
            f"peak {waveform.peak_dbfs:.1f} dBFS, RMS {waveform.rms_dbfs:.1f} dBFS; the waveform is drawn to its peak"
        )
    facts = f"{meta.codec.upper()} mono at {meta.sample_rate:,} Hz, {seconds(meta.duration_s)}, {level}"
    facts += damaged(meta.decode_errors)
    return Sound(sound.data_url(played, meta.codec), path, facts, note, played_s, waveform.rms_dbfs), bands


def _gap(lane: str, span: tuple[float, float], end: float) -> Band:
    label = f"nothing in the source from {span[0]:.3f} to {span[1]:.3f} s"
    return Band(lane, "gap", 100 * span[0] / end, 100 * (min(span[1], end) - span[0]) / end, label)


def _video_facts(meta: VideoMeta) -> str:
    frames = f"{meta.num_frames} frame{'s' * (meta.num_frames != 1)} of {meta.width} x {meta.height}"
    rate = f"{meta.video_fps:.6g} fps ({meta.sampling})"
    heard = "" if meta.audio else ", no sound"
    return f"{frames}, {meta.codec.upper()}, {rate}, {seconds(meta.duration_s)}{heard}{damaged(meta.decode_errors)}"
