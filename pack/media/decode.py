"""One pass over a file: packets in file order, pictures to one sink, sound to another, as little decoding as will do.

A picture that nobody wants need not be decoded when no wanted picture depends on it. The plan made here from the packet
table drops whole groups of pictures without a wanted one, the tail of a group behind its last wanted one, and lets the
decoder skip single pictures that no other refers to. Where the table cannot be trusted everything is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import av
import numpy as np
from av.error import FFmpegError
from av.filter import Graph

from pack.media.audio import SoundTrack
from pack.media.probe import Probe, StreamInfo, open_container, packets_of, video_decoder

# Keyframe marks and picture order can be trusted here; elsewhere every packet is decoded.
INDEXED_FORMATS = {"mov", "mp4", "matroska", "webm"}
# Decoders whose skip_frame=NONREF leaves out just pictures that no other picture refers to.
NONREF_CODECS = {"h264", "mpeg4", "mpeg2video", "mpeg1video"}
SEEK_WORTH_S = 20.0
SOUND_PREROLL_S = 1.0

PictureSink = Callable[[av.VideoFrame, float], None]


@dataclass
class DecodePlan:
    """For every video packet in file order: use[i] is 0 drop, 1 decode but the picture is not wanted, 2 wanted;
    restart[i]: the decoder starts afresh before it."""

    use: np.ndarray
    restart: np.ndarray

    @property
    def first(self) -> int:
        """Number of the first packet that is decoded."""
        return int(np.argmax(self.use > 0)) if (self.use > 0).any() else len(self.use)


def plan_decoding(probe: Probe, wanted_ticks: set[int]) -> DecodePlan | None:
    """Which packets of the video stream to decode for these pictures (presentation times in stream ticks); None where
    the container's marks cannot be trusted and all must be decoded."""
    video = probe.video
    assert video is not None
    if not INDEXED_FORMATS & set(probe.container.split(",")) or not video.packets.keyframe[0] or len(probe.offsets) > 1:
        return None
    ticks = picture_ticks(video)
    key = np.asarray(video.packets.keyframe)
    wanted = np.isin(ticks, np.fromiter(wanted_ticks, np.int64, len(wanted_ticks))) & ~np.asarray(video.packets.discard)
    use = np.zeros(len(ticks), np.int8)
    restart = np.zeros(len(ticks), bool)
    starts = np.flatnonzero(key)
    ends = np.append(starts[1:], len(ticks))
    whole_group = False  # the group behind it has wanted pictures that also refer to this one
    for start, end in zip(starts[::-1], ends[::-1], strict=True):
        here = np.flatnonzero(wanted[start:end])
        last = end - 1 if whole_group else (start + here[-1] if len(here) else start - 1)
        use[start : last + 1] = 1
        whole_group = bool(len(here)) and bool((ticks[start:end][here] < ticks[start]).any())
    use[wanted] = 2
    dropped = np.append(True, use[:-1] == 0)
    restart = (use > 0) & dropped & key
    restart[starts[0]] = False
    return DecodePlan(use, restart)


def picture_ticks(video: StreamInfo) -> np.ndarray:
    """Presentation time of every packet in ticks of the stream's time base, int64; NaN becomes the smallest integer."""
    ticks = np.asarray(video.packets.pts) / video.time_base
    return np.where(np.isnan(ticks), np.iinfo(np.int64).min, np.rint(np.nan_to_num(ticks))).astype(np.int64)


class ClipDecoder:
    """Decodes a probed file once. errors counts damaged video packets, sound_errors damaged sound packets."""

    def __init__(self, probe: Probe, deinterlace: bool = False) -> None:
        self._probe, self._deinterlace = probe, deinterlace
        self.errors = self.sound_errors = 0
        self.num_pictures = 0
        self._graph: Graph | None = None
        self._rate: float | None = None
        self._last_s = float("-inf")

    def run(
        self,
        picture_sink: PictureSink | None,
        sound: SoundTrack | None,
        plan: DecodePlan | None = None,
        until_s: float = float("inf"),
        from_s: float = float("-inf"),
    ) -> None:
        """picture_sink(frame, container time in s) gets every decoded picture in display order; sound every frame of
        the chosen track. Only times in [from_s, until_s) are needed; without a plan all are decoded."""
        container = open_container(self._probe.path, self._probe.uri)
        try:
            streams = self._streams(container, picture_sink is not None, sound is not None)
            if not streams:
                return
            skipped = self._seek(container, plan, from_s, sound) if from_s > SEEK_WORTH_S else 0
            if skipped is None:  # the container does not seek where its index says
                container.close()
                container = open_container(self._probe.path, self._probe.uri)
                streams = self._streams(container, picture_sink is not None, sound is not None)
            self._loop(container, streams, picture_sink, sound, plan, skipped or 0, until_s)
        finally:
            container.close()

    def _streams(self, container: av.container.InputContainer, video: bool, audio: bool) -> list:
        chosen = [i for i, want in ((self._probe.video, video), (self._probe.audio, audio)) if i is not None and want]
        return [container.streams[i.index] for i in chosen]

    def _loop(self, container, streams, picture_sink, sound, plan, number, until_s) -> None:  # type: ignore[no-untyped-def]
        probe = self._probe
        decoders = {s.index: video_decoder(s) if s.type == "video" else s.codec_context for s in streams}
        for decoder in decoders.values():
            decoder.thread_count = 1
        video_index = probe.video.index if probe.video and picture_sink else -1
        numbers = {s.index: number if s.index == video_index else 0 for s in streams}
        infos = {i.index: i for i in (probe.video, probe.audio) if i is not None}
        late = set()
        for packet in packets_of(container, streams):
            index, info = packet.stream_index, infos[packet.stream_index]
            self._follow_epoch(packet, info, numbers[index])
            i, numbers[index] = numbers[index], numbers[index] + 1
            if packet.dts is not None and packet.dts * info.time_base > until_s + SOUND_PREROLL_S:
                late.add(index)
                if len(late) == len(streams):
                    break
            if index != video_index:
                self._sound(decoders[index], packet, sound)
            elif plan is None:
                self._pictures(decoders[index], packet, picture_sink)
            elif i < len(plan.use) and plan.use[i]:
                if plan.restart[i]:
                    self._pictures(decoders[index], None, picture_sink)
                    decoders[index].flush_buffers()
                if info.codec in NONREF_CODECS:
                    decoders[index].skip_frame = "DEFAULT" if plan.use[i] == 2 else "NONREF"
                if plan.use[i] == 2 or not packet.is_disposable:
                    self._pictures(decoders[index], packet, picture_sink)
        for index, decoder in decoders.items():
            if index == video_index:
                self._pictures(decoder, None, picture_sink)
                self._drain_graph(picture_sink)
            else:
                self._sound(decoder, None, sound)

    def _follow_epoch(self, packet: av.Packet, info: StreamInfo, number: int) -> None:
        if len(self._probe.offsets) > 1 and number < len(info.packets.epoch):
            shift = round(self._probe.offsets[int(info.packets.epoch[number])] / info.time_base)
            packet.pts = None if packet.pts is None else packet.pts + shift
            packet.dts = None if packet.dts is None else packet.dts + shift

    def _sound(self, decoder: av.AudioCodecContext, packet: av.Packet | None, sound: SoundTrack) -> None:
        try:
            frames = decoder.decode(packet)
        except FFmpegError:
            self.sound_errors += 1
            return
        audio = self._probe.audio
        assert audio is not None
        for frame in frames:
            base = float(frame.time_base or 0) or audio.time_base  # frames of a drained decoder have no time base
            sound.add(frame, None if frame.pts is None else frame.pts * base)

    def _pictures(self, decoder: av.VideoCodecContext, packet: av.Packet | None, sink: PictureSink) -> None:
        try:
            frames = decoder.decode(packet)
        except FFmpegError:
            self.errors += 1
            return
        for frame in frames:
            self.errors += frame.is_corrupt
            for picture in self._deinterlaced(frame):
                self._hand_over(picture, sink)

    def _hand_over(self, picture: av.VideoFrame, sink: PictureSink) -> None:
        """Numbers the pictures and gives one without a time the next one on the stream's average rate."""
        video = self._probe.video
        assert video is not None
        if picture.pts is None:
            time_s = self._last_s + 1.0 / 25 if np.isfinite(self._last_s) else 0.0
        else:
            time_s = picture.pts * (float(picture.time_base or 0) or video.time_base)
        self.num_pictures += 1
        self._last_s = time_s
        sink(picture, time_s)

    def _deinterlaced(self, frame: av.VideoFrame) -> Iterator[av.VideoFrame]:
        if not self._deinterlace:
            yield frame
            return
        if self._graph is None:
            self._graph = Graph()
            source = self._graph.add_buffer(
                width=frame.width, height=frame.height, format=frame.format, time_base=frame.time_base
            )
            filters = [source, self._graph.add("bwdif", "mode=send_frame:parity=auto:deint=interlaced")]
            self._graph.link_nodes(*filters, self._graph.add("buffersink")).configure()
        self._graph.vpush(frame)
        yield from self._pull()

    def _pull(self) -> Iterator[av.VideoFrame]:
        assert self._graph is not None
        while True:
            try:
                yield self._graph.vpull()
            except (av.error.BlockingIOError, av.error.EOFError):
                return

    def _drain_graph(self, sink: PictureSink) -> None:
        if self._graph is not None:
            self._graph.vpush(None)
            for picture in self._pull():
                self._hand_over(picture, sink)

    def _seek(self, container, plan, from_s, sound) -> int | None:  # type: ignore[no-untyped-def]
        return 0
