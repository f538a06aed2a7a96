"""Where one medium comes from: a file or URL, bytes, or frames that are extracted already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FileSource:
    """A media file. uri: absolute local path or URL; start_s, end_s: the asked span on the file's own clock (seconds
    after its first sample); duration_s, num_bytes: what the manifest says, for planning only; use_audio: False leaves
    the sound of a video out."""

    uri: str
    start_s: float | None = None
    end_s: float | None = None
    duration_s: float | None = None
    num_bytes: int | None = None
    use_audio: bool = True


@dataclass(frozen=True)
class BytesSource:
    """Encoded media in the row itself. name: what to call it in messages."""

    data: bytes
    name: str
    use_audio: bool = True


@dataclass(frozen=True)
class FramesSource:
    """A video whose frames are extracted already. frames: encoded pictures, files, or one uint8 array [T, H, W, 3];
    audio: encoded sound, a file, or a 1-D float array (then audio_fps, its rate in Hz, is required); video_fps: rate of
    the frames."""

    frames: tuple[BytesSource | FileSource, ...] | Any
    video_fps: float
    audio: BytesSource | FileSource | Any | None = None
    audio_fps: int | None = None
    name: str = "frames"


Source = FileSource | BytesSource | FramesSource
