"""One pass over a file: packets in file order, pictures to one sink, sound to another, as little decoding as will do.

A picture that nobody wants need not be decoded when no wanted picture depends on it. The plan made here from the packet
table drops whole groups of pictures without a wanted one, the tail of a group behind its last wanted one, and lets the
decoder skip single pictures that no other refers to. Where the table cannot be trusted everything is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av
import av.logging
import numpy as np
from av.error import FFmpegError
from av.filter import Graph

from pack.media.audio import SoundTrack
from pack.media.probe import Probe, StreamInfo, open_container, packets_of, video_decoder

# Keyframe marks and picture order can be trusted here; elsewhere every packet is decoded.
INDEXED_FORMATS = {"mov", "mp4", "matroska", "webm"}
# Decoders whose skip_frame=NONREF leaves out just pictures that no other picture refers to.
NONREF_CODECS = {"h264", "mpeg4", "mpeg2video", "mpeg1video"}
WANTED = 2
# What a decoder says that starts at a group of pictures which unrefers pictures of the group before.
HARMLESS_COMPLAINT = "mmco: unref short failure"
SEEK_WORTH_S = 20.0
SOUND_PREROLL_S = 1.0

PictureSink = Callable[[av.VideoFrame, float], None]


@dataclass
class DecodePlan:
    """For every video packet in file order: use[i] is 0 drop, 1 decode but the picture is not wanted, 2 wanted;
    restart[i]: the decoder starts afresh before it; leading[i]: its picture comes before the one that the decoder
    started with, so that it may refer to what was left out."""

    use: np.ndarray
    restart: np.ndarray
    leading: np.ndarray

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
    starts = np.flatnonzero(key)
    ends = np.append(starts[1:], len(ticks))
    whole_group = False  # the group behind it has wanted pictures that also refer to this one
    for start, end in zip(starts[::-1], ends[::-1], strict=True):
        here = np.flatnonzero(wanted[start:end])
        last = end - 1 if whole_group else (start + here[-1] if len(here) else start - 1)
        use[start : last + 1] = 1
        whole_group = bool(len(here)) and bool((ticks[start:end][here] < ticks[start]).any())
    use[wanted] = WANTED
    dropped = np.append(True, use[:-1] == 0)
    restart = (use > 0) & dropped & key
    restart[starts[0]] = False
    entry = np.where(restart[starts], ticks[starts], np.iinfo(np.int64).min)
    leading = ticks < np.repeat(entry, ends - starts)
    return DecodePlan(use, restart, leading)


def picture_ticks(video: StreamInfo) -> np.ndarray:
    """Presentation time of every packet in ticks of the stream's time base, int64; NaN becomes the smallest integer."""
    ticks = np.asarray(video.packets.pts) / video.time_base
    return np.where(np.isnan(ticks), np.iinfo(np.int64).min, np.rint(np.nan_to_num(ticks))).astype(np.int64)


class ClipDecoder:
    """Decodes a probed file. errors: damaged video packets; sound_errors: damaged sound packets; num_pictures: pictures
    handed over so far."""

    def __init__(self, probe: Probe, deinterlace: bool = False) -> None:
        self._probe, self._deinterlace = probe, deinterlace
        self.errors = self.sound_errors = self.num_pictures = 0
        self._graph: Graph | None = None
        self._graph_shape: tuple[int, int, str] | None = None
        self._video_base: Fraction | None = None
        self._last_s = float("-inf")
        self._sound_end_s: float | None = None  # of the last frame that was decoded

    def run(
        self,
        picture_sink: PictureSink | None,
        sound: SoundTrack | None,
        plan: DecodePlan | None = None,
        from_s: float = float("-inf"),
        until_s: float = float("inf"),
    ) -> None:
        """picture_sink(frame, container time in s) gets the decoded pictures in display order, `sound` every frame of
        the chosen track. Only times in [from_s, until_s) are needed; without a plan all pictures are decoded."""
        video = self._probe.video if picture_sink else None
        audio = self._probe.audio if sound else None
        chosen = [i for i in (video, audio) if i is not None]
        if not chosen:
            return
        container = open_container(self._probe.path, self._probe.uri)
        try:
            first = self._seek(container, plan, video, audio, from_s) if self._may_seek(plan, video, from_s) else 0
            if first is None:  # the container does not seek where its index says
                container.close()
                container = open_container(self._probe.path, self._probe.uri)
            streams = [container.streams[i.index] for i in chosen]
            self._video_base = container.streams[video.index].time_base if video is not None else None
            decoders = {s.index: video_decoder(s) if s.type == "video" else s.codec_context for s in streams}
            for decoder in decoders.values():
                decoder.thread_count = 1
            counted = set() if audio is None else set(np.flatnonzero(audio.packets.counted()).tolist())
            with damage_log() as log:
                for packet, number in self._packets(container, streams, video, first or 0, until_s):
                    if audio is not None and packet.stream_index == audio.index:
                        self._sound(decoders[audio.index], packet, sound, log, number in counted)
                    else:
                        self._planned(decoders[packet.stream_index], packet, number, plan, picture_sink, log)
                if video is not None:
                    self._pictures(decoders[video.index], None, picture_sink, [])
                    self._drain_graph(picture_sink)
                if audio is not None:
                    self._sound(decoders[audio.index], None, sound, log)
        finally:
            container.close()

    def _packets(
        self, container: Any, streams: list[Any], video: StreamInfo | None, first: int, until_s: float
    ) -> Iterator[tuple[av.Packet, int]]:
        """(packet with its time mended, its number in the table) up to until_s. first: the first video packet's."""
        infos = {i.index: i for i in (self._probe.video, self._probe.audio) if i is not None}
        numbers = {s.index: first if video and s.index == video.index else 0 for s in streams}
        behind = set()
        for packet in packets_of(container, streams):
            index, info = packet.stream_index, infos[packet.stream_index]
            number, numbers[index] = numbers[index], numbers[index] + 1
            self._mend_time(packet, info, number)
            if packet.dts is not None and packet.dts * info.time_base > until_s + SOUND_PREROLL_S:
                behind.add(index)
                if len(behind) == len(streams):
                    return
            if packet.size:
                yield packet, number

    def _mend_time(self, packet: av.Packet, info: StreamInfo, number: int) -> None:
        """Gives a packet the time that the table has for it: shifted in a later epoch, and when it was damaged the
        mended one or none."""
        if number in info.packets.strays:
            time = info.packets.pts[number]
            packet.pts, packet.dts = None if np.isnan(time) else round(time / info.time_base), None
            return
        if len(self._probe.offsets) > 1 and number < len(info.packets.epoch):
            shift = round(self._probe.offsets[int(info.packets.epoch[number])] / info.time_base)
            packet.pts = None if packet.pts is None else packet.pts + shift
            packet.dts = None if packet.dts is None else packet.dts + shift

    def _sound(
        self,
        decoder: Any,
        packet: av.Packet | None,
        sound: SoundTrack | None,
        log: list[Any],
        counted: bool = False,
    ) -> None:
        """Decodes a sound packet. counted: the packet has no time of its own."""
        audio, logged = self._probe.audio, len(log)
        assert audio is not None and sound is not None
        try:
            frames = decoder.decode(packet)
        except FFmpegError:
            self.sound_errors += 1
            return
        self.sound_errors += complained(log, logged)
        for frame in frames:
            base = float(frame.time_base or 0) or audio.time_base  # frames of a drained decoder have no time base
            time_s = None if frame.pts is None else frame.pts * base
            if counted and sound.format_changed:
                time_s = self._sound_end_s  # libavformat has counted on at the old rate
            sound.add(frame, time_s)
            self._sound_end_s = None if time_s is None else time_s + frame.samples / frame.sample_rate

    def _planned(
        self,
        decoder: Any,
        packet: av.Packet,
        number: int,
        plan: DecodePlan | None,
        sink: PictureSink | None,
        log: list[Any],
    ) -> None:
        """Decodes a video packet as far as the plan wants it."""
        if plan is None:
            self._pictures(decoder, packet, sink, log)
        elif number < len(plan.use) and plan.use[number]:
            wanted = plan.use[number] == WANTED
            if plan.restart[number]:
                self._pictures(decoder, None, sink, [])
                decoder.flush_buffers()
            if decoder.name in NONREF_CODECS:
                decoder.skip_frame = "DEFAULT" if wanted else "NONREF"
            if wanted or not packet.is_disposable:
                self._pictures(decoder, packet, sink, [] if plan.leading[number] else log)

    def _pictures(self, decoder: Any, packet: av.Packet | None, sink: PictureSink | None, log: list[Any]) -> None:
        logged = len(log)
        try:
            frames = decoder.decode(packet)
        except FFmpegError:
            self.errors += 1
            return
        self.errors += complained(log, logged) or any(frame.is_corrupt for frame in frames)
        for frame in frames:
            for picture in self._deinterlaced(frame):
                self._hand_over(picture, sink)

    def _hand_over(self, picture: av.VideoFrame, sink: PictureSink | None) -> None:
        """Counts the picture; one without a time follows the one before at the stream's average rate."""
        video = self._probe.video
        assert video is not None and sink is not None
        if picture.pts is not None:
            time_s = picture.pts * (float(picture.time_base or 0) or video.time_base)
        else:
            time_s = self._last_s + 1.0 / (video.average_rate or 25.0) if self.num_pictures else video.first_s or 0.0
        self.num_pictures += 1
        self._last_s = time_s
        sink(picture, time_s)

    # --- deinterlacing ------------------------------------------------------------------------------------------------

    def _deinterlaced(self, frame: av.VideoFrame) -> Iterator[av.VideoFrame]:
        """The frame itself, or what the filter has ready; only frames marked interlaced are changed."""
        if not self._deinterlace:
            yield frame
            return
        shape = (frame.width, frame.height, frame.format.name)
        if self._graph is not None and shape != self._graph_shape:  # the filter takes pictures of one shape
            self._graph.vpush(None)
            yield from self._pull()
            self._graph = None
        if self._graph is None:
            self._graph, self._graph_shape = Graph(), shape
            source = self._graph.add_buffer(
                width=frame.width, height=frame.height, format=frame.format, time_base=self._video_base
            )
            bwdif = self._graph.add("bwdif", "mode=send_frame:parity=auto:deint=interlaced")
            self._graph.link_nodes(source, bwdif, self._graph.add("buffersink")).configure()
        frame.time_base = self._video_base  # those of a drained decoder have none
        self._graph.vpush(frame)
        yield from self._pull()

    def _pull(self) -> Iterator[av.VideoFrame]:
        assert self._graph is not None
        while True:
            try:
                yield self._graph.vpull()
            except (BlockingIOError, EOFError):
                return

    def _drain_graph(self, sink: PictureSink | None) -> None:
        if self._graph is not None:
            self._graph.vpush(None)
            for picture in self._pull():
                self._hand_over(picture, sink)

    # --- seeking ------------------------------------------------------------------------------------------------------

    def _may_seek(self, plan: DecodePlan | None, video: StreamInfo | None, from_s: float) -> bool:
        """Whether a seek can pay and the packets behind it can be told from the table."""
        infos = [i for i in (self._probe.video, self._probe.audio) if i is not None]
        return (
            from_s - self._probe.zero_s > SEEK_WORTH_S
            and bool(INDEXED_FORMATS & set(self._probe.container.split(",")))
            and len(self._probe.offsets) == 1
            and not any(i.packets.strays for i in infos)
            and (video is None or plan is not None)
        )

    def _seek(
        self,
        container: Any,
        plan: DecodePlan | None,
        video: StreamInfo | None,
        audio: StreamInfo | None,
        from_s: float,
    ) -> int | None:
        """Goes to the packets that are needed for from_s; returns the number of the video packet that comes first, None
        when it or the sound that comes first is one too late or unknown."""
        target_s = from_s - SOUND_PREROLL_S
        sound = None if audio is None else first_sound(audio, target_s)
        if video is None or plan is None:
            return 0 if audio is None or sound is None or seek_sound(container, audio, sound, target_s) else None
        entry = plan.first
        if entry >= len(plan.use):
            return None
        if audio is not None and sound is not None and "matroska" in self._probe.container:
            # Sound may be written long before the pictures of its time. (An MP4 is sought track by track.)
            before = np.asarray(video.packets.position[: entry + 1]) <= audio.packets.position[sound]
            entries = np.flatnonzero(before & np.asarray(video.packets.keyframe[: entry + 1]))
            if not len(entries):
                return None
            entry = int(entries[-1])
        ticks = picture_ticks(video)
        target = min(int(ticks[entry]), round(target_s / video.time_base))
        stream = container.streams[video.index]
        container.seek(target, stream=stream)
        packet = next(packets_of(container, [stream]), None)
        time = None if packet is None else packet.pts
        here = np.zeros(0, np.int64) if time is None else np.flatnonzero(ticks == time)
        if len(here) != 1 or here[0] > entry:
            return None
        container.seek(target, stream=stream)
        return int(here[0])


def first_sound(audio: StreamInfo, time_s: float) -> int | None:
    """The number of the first sound packet that lasts beyond time_s, None when there is none."""
    ends = np.asarray(audio.packets.pts) + np.asarray(audio.packets.duration)
    behind = np.flatnonzero(ends > time_s)
    return int(behind[0]) if len(behind) else None


def seek_sound(container: Any, audio: StreamInfo, number: int, time_s: float) -> bool:
    """Goes to where sound packet `number` is still to come, which is at time_s or so; False when that fails. Seeking
    goes by the pictures of a file, and its sound may be written some seconds earlier."""
    stream, wanted_s = container.streams[audio.index], audio.packets.pts[number]
    for _ in range(2):
        container.seek(int(time_s * av.time_base))
        packet = next(packets_of(container, [stream]), None)
        if packet is not None and packet.pts is not None:
            late_s = packet.pts * audio.time_base - wanted_s
            if late_s < audio.time_base:
                container.seek(int(time_s * av.time_base))
                return True
            time_s -= late_s + SOUND_PREROLL_S
    return False


def complained(log: list[Any], start: int) -> bool:
    """Whether the log has an entry from `start` on that tells of damage."""
    return any(HARMLESS_COMPLAINT not in message for _, _, message in log[start:])


@contextmanager
def damage_log() -> Iterator[list[Any]]:
    """Collects what the decoders complain about: many conceal damage and only say so here."""
    level, skip_repeated = av.logging.get_level(), av.logging.get_skip_repeated()
    av.logging.set_level(av.logging.ERROR)
    av.logging.set_skip_repeated(False)  # else what is counted depends on the files before
    try:
        with av.logging.Capture() as log:
            yield log
    finally:
        av.logging.set_level(level)
        av.logging.set_skip_repeated(skip_repeated)
