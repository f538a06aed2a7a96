"""The public face of pack.media: a source of a manifest row -> encoded bytes and their description.

Everything that is wrong with a file is a RowError with a reason of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pack.config import PackConfig
from pack.media.audio import SoundTrack, is_silent
from pack.media.decode import ClipDecoder
from pack.media.encode import encode_sound
from pack.media.fetch import local_file
from pack.media.frames import load_animation, load_frames
from pack.media.image import encode_image, is_webp
from pack.media.probe import Probe, StreamInfo, probe
from pack.media.versions import VERSIONS
from pack.media.video import FrameLoader, Frames
from schemas.errors import RowError
from schemas.geometry import audio_tokens
from schemas.sample import AudioMeta, ImageMeta, Origin, PackedVideo, VideoMeta
from schemas.sources import BytesSource, FileSource, FramesSource, Source

__all__ = ["VERSIONS", "load_audio", "load_image", "load_video", "split_spans"]

PRIMED_CODECS = {"aac", "mp3", "mp3float", "aac_latm"}
MOV_FORMATS = {"mov", "mp4", "m4a"}
SHORTEST_SPAN_S = 0.05


@dataclass(frozen=True)
class ProbedSpan(FileSource):
    """A span of a file whose packets are listed already."""

    probed: Probe | None = None


def load_video(source: Source, config: PackConfig) -> tuple[PackedVideo, VideoMeta]:
    """Frames and sound of one clip, on one clock."""
    if isinstance(source, FramesSource):
        return load_frames(source, config, load_audio)
    with local_file(source, config.rows.allowed_roots) as (path, uri):
        with open(path, "rb") as file:
            if is_webp(file.read(12)):
                return load_animation(Path(path).read_bytes(), uri, config, _span(source))
        known = source.probed if isinstance(source, ProbedSpan) else None
        return _load_clip(
            replace(known, path=path) if known else _probe_clip(path, uri, source, config), source, config
        )


def load_audio(source: FileSource | BytesSource, config: PackConfig) -> tuple[bytes, AudioMeta]:
    """One standalone sound."""
    with local_file(source, config.rows.allowed_roots) as (path, uri), _as_audio_error():
        probed = _best_track(path, uri, False, config)
        if probed.audio is None:
            raise RowError("no_audio", f"{uri}: no audio stream", "audio")
        start_s, length_s = _span(source)
        track = _sound_track(probed, probed.zero_s + start_s, length_s, config)
        decoder = ClipDecoder(probed)
        decoder.run(None, track, None, probed.zero_s + start_s, probed.zero_s + start_s + length_s)
        _check_truncated(probed, config)
        encoded = _encode_track(track, probed, decoder.sound_errors, source, start_s, config)
        if encoded is None:
            reason = "empty_span" if start_s or math.isfinite(length_s) else "empty_audio"
            raise RowError(reason, f"{uri}: not one sound sample in it", "audio")
        return encoded


def load_image(source: FileSource | BytesSource, config: PackConfig) -> tuple[bytes, ImageMeta]:
    """One standalone image."""
    with local_file(source, config.rows.allowed_roots) as (path, uri):
        return encode_image(Path(path).read_bytes(), uri, config)


def split_spans(source: Source, config: PackConfig) -> list[Source]:
    """The source itself, or its spans of video.split_s seconds when its picture is longer. The last may be shorter, or
    longer by what sound there is behind the last picture."""
    split_s = config.video.split_s
    if split_s is None or not isinstance(source, FileSource):
        return [source]
    with local_file(source, config.rows.allowed_roots) as (path, uri):
        with open(path, "rb") as file:
            if is_webp(file.read(12)):
                return [source]  # animations are short
        probed = _probe_clip(path, uri, source, config)
        ends = [i.packets.end_s() for i in (probed.video, probed.audio) if i is not None]
        whole_s = max((e for e in ends if e is not None), default=probed.zero_s) - probed.zero_s
        start_s, length_s = _span(source)
        end_s = min(whole_s, start_s + length_s)
        # Every span has a picture of its own: sound behind the last picture belongs to the last span.
        seen_s = min(FrameLoader(probed, config, probed.zero_s, math.inf, 0).picture_end_s(), end_s)
        count = max(1, math.ceil((seen_s - start_s - SHORTEST_SPAN_S) / split_s))
        if count == 1:
            return [source]
        cuts = [*(start_s + k * split_s for k in range(count)), end_s]
        known = probed if path == source.uri else None  # a downloaded copy is gone when this returns
        fields = {k: getattr(source, k) for k in ("uri", "duration_s", "num_bytes", "use_audio")}
        return [ProbedSpan(start_s=a, end_s=b, probed=known, **fields) for a, b in itertools.pairwise(cuts)]


def _span(source: FileSource | BytesSource) -> tuple[float, float]:
    """(start, length) in s of the asked span; the length is inf without an end."""
    if not isinstance(source, FileSource):
        return 0.0, math.inf
    start_s = source.start_s or 0.0
    return start_s, math.inf if source.end_s is None else source.end_s - start_s


def _probe_clip(path: str, uri: str, source: FileSource | BytesSource, config: PackConfig) -> Probe:
    probed = _best_track(path, uri, True, config) if source.use_audio else probe(path, uri, True)
    if probed.video is None:
        raise RowError("no_video", f"{uri}: no video stream ({probed.container})", "video")
    if probed.video.first_s is None or probed.video.head is None:
        reason = "empty_video" if len(probed.video.packets) == 0 or probed.video.codec else "unsupported_codec"
        raise RowError(reason, f"{uri}: not one picture decodes ({probed.video.codec})", "video")
    return probed


def _best_track(path: str, uri: str, want_video: bool, config: PackConfig) -> Probe:
    """The probe with the default audio track, or with the first that is not silent when there are several."""
    first = probe(path, uri, want_video)
    if len(first.audio_tracks) < 2:
        return first
    for index in first.audio_tracks:
        probed = first if first.audio and first.audio.index == index else probe(path, uri, want_video, index)
        track = _sound_track(probed, probed.zero_s, math.inf, config)
        ClipDecoder(probed).run(None, track)
        samples = track.finish()
        if len(samples) and not is_silent(samples):
            return probed
    return first


def _load_clip(probed: Probe, source: FileSource | BytesSource, config: PackConfig) -> tuple[PackedVideo, VideoMeta]:
    start_s, length_s = _span(source)
    zero_s = probed.zero_s + start_s
    if probed.audio is not None and probed.audio.first_s is not None and source.use_audio:
        track = _sound_track(probed, zero_s, length_s, config)
    else:
        track = None
    if track is None:
        _check_missing_audio(probed, config)
    tokens = _expected_tokens(probed, track, start_s, length_s)
    asked = (source.start_s, source.end_s) if isinstance(source, FileSource) else (None, None)
    loader = FrameLoader(probed, config, zero_s, length_s, tokens, asked)
    frames = loader.load(track)
    _check_truncated(probed, config)
    sound = None
    if track is not None:
        sound = _encode_track(track, probed, loader.sound_errors, source, start_s, config)
    if sound is None:
        _check_missing_audio(probed, config)  # a track without a sample in the span
    meta = _video_meta(probed, frames, source, start_s, config, sound[1] if sound else None)
    return PackedVideo(frames.blobs, sound[0] if sound else None), meta


def _check_missing_audio(probed: Probe, config: PackConfig) -> None:
    if config.rows.missing_audio == "reject":
        raise RowError("no_audio", f"{probed.uri}: no sound, and rows.missing_audio is reject", "audio")


def _check_truncated(probed: Probe, config: PackConfig) -> None:
    if probed.truncated and config.rows.truncated == "reject":
        raise RowError("truncated", f"{probed.uri} ends before its header says, and rows.truncated is reject", "video")


def _expected_tokens(probed: Probe, track: SoundTrack | None, start_s: float, length_s: float) -> int:
    end_s = probed.audio.packets.end_s() if probed.audio and track else None
    if end_s is None:
        return 0
    seconds = max(0.0, min(end_s - probed.zero_s - start_s, length_s))
    return audio_tokens(round(seconds * 16000))


def _sound_track(probed: Probe, zero_s: float, length_s: float, config: PackConfig) -> SoundTrack:
    audio = probed.audio
    if config.video.sampling == "qwen" and audio and audio.first_s is not None:
        # qwen-omni-utils counts from the first sample, wherever that is, and keeps the end padding
        first_s = zero_s - probed.zero_s + audio.first_s
        return SoundTrack(config.audio.sample_rate, first_s, length_s, counted=True)
    trusted_end = audio.declared_end_s if audio and MOV_FORMATS & set(probed.container.split(",")) else None
    return SoundTrack(config.audio.sample_rate, zero_s, length_s, probed.counted, trusted_end)


def _encode_track(
    track: SoundTrack,
    probed: Probe,
    errors: int,
    source: FileSource | BytesSource,
    start_s: float,
    config: PackConfig,
) -> tuple[bytes, AudioMeta] | None:
    samples = track.finish()
    if not len(samples):
        return None
    audio = probed.audio
    assert audio is not None
    meta = AudioMeta(
        codec=config.audio.codec,
        sample_rate=config.audio.sample_rate,
        num_samples=len(samples),
        duration_s=len(samples) / config.audio.sample_rate,
        start_s=round(track.start_s or 0.0, 6),
        flags=_sound_flags(track, samples, probed, audio, errors),
        decode_errors=errors,
        gaps_s=track.gaps_s,
        origin=Origin(
            uri=probed.uri,
            container=probed.container,
            stream_index=audio.index,
            codec=audio.codec,
            span_s=_span_of(source, start_s, len(samples) / config.audio.sample_rate),
            clock_zero_s=round(probed.zero_s + start_s, 9),
            declared_s=audio.declared_end_s,
            sample_rate=track.source_rate,
            channels=track.channels,
            layout=track.layout,
        ),
    )
    return encode_sound(samples, config.audio.codec, config.audio.sample_rate), meta


def _sound_flags(
    track: SoundTrack, samples: NDArray[np.int16], probed: Probe, audio: StreamInfo, errors: int
) -> list[str]:
    found = {
        "silent": is_silent(samples),
        "clipped": track.clipped,
        "non_finite": track.non_finite,
        "antiphase": track.antiphase,
        "rate_changed": track.format_changed,
        "missing_media": bool(track.gaps_s),
        "decode_errors": errors > 0,
        "priming_kept": audio.codec in PRIMED_CODECS and not audio.has_skip_data,
        "several_tracks": len(probed.audio_tracks) > 1,
        "truncated": probed.truncated,
        "clock_jump": len(probed.offsets) > 1,
    }
    return [name for name, is_so in found.items() if is_so]


def _span_of(source: FileSource | BytesSource, start_s: float, length_s: float) -> tuple[float, float] | None:
    asked = isinstance(source, FileSource) and (source.start_s is not None or source.end_s is not None)
    return (start_s, round(start_s + length_s, 6)) if asked else None


def _video_meta(
    probed: Probe,
    frames: Frames,
    source: FileSource | BytesSource,
    start_s: float,
    config: PackConfig,
    audio: AudioMeta | None,
) -> VideoMeta:
    video = probed.video
    assert video is not None and video.head is not None
    flags = [
        *frames.flags,
        *(["decode_errors"] if frames.errors else []),
        *(["missing_media"] if frames.gaps_s else []),
    ]
    if audio is None:
        flags.append("no_audio")
    head = video.head
    return VideoMeta(
        num_frames=len(frames.blobs),
        width=frames.width,
        height=frames.height,
        codec=config.video.codec,
        video_fps=frames.fps,
        frame_times_s=[round(t, 6) for t in frames.times_s],
        shown_times_s=[round(t, 6) for t in frames.shown_s],
        duration_s=round(frames.end_s, 6),
        sampling=config.video.sampling,
        flags=list(dict.fromkeys(flags)),
        decode_errors=frames.errors,
        gaps_s=frames.gaps_s,
        origin=Origin(
            uri=probed.uri,
            container=probed.container,
            stream_index=video.index,
            codec=video.codec,
            span_s=_span_of(source, start_s, frames.end_s),
            clock_zero_s=round(probed.zero_s + start_s, 9),
            declared_s=video.declared_end_s,
            width=head.width,
            height=head.height,
            fps=frames.source_fps,
            pixel_format=head.pixel_format,
            rotation=head.orientation.degrees,
            mirrored=head.orientation.mirrored,
            sar=head.sar,
            color=head.color,
        ),
        audio=audio,
    )


@contextmanager
def _as_audio_error() -> Iterator[None]:
    """Faults of a standalone sound are of the stage `audio`."""
    try:
        yield
    except RowError as error:
        raise RowError(error.reason, error.detail, "audio" if error.stage == "video" else error.stage) from error
