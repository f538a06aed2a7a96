"""One probed file -> frames on the grid at their final size, encoded, and the sound that belongs to them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import av
import numpy as np
import torch

from pack.config import PackConfig
from pack.media.audio import SoundTrack
from pack.media.budget import fit_budget
from pack.media.decode import ClipDecoder, picture_ticks, plan_decoding
from pack.media.encode import encode_picture
from pack.media.picture import resize, to_rgb
from pack.media.probe import PictureInfo, Probe
from pack.media.timeline import (
    Times,
    choose_grid,
    is_variable_rate,
    on_screen,
    picture_gaps,
    source_rate,
)
from schemas.errors import RowError
from schemas.geometry import MAX_ASPECT_RATIO, frame_pixel_limits, smart_nframes, smart_resize

QWEN_MIN_FRAMES = 2
MOV = {"mov", "mp4"}
HELD_START_S = 0.02  # a shorter wait for the first picture is codec delay


@dataclass
class Frames:
    """Encoded frames of a clip. times_s: on the grid; shown_s: of the pictures shown; end_s: of the picture."""

    blobs: list[bytes]
    times_s: list[float]
    shown_s: list[float]
    fps: float
    width: int
    height: int
    end_s: float
    source_fps: float | None
    errors: int
    gaps_s: list[tuple[float, float]] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Choice:
    """Which pictures to store. index[k]: number in display order of the picture of frame k; fps: effective rate."""

    index: np.ndarray
    times: Times
    fps: float
    flags: tuple[str, ...] = ()


class FrameLoader:
    """Takes frames of one span of a probed file.

    zero_s: container time of t = 0; length_s: of the span (inf = to the end); sound_tokens: what the clip's sound takes
    of video.max_tokens; asked: start and end of the span in s, as they were asked for.
    """

    def __init__(
        self,
        probe: Probe,
        config: PackConfig,
        zero_s: float,
        length_s: float,
        sound_tokens: int,
        asked: tuple[float | None, float | None] = (None, None),
    ) -> None:
        assert probe.video is not None and probe.video.head is not None
        self._probe, self._config, self._head = probe, config.video, probe.video.head
        self._zero_s, self._length_s, self._sound_tokens, self._asked = zero_s, length_s, sound_tokens, asked
        self.sound_errors = 0
        self._size_changed = False
        self._interlaced = probe.video.interlaced and self._config.sampling == "time_grid"

    def load(self, sound: SoundTrack | None) -> Frames:
        """Decodes pictures and sound in one pass, or in more where the packet table turns out to be wrong."""
        ticks = self._trusted_ticks()
        if ticks is not None:
            times = ticks * self._probe.video.time_base - self._zero_s  # type: ignore[union-attr]
            frames = self._take(times, ticks, sound)
            if frames is not None:
                return frames
            sound = None  # it is complete
        decoder = self._decoder()
        seen: list[float] = []
        decoder.run(lambda _, time_s: seen.append(time_s), sound)
        self.sound_errors += decoder.sound_errors
        if not seen:
            raise RowError("empty_video", f"{self._probe.uri}: not one picture decodes", "video")
        # Decoders give pictures in display order, but some containers date them in decoding order.
        frames = self._take(np.sort(np.array(seen)) - self._zero_s, None, None)
        assert frames is not None
        return frames

    def _trusted_ticks(self) -> np.ndarray | None:
        """Presentation ticks of all pictures in display order, or None where the packets don't tell."""
        video = self._probe.video
        assert video is not None and video.first_s is not None
        ticks = picture_ticks(video)[~np.asarray(video.packets.discard) & ~np.asarray(video.packets.empty)]
        if "avi" in self._probe.container:  # AVI has no presentation times: those of its packets are in decoding order
            return None
        if np.isnan(np.asarray(video.packets.pts)).any() or len(np.unique(ticks)) != len(ticks):
            return None
        ticks = np.sort(ticks)
        return ticks[ticks >= round(video.first_s / video.time_base)]

    def picture_end_s(self) -> float:
        """When the last picture ends on the clip's clock, by the packets alone; inf where they have no times. A span
        that starts before it has a picture. By number (`qwen`) only one that starts before the last picture has."""
        ticks = self._trusted_ticks()
        if ticks is None or not len(ticks):
            pts = np.asarray(self._probe.video.packets.pts)  # type: ignore[union-attr]
            times = np.sort(pts[~np.isnan(pts)])
        else:
            times = ticks * self._probe.video.time_base  # type: ignore[union-attr]
        if not len(times):
            return math.inf
        if self._config.sampling == "qwen":
            return (len(times) - 1) / self._average_rate(times)
        return self._video_end(times - self._zero_s)

    def _decoder(self) -> ClipDecoder:
        return ClipDecoder(self._probe, deinterlace=self._interlaced)

    def _take(self, times: Times, ticks: np.ndarray | None, sound: SoundTrack | None) -> Frames | None:
        """Chooses, decodes and encodes; None when a chosen picture never came or came out of the wrong packets."""
        end_s = min(self._video_end(times), self._length_s)
        if end_s <= 0 or not len(times):
            raise RowError("empty_span", f"{self._probe.uri}: no picture in the asked span", "video")
        choice, (height, width) = self._choose(times, end_s)
        blobs: dict[int, bytes] = {}
        wanted = set(choice.index.tolist())
        decoder = self._decoder()
        base = self._probe.video.time_base  # type: ignore[union-attr]
        number_of = None if ticks is None else {int(t): i for i, t in enumerate(ticks)}

        def sink(frame: av.VideoFrame, time_s: float) -> None:
            number = decoder.num_pictures - 1 if number_of is None else number_of.get(round(time_s / base))
            self._size_changed |= (frame.width, frame.height) != (self._head.width, self._head.height)
            if number is not None and number in wanted and number not in blobs:
                rgb = self._render(frame, width, height)
                blobs[number] = encode_picture(rgb, self._config.codec, self._config.quality)

        plan = None
        if ticks is not None and not self._interlaced:
            plan = plan_decoding(self._probe, {int(ticks[i]) for i in wanted})
        first_s, last_s = float(times[choice.index[0]]), float(times[choice.index[-1]]) + 1.0
        if self._config.sampling != "qwen":  # whose spans are of numbers, and may be shown behind the end of the span
            last_s = min(last_s, end_s)
        until_s = self._zero_s + (max(last_s, self._length_s) if math.isfinite(self._length_s) else math.inf)
        decoder.run(sink, sound, plan, self._zero_s + min(first_s, 0.0), until_s)
        self.sound_errors += decoder.sound_errors
        if wanted - blobs.keys():
            if ticks is not None:
                return None
            blobs.update(self._hold(wanted, blobs))
        shown = [float(times[i]) for i in choice.index]
        return Frames(
            blobs=[blobs[i] for i in choice.index.tolist()],
            times_s=[float(t) for t in choice.times],
            shown_s=shown,
            fps=choice.fps,
            width=width,
            height=height,
            end_s=end_s,
            source_fps=source_rate(times),
            errors=max(decoder.errors, self._probe.video.packets.corrupt),  # type: ignore[union-attr]
            gaps_s=self._gaps(times, end_s),
            flags=[*choice.flags, *self._flags(times)],
        )

    def _hold(self, wanted: set[int], blobs: dict[int, bytes]) -> dict[int, bytes]:
        """Pictures that failed to decode the second time show the nearest one that did."""
        if not blobs:
            raise RowError("empty_video", f"{self._probe.uri}: not one picture decodes", "video")
        return {i: blobs[min(blobs, key=lambda j: abs(j - i))] for i in wanted - blobs.keys()}

    def _video_end(self, times: Times) -> float:
        """When the last picture ends, on the clip's clock."""
        video = self._probe.video
        assert video is not None
        usual_s = 1.0 / (source_rate(times) or video.average_rate or 25.0)
        pts = video.packets.shown()
        if np.isnan(pts).all():
            return float(times[-1]) + usual_s
        last = int(np.nanargmax(pts))
        last_s = max(float(times[-1]), float(pts[last]) - self._zero_s)
        if video.declared_end_s is not None and MOV & set(self._probe.container.split(",")) and len(times) > 1:
            # A packet of an MP4 lasts to the next one decoded, which is not the next one shown.
            end_s = video.declared_end_s - self._zero_s
            left_out = np.asarray(video.packets.pts)[np.asarray(video.packets.discard)]
            if (left_out > pts[last]).any() and abs(last_s - end_s) < usual_s:
                return end_s  # a picture that begins where the edit list ends is handed out, but never on screen
            return end_s if end_s > last_s and not self._probe.truncated else last_s + usual_s
        return last_s + (video.packets.duration[last] or usual_s)

    # --- choice of pictures and size ------------------------------------------------------------------------------

    def _choose(self, times: Times, end_s: float) -> tuple[Choice, tuple[int, int]]:
        if self._config.sampling == "qwen":
            choice = self._qwen_choice(times)
            return choice, self._size(len(choice.index))
        config = self._config
        grid = choose_grid(end_s, source_rate(times), config.fps, config.min_frames, config.max_frames)
        grid, size = fit_budget(grid, end_s, config, self._sound_tokens, self._size, self._probe.uri)
        flags = ["fps_raised"] * grid.raised + ["fps_lowered"] * grid.lowered
        return Choice(on_screen(times, grid.times), grid.times, grid.fps, tuple(flags)), size

    def _qwen_choice(self, times: Times) -> Choice:
        """The pictures that qwen-omni-utils takes: evenly spread by number, an even count. A span is of numbers, too:
        its times times the average rate, whenever these pictures are shown."""
        config, first, count = self._config, 0, len(times)
        rate = self._average_rate(times)
        start_s, stop_s = self._asked
        if start_s is not None or stop_s is not None:
            whole_s = count / rate
            first = math.ceil(min(max(start_s or 0.0, 0.0), whole_s) * rate)
            last = count - 1 if stop_s is None else min(math.floor(min(max(stop_s, 0.0), whole_s) * rate), count - 1)
            count = last - first + 1
        if count < 1:
            text = f"no picture in the asked span, by the average rate of {rate:g}/s"
            raise RowError("empty_span", f"{self._probe.uri}: {text}", "video")
        if count < QWEN_MIN_FRAMES:
            return Choice(np.zeros(1, np.int64) + first, np.zeros(1), config.fps, ("still",))
        num_frames = smart_nframes(count, rate, config.fps, config.min_frames, config.max_frames)
        # torch, because the rounding of halves depends on its float32 arithmetic
        index = torch.linspace(first, first + count - 1, num_frames).round().long().numpy()
        fps = num_frames / count * rate
        return Choice(index, np.arange(num_frames) / fps, fps)

    def _average_rate(self, times: Times) -> float:
        """Pictures per second by the header's average, else by the pictures themselves."""
        rate = self._probe.video.average_rate  # type: ignore[union-attr]
        return rate or source_rate(times) or 25.0

    def _size(self, num_frames: int, at_most: float | None = None) -> tuple[int, int]:
        """(height, width) of the stored frames."""
        height, width = upright_size(self._head, stretch=self._config.sampling == "time_grid")
        config = self._config
        if (ratio := max(height, width) / min(height, width)) > MAX_ASPECT_RATIO:
            text = f"{width}x{height} has an aspect ratio of {ratio:.0f}; the model takes {MAX_ASPECT_RATIO}"
            raise RowError("aspect_ratio", f"{self._probe.uri}: {text}", "video")
        if config.resize == "none":
            return height, width
        low, high = frame_pixel_limits(
            num_frames, config.factor, config.min_pixels, config.max_pixels, config.total_pixels
        )
        if at_most is not None:
            high = max(min(high, at_most), 1.0)
            low = min(low, high)
        return smart_resize(height, width, config.factor, low, high)

    # --- pixels -----------------------------------------------------------------------------------------------------

    def _render(self, frame: av.VideoFrame, width: int, height: int) -> np.ndarray:
        orientation = self._head.orientation
        if orientation.transpose:
            width, height = height, width
        if self._config.resize == "fast":
            image = to_rgb(frame, width, height, area_scaled=True)
        else:
            qwen = self._config.sampling == "qwen"
            image = to_rgb(frame, frame.width, frame.height, as_qwen=qwen)
            image = resize(image, width, height, "float" if qwen else "uint8")
        return image if orientation.upright else orientation.apply(image)

    def _flags(self, times: Times) -> list[str]:
        head, video = self._head, self._probe.video
        assert video is not None
        found = {
            "rotated": not head.orientation.upright,
            "stretched": head.sar != 1.0 and self._config.sampling == "time_grid",
            "interlaced": video.interlaced,
            "hdr": head.hdr,
            "alpha": head.transparent,
            "vfr": is_variable_rate(times),
            "still": len(times) == 1,
            "held_start": float(times[0]) > HELD_START_S,
            "clock_jump": len(self._probe.offsets) > 1,
            "several_tracks": self._probe.num_video_tracks > 1,
            "truncated": self._probe.truncated,
            "size_changed": self._size_changed,
        }
        return [name for name, is_so in found.items() if is_so]

    def _gaps(self, times: Times, end_s: float) -> list[tuple[float, float]]:
        video = self._probe.video
        assert video is not None
        if any(video.packets.empty):  # an empty packet repeats the picture: it is no hole
            pts = np.asarray(video.packets.pts) - self._zero_s
            times = np.unique(np.r_[times, pts[~np.isnan(pts)]])
        return [(round(max(a, 0.0), 6), round(min(b, end_s), 6)) for a, b in picture_gaps(times) if b > 0 and a < end_s]


def upright_size(head: PictureInfo, stretch: bool) -> tuple[int, int]:
    """(height, width) as shown: sample aspect ratio applied to the width, then rotated."""
    width = max(1, round(head.width * head.sar)) if stretch else head.width
    return (width, head.height) if head.orientation.transpose else (head.height, width)
