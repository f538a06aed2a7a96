"""Decoded sound -> one channel of 16-bit samples on the clip's clock.

Every decoded chunk goes through here once: all channels as float, mixed to one, put where its timestamp says, resampled
in one stream per format, rounded to 16 bit. Memory is the 16-bit result and one chunk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import soxr
from numpy.typing import NDArray

from pack.media.timeline import GAP_S

Float32 = NDArray[np.float32]

JITTER_S = 0.015  # steps of timestamps under this are rounding, not silence
SILENT_PEAK = 33  # 16-bit steps: -60 dBFS
MAX_PADDING_FRAMES = 3  # codec frames of end padding that a container may ask to cut

# Gains of a mono mix by speaker, so that dialogue (the centre) keeps its level; the low-frequency channel is left out.
CENTRE, FRONT, AROUND = 1.0, 0.7071, 0.5
SPEAKER_GAINS = {"FC": CENTRE, "LFE": 0.0, "LFE2": 0.0} | dict.fromkeys(("FL", "FR", "FLC", "FRC", "DL", "DR"), FRONT)


def to_float(frame: Any) -> Float32:
    """Samples [channels, n] in [-1, 1] (beyond, when the source is float and too loud) of a PyAV audio frame."""
    channels = frame.layout.nb_channels
    samples = frame.to_ndarray()
    if not frame.format.is_planar:
        samples = samples.reshape(-1, channels).T
    if samples.dtype == np.uint8:
        return (samples.astype(np.float32) - 128.0) / 128.0
    if samples.dtype.kind == "i":
        full_scale = float(-int(np.iinfo(samples.dtype).min))
        return (samples.astype(np.float64) / full_scale).astype(np.float32)
    return samples.astype(np.float32, copy=False)


def mix_gains(channel_names: list[str]) -> Float32:
    """Gain of each channel in the mono mix: the mean of one or two, else a layout mix at the centre's level.

    Without a centre the front pair gets 0.5 each, as in the mean of a stereo pair.
    """
    if len(channel_names) <= 2:
        return np.full(len(channel_names), 1.0 / max(1, len(channel_names)), np.float32)
    gains = np.array([SPEAKER_GAINS.get(name, AROUND) for name in channel_names], np.float32)
    if "FC" not in channel_names:
        gains *= FRONT
    return gains if gains.any() else np.full(len(gains), 1.0 / len(gains), np.float32)


class SoundTrack:
    """Collects one track. Times are on the clip's clock; sound before 0 and from end_s on is dropped.

    zero_s: container time of t = 0; counted: timestamps mean nothing, samples are counted from the first one;
    source_end_s: container time at which the container says the sound ends (end padding behind it is cut).
    """

    def __init__(
        self,
        sample_rate: int,
        zero_s: float,
        end_s: float = float("inf"),
        counted: bool = False,
        source_end_s: float | None = None,
    ) -> None:
        self.sample_rate = sample_rate
        self.gaps_s: list[tuple[float, float]] = []
        self.start_s: float | None = None  # when the source's own sound begins
        self.format_changed = False
        self.non_finite = False
        self.clipped = False
        self.source_rate = 0
        self.channels = 0
        self.layout = ""
        self._zero_s, self._end_s, self._counted = zero_s, end_s, counted
        self._source_end_s = None if source_end_s is None else source_end_s - zero_s
        self._position_s: float | None = None  # clock time of the next source sample
        self._held: list[tuple[float, Float32]] = []  # samples behind source_end_s, perhaps padding
        self._frame_length = 0
        self._segment_in = self._segment_out = 0  # samples of the current format
        self._resampler: Any = None
        self._chunks: list[NDArray[np.int16]] = []
        self._mix_energy = self._channel_energy = 0.0

    def add(self, frame: Any, time_s: float | None) -> None:
        """Takes the next decoded PyAV audio frame; time_s: its container time."""
        samples = to_float(frame)
        if samples.shape[1] == 0 or frame.sample_rate <= 0:
            return
        mono = self._mix(samples, [c.name for c in frame.layout.channels])
        self._begin_format(frame.sample_rate, samples.shape[0], frame.layout.name)
        self._frame_length = max(self._frame_length, len(mono))
        self._place(mono, None if time_s is None else time_s - self._zero_s)

    def finish(self) -> NDArray[np.int16]:
        """All samples, int16 [n]. Call once."""
        held = sum(len(mono) for _, mono in self._held)
        if held > MAX_PADDING_FRAMES * max(self._frame_length, 1):
            self._release_held()  # too much for padding: the container is wrong about the end
        self._end_segment()
        return np.concatenate(self._chunks) if self._chunks else np.zeros(0, np.int16)

    @property
    def antiphase(self) -> bool:
        """Whether the mix lost nearly all of the energy that the channels have."""
        return self._channel_energy > 0 and self._mix_energy < 1e-3 * self._channel_energy

    def _mix(self, samples: Float32, channel_names: list[str]) -> Float32:
        finite = np.isfinite(samples)
        if not finite.all():
            self.non_finite = True
            samples = np.where(finite, samples, np.float32(0))
        if len(samples) == 1:
            return samples[0]
        mono = mix_gains(channel_names) @ samples
        self._mix_energy += float(np.dot(mono, mono))
        self._channel_energy += float(np.mean(np.einsum("cn,cn->c", samples, samples)))
        return mono

    def _begin_format(self, rate: int, channels: int, layout: str) -> None:
        if rate != self.source_rate:
            if self.source_rate:
                self._release_held()
                self._end_segment()
            if rate != self.sample_rate:
                self._resampler = soxr.ResampleStream(rate, self.sample_rate, 1, dtype="float32", quality="HQ")
        self.format_changed |= self.source_rate != 0 and (rate, channels) != (self.source_rate, self.channels)
        self.source_rate, self.channels, self.layout = rate, channels, layout

    def _place(self, mono: Float32, time_s: float | None) -> None:
        """Puts a chunk at its time: silence before it, or a cut of what overlaps, when its time is off by JITTER_S."""
        if self._position_s is None:
            self._position_s = 0.0 if time_s is None else time_s
            self.start_s = max(self._position_s, 0.0)
            self._silence(0.0, self._position_s)
        elif time_s is not None and not self._counted:
            step = time_s - self._position_s
            if step >= JITTER_S:
                if step > GAP_S:
                    self._note_gap(self._position_s, time_s)
                self._silence(self._position_s, time_s)
                self._position_s = time_s
            elif step <= -JITTER_S:
                mono = mono[round(-step * self.source_rate) :]
        start_s = self._position_s
        self._position_s = start_s + len(mono) / self.source_rate
        if self._source_end_s is not None:
            room = max(0, round((self._source_end_s - start_s) * self.source_rate))
            if len(mono) > room:
                self._held.append((start_s + room / self.source_rate, mono[room:]))
                mono = mono[:room]
        self._write(start_s, mono)

    def _note_gap(self, start_s: float, end_s: float) -> None:
        start_s, end_s = max(start_s, 0.0), min(end_s, self._end_s)
        if end_s > start_s:
            self.gaps_s.append((round(start_s, 6), round(end_s, 6)))

    def _release_held(self) -> None:
        held, self._held, self._source_end_s = self._held, [], None
        for start_s, mono in held:
            self._write(start_s, mono)

    def _silence(self, start_s: float, end_s: float) -> None:
        start_s, end_s = max(start_s, 0.0), min(end_s, self._end_s)
        left = max(0, round((end_s - start_s) * self.source_rate))
        while left > 0:
            block = np.zeros(min(left, self.source_rate), np.float32)
            left -= len(block)
            self._resample(block)

    def _write(self, start_s: float, mono: Float32) -> None:
        """Passes on what of a chunk that starts at start_s lies in [0, end_s)."""
        if start_s < 0:
            mono, start_s = mono[round(-start_s * self.source_rate) :], 0.0
        if self._end_s != float("inf"):
            mono = mono[: max(0, round((self._end_s - start_s) * self.source_rate))]
        self._resample(mono)

    def _resample(self, mono: Float32) -> None:
        self._segment_in += len(mono)
        if len(mono):
            self._store(mono if self._resampler is None else self._resampler.resample_chunk(mono))

    def _end_segment(self) -> None:
        """Takes the resampler's tail; the segment is ceil(n x ratio) samples long, as librosa counts it."""
        if self._resampler is not None:
            self._store(self._resampler.resample_chunk(np.zeros(0, np.float32), last=True))
            self._resampler = None
            short = -(-self._segment_in * self.sample_rate // self.source_rate) - self._segment_out
            self._store(np.zeros(max(0, short), np.float32))
        self._segment_in = self._segment_out = 0

    def _store(self, samples: Float32) -> None:
        if not len(samples):
            return
        self._segment_out += len(samples)
        scaled = np.rint(samples * np.float32(32768))
        # Resampling a full-scale source rings a little over 1; only what is well beyond was too loud.
        self.clipped |= bool(np.abs(samples).max() > 1.01)
        self._chunks.append(np.clip(scaled, -32768, 32767).astype(np.int16))


def is_silent(samples: NDArray[np.int16]) -> bool:
    """Whether the sound never reaches -60 dBFS. samples: int16 [n]."""
    return len(samples) > 0 and int(np.abs(samples.astype(np.int32)).max()) < SILENT_PEAK
