"""Opens one media file, chooses its streams and lists their packets, with hardly any decoding.

The packet table tells, before a picture is decoded: when each picture is shown, the real end of every stream, holes,
jumps of the timestamps and whether the file is cut short. Reading it costs about 25 ms per minute of film.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import av
import numpy as np
from av.error import FFmpegError
from numpy.typing import NDArray

from pack.media.epochs import follow_epochs
from pack.media.picture import HLG, PQ, Orientation, orientation_of
from pack.media.strays import mend_ends
from pack.media.timeline import Times, misplaced_times, stray_times
from pack.media.truncation import flv_states_duration, is_truncated
from schemas.errors import RowError

# Demuxers that open other files, listen to the network or take any text for media.
REFUSED_FORMATS = {"hls", "concat", "dash", "tty", "ffmetadata", "image2", "lavfi", "sdp", "rtp", "rtsp", "sap", "fifo"}
# libavformat opens nothing else: a playlist is refused before its demuxer looks at the files it names.
ALLOWED_FORMATS = ",".join(sorted({n for names in av.formats_available for n in names.split(",")} - REFUSED_FORMATS))
# Streams of frames without usable timestamps of their own: sound is counted, not placed.
COUNTED_FORMATS = {"mp3", "aac", "adts", "wav", "w64", "flac", "aiff", "au", "amr", "ac3", "eac3", "dts", "caf", "voc"}
RAW_VIDEO = {"h264", "hevc", "vvc", "m4v", "mpegvideo", "av1", "obu"}
# Decoders that keep the transparency which the built-in ones drop.
ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
# Their demuxers hand a packet over when the next one of its stream begins, far behind others perhaps.
LATE_FORMATS = {"mpegts", "mpeg"}


@dataclass
class PacketTable:
    """Packets of one stream in file order; times in container seconds, NaN where the container has none.

    position: where a packet is in the file, against the packets of other streams. discard: an edit list leaves it out.
    The times of later epochs are shifted to follow those of the first. strays: packets whose time was damaged.
    """

    pts: list[float] = field(default_factory=list)
    dts: list[float] = field(default_factory=list)
    duration: list[float] = field(default_factory=list)
    keyframe: list[bool] = field(default_factory=list)
    discard: list[bool] = field(default_factory=list)
    empty: list[bool] = field(default_factory=list)
    position: list[int] = field(default_factory=list)
    corrupt: int = 0
    strays: set[int] = field(default_factory=set)
    epoch: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.pts)

    def add(self, packet: av.Packet, time_base: float, position: int) -> None:
        nan = float("nan")
        self.pts.append(nan if packet.pts is None else packet.pts * time_base)
        self.dts.append(nan if packet.dts is None else packet.dts * time_base)
        self.duration.append((packet.duration or 0) * time_base)
        self.keyframe.append(packet.is_keyframe)
        self.discard.append(packet.is_discard)
        self.empty.append(packet.size == 0)
        self.position.append(position)
        self.corrupt += packet.is_corrupt

    def drop_outliers(self) -> None:
        """Takes the time from packets whose time was damaged: it fits neither the packet before nor the ones behind."""
        pts, dts, counted = np.asarray(self.pts), np.asarray(self.dts), self.counted()
        left_out = np.asarray(self.discard, bool)
        bad = stray_times(np.where(left_out | counted, np.nan, dts))
        bad |= misplaced_times(pts, np.where(left_out | bad, np.nan, dts))
        # What is dated from damaged ones is damaged, too.
        bad = bad[np.maximum.accumulate(np.where(counted, 0, np.arange(len(bad))))]
        if bad.any():
            self.strays |= {int(i) for i in np.flatnonzero(bad)}
            self.pts = list(np.where(bad, np.nan, pts))
            self.dts = list(np.where(bad, np.nan, dts))

    def counted(self) -> NDArray[np.bool_]:
        """Which packets have no time of their own: they share a PES packet with the one before, and libavformat counts
        their times from its, at the sample rate that the stream began with."""
        return np.diff(self.position, prepend=-1) == 0

    def shown(self) -> Times:
        """Presentation times, NaN for packets without one and for those that an edit list leaves out."""
        return np.where(self.discard, np.nan, np.asarray(self.pts, np.float64))

    def end_s(self) -> float | None:
        """The latest end of a packet, None when no packet has a time."""
        ends = self.shown() + np.asarray(self.duration)
        return None if np.all(np.isnan(ends)) else float(np.nanmax(ends))


@dataclass(frozen=True)
class PictureInfo:
    """The first decoded picture. width, height: coded size in pixels; sar: width of a sample over its height."""

    width: int
    height: int
    sar: float
    orientation: Orientation
    pixel_format: str
    color: str
    hdr: bool
    transparent: bool


@dataclass
class StreamInfo:
    """A chosen stream. first_s: time of the first picture or sample that really decodes, None if none does."""

    index: int
    codec: str
    time_base: float
    packets: PacketTable
    declared_end_s: float | None
    first_s: float | None = None
    has_skip_data: bool = False
    interlaced: bool = False
    head: PictureInfo | None = None
    average_rate: float | None = None
    num_pictures: int = 0


@dataclass
class Probe:
    """What is known of a file before it is decoded. offsets: seconds to add to the times of each epoch."""

    path: str
    uri: str
    container: str
    video: StreamInfo | None
    audio: StreamInfo | None
    audio_tracks: list[int]
    num_video_tracks: int
    truncated: bool
    offsets: list[float]
    zero_s: float

    @property
    def counted(self) -> bool:
        """Whether sound samples are counted because the container's times mean nothing."""
        return bool(COUNTED_FORMATS & set(self.container.split(",")))


def open_container(path: str, uri: str) -> Any:
    """An open PyAV container that cannot reach anything but this one file; RowError where no demuxer reads it."""
    try:
        limits = {"protocol_whitelist": "file", "format_whitelist": ALLOWED_FORMATS}
        container = av.open("file:" + path, options=limits, metadata_errors="replace")
    except FFmpegError as error:
        raise RowError("unreadable_container", f"{uri}: {error.strerror}", "video") from None
    if REFUSED_FORMATS & set(container.format.name.split(",")):
        name = container.format.name
        container.close()
        raise RowError("unreadable_container", f"{uri}: '{name}' is a list of other files or no media", "video")
    return container


def packets_of(container: Any, streams: list[Any], faults: list[str] | None = None) -> Iterator[av.Packet]:
    """The packets of these streams in file order, without the one that only ends a stream. A read error ends them, and
    is added to `faults`. Empty packets with a time (a picture that is repeated) are among them; do not decode those."""
    try:
        for packet in container.demux(streams):
            if packet.size or packet.pts is not None:
                yield packet
    except FFmpegError as error:
        if faults is not None:
            faults.append(str(error))


def choose_video(container: Any) -> tuple[Any | None, int]:
    """(the stream, number of real video streams): default disposition first; attached pictures are no video."""
    real = [s for s in container.streams.video if not s.disposition & av.stream.Disposition.attached_pic]
    real = [s for s in real if s.codec_context is not None]
    defaults = [s for s in real if s.disposition & av.stream.Disposition.default]
    return (defaults or real or [None])[0], len(real)


def rank_audio(container: Any) -> list[int]:
    """Stream indexes of the decodable audio tracks, those with default disposition first."""
    tracks = [s for s in container.streams.audio if s.codec_context is not None]
    return [s.index for s in sorted(tracks, key=lambda s: not s.disposition & av.stream.Disposition.default)]


def video_decoder(stream: Any) -> Any:
    """The codec context that decodes this stream, one thread."""
    decoder = stream.codec_context
    if has_alpha_layer(stream):
        decoder = av.CodecContext.create(ALPHA_DECODERS[decoder.name], "r")
    decoder.thread_count = 1
    return decoder


def has_alpha_layer(stream: Any) -> bool:
    """Whether WebM says that this VP8/VP9 stream carries transparency beside the picture."""
    marked = any(k.lower() == "alpha_mode" and v == "1" for k, v in stream.metadata.items())
    name = ALPHA_DECODERS.get(stream.codec_context.name)
    return marked and name is not None and name in av.codecs_available


def probe(path: str, uri: str, want_video: bool, audio_index: int | None = None) -> Probe:
    """Reads all packets of `path`. audio_index: the audio track to take, null = the best one.

    Raises RowError: unreadable_container.
    """
    container = open_container(path, uri)
    try:
        video, num_video = choose_video(container) if want_video else (None, 0)
        tracks = rank_audio(container)
        chosen = audio_index if audio_index is not None else (tracks[0] if tracks else None)
        audio = container.streams[chosen] if chosen is not None else None
        infos = {s.index: _stream_info(container, s) for s in (video, audio) if s is not None}
        faults: list[str] = []
        last_s = _read_packets(container, [s for s in (video, audio) if s is not None], infos, faults)
        if "mov" not in container.format.name.split(","):  # whose times are sums of steps, which edit lists cut up
            mend_ends(list(infos.values()), _declared_end(path, container))
        _end_of_edits(container, list(infos.values()))
        offsets, zero_s = follow_epochs(list(infos.values()), _timeline_end(container))
        video_info = infos.get(video.index) if video is not None else None
        audio_info = infos.get(audio.index) if audio is not None else None
        return Probe(
            path, uri, container.format.name, video_info, audio_info, tracks, num_video,
            bool(faults) or is_truncated(path, container, list(infos.values()), last_s), offsets, zero_s,
        )  # fmt: skip
    finally:
        container.close()


def _stream_info(container: Any, stream: Any) -> StreamInfo:
    base = float(stream.time_base)
    end = None
    if stream.duration is not None and stream.duration > 0:
        end = ((stream.start_time or 0) + stream.duration) * base
    name = stream.codec_context.name
    info = StreamInfo(stream.index, name, base, PacketTable(), end)
    if stream.type == "video":
        info.interlaced = stream.codec_context.field_order in (2, 3, 4, 5)
        # A stream without a container has no average, only what its own headers say.
        rate = stream.guessed_rate if RAW_VIDEO & set(container.format.name.split(",")) else stream.average_rate
        info.average_rate = float(rate) if rate else None
        info.num_pictures = stream.frames or 0
    return info


def _read_packets(container: Any, streams: list[Any], infos: dict[int, StreamInfo], faults: list[str]) -> float | None:
    """Fills the tables; decodes each stream up to its first frame. Returns the latest end of a packet of any stream."""
    decoders = {s.index: video_decoder(s) if s.type == "video" else s.codec_context for s in streams}
    bases = {s.index: float(s.time_base) for s in container.streams if s.time_base is not None}
    last_s: float | None = None
    by_bytes = bool(LATE_FORMATS & set(container.format.name.split(",")))
    every = packets_of(container, [s for s in container.streams if s.index in bases], faults)
    for count, packet in enumerate(every):
        if packet.pts is not None:
            end = (packet.pts + (packet.duration or 0)) * bases[packet.stream_index]
            last_s = end if last_s is None else max(last_s, end)
        info = infos.get(packet.stream_index)
        if info is None:
            continue
        info.packets.add(packet, info.time_base, _position(packet, info.packets) if by_bytes else count)
        if info.first_s is None and packet.size:
            info.has_skip_data |= packet.has_sidedata("skip_samples")
            _decode_head(decoders[packet.stream_index], packet, info, container.streams[packet.stream_index])
    for stream in streams:
        if infos[stream.index].first_s is None:
            _decode_head(decoders[stream.index], None, infos[stream.index], stream)
    return last_s


def _position(packet: av.Packet, table: PacketTable) -> int:
    """Where in the file a packet begins; one that shares its PES packet with the one before has no place of its own."""
    if packet.pos is not None and packet.pos >= 0:
        return int(packet.pos)
    return table.position[-1] if table.position else 0


def _decode_head(decoder: Any, packet: av.Packet | None, info: StreamInfo, stream: Any) -> None:
    try:
        frames = decoder.decode(packet)
    except FFmpegError:
        return  # counted when the stream is decoded for good
    if frames:
        first = frames[0]
        info.first_s = 0.0 if first.pts is None else first.pts * info.time_base
        if isinstance(first, av.VideoFrame):
            info.interlaced |= first.interlaced_frame
            info.head = _picture_info(first, stream)


def _picture_info(frame: av.VideoFrame, stream: Any) -> PictureInfo:
    sar = float(stream.sample_aspect_ratio or 1)
    return PictureInfo(
        width=frame.width,
        height=frame.height,
        sar=sar if 0.1 <= sar <= 10 else 1.0,
        orientation=orientation_of(frame),
        pixel_format=frame.format.name,
        color=f"matrix={int(frame.colorspace)} range={int(frame.color_range)} transfer={int(frame.color_trc)}",
        hdr=int(frame.color_trc) in (PQ, HLG),
        transparent=any(c.is_alpha for c in frame.format.components),
    )


def _end_of_edits(container: Any, infos: list[StreamInfo]) -> None:
    """Puts right where the edit list of an MP4 ends a track that starts late. libavformat gives the length of the
    media, which counts from the start, or the end of the edits where that is smaller, which does not."""
    if "mov" not in container.format.name.split(","):
        return
    for info in infos:
        stream, shown = container.streams[info.index], info.packets.shown()
        if not stream.duration or (stream.start_time or 0) <= 0 or np.isnan(shown).all():
            continue
        kept, end_s = sum(not entry.is_discard for entry in stream.index_entries), stream.duration * info.time_base
        if kept == stream.frames or not stream.frames:
            continue
        left_out = np.asarray(info.packets.pts)[np.asarray(info.packets.discard)]
        later = left_out[left_out > np.nanmax(shown)]
        if end_s <= np.nanmax(shown):
            end_s = float(later.min()) if len(later) else info.packets.end_s()
        info.declared_end_s = end_s


def _timeline_end(container: Any) -> float | None:
    """Container time at which the file ends by its header; None where its times are those of a sender's clock."""
    formats = set(container.format.name.split(","))
    if container.duration is None or not {"mov", "matroska"} & formats:
        return None
    start = 0 if "matroska" in formats else container.start_time or 0
    return float(start + container.duration) / av.time_base


def _declared_end(path: str, container: Any) -> float | None:
    """Container time at which the header says that the last packet ends; None where libavformat reads its durations
    from the packets."""
    formats = set(container.format.name.split(","))
    if container.duration is None or not ("matroska" in formats or ("flv" in formats and flv_states_duration(path))):
        return None
    start = 0 if "matroska" in formats else container.start_time or 0
    return float(start + container.duration) / av.time_base
