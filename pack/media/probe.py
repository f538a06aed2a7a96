"""Opens one media file, chooses its streams and lists their packets, with hardly any decoding.

The packet table tells, before a picture is decoded: when each picture is shown, the real end of every stream, holes,
jumps of the timestamps and whether the file is cut short. Reading it costs about 25 ms per minute of film.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import av
import numpy as np
from av.error import FFmpegError
from numpy.typing import NDArray

from pack.media.picture import HLG, PQ, Orientation, orientation_of
from pack.media.timeline import epoch_numbers, epoch_offsets, stray_times
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
MAX_REORDER = 17  # a picture is shown at most this many pictures after it is decoded
MIN_REORDER_S = 1.0
TRUNCATED_S = 0.3
TRUNCATED_SHARE = 0.01


@dataclass
class PacketTable:
    """Packets of one stream in file order; times in container seconds, NaN where the container has none.

    The times of later epochs are shifted to follow those of the first. strays: packets whose time was damaged.
    """

    pts: list[float] = field(default_factory=list)
    dts: list[float] = field(default_factory=list)
    duration: list[float] = field(default_factory=list)
    keyframe: list[bool] = field(default_factory=list)
    discard: list[bool] = field(default_factory=list)
    empty: list[bool] = field(default_factory=list)
    corrupt: int = 0
    strays: set[int] = field(default_factory=set)
    epoch: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.pts)

    def add(self, packet: av.Packet, time_base: float) -> None:
        nan = float("nan")
        self.pts.append(nan if packet.pts is None else packet.pts * time_base)
        self.dts.append(nan if packet.dts is None else packet.dts * time_base)
        self.duration.append((packet.duration or 0) * time_base)
        self.keyframe.append(packet.is_keyframe)
        self.discard.append(packet.is_discard)
        self.empty.append(packet.size == 0)
        self.corrupt += packet.is_corrupt

    def drop_outliers(self) -> None:
        """Takes the time from packets whose time was damaged: it fits neither the packet before nor the ones behind."""
        pts, dts = np.asarray(self.pts), np.asarray(self.dts)
        steps = np.diff(dts[~np.isnan(dts)])
        reorder_s = max(MIN_REORDER_S, MAX_REORDER * float(np.median(steps)) if len(steps) else 0.0)
        bad = stray_times(dts) | (np.abs(pts - dts) > reorder_s)
        if bad.any():
            self.strays = {int(i) for i in np.flatnonzero(bad)}
            self.pts = list(np.where(bad, np.nan, pts))
            self.dts = list(np.where(bad, np.nan, dts))

    def end_s(self) -> float | None:
        """The latest end of a packet, None when no packet has a time."""
        ends = np.asarray(self.pts) + np.asarray(self.duration)
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
        offsets, zero_s = _follow_epochs(list(infos.values()))
        video_info = infos.get(video.index) if video is not None else None
        audio_info = infos.get(audio.index) if audio is not None else None
        return Probe(
            path, uri, container.format.name, video_info, audio_info, tracks, num_video,
            bool(faults) or _is_truncated(path, container, list(infos.values()), last_s), offsets, zero_s,
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
    for packet in packets_of(container, [s for s in container.streams if s.index in bases], faults):
        if packet.pts is not None:
            end = (packet.pts + (packet.duration or 0)) * bases[packet.stream_index]
            last_s = end if last_s is None else max(last_s, end)
        info = infos.get(packet.stream_index)
        if info is None:
            continue
        info.packets.add(packet, info.time_base)
        if info.first_s is None and packet.size:
            info.has_skip_data |= packet.has_sidedata("skip_samples")
            _decode_head(decoders[packet.stream_index], packet, info, container.streams[packet.stream_index])
    for stream in streams:
        if infos[stream.index].first_s is None:
            _decode_head(decoders[stream.index], None, infos[stream.index], stream)
    return last_s


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


def _follow_epochs(infos: list[StreamInfo]) -> tuple[list[float], float]:
    """Numbers the epochs of the streams and returns (offset of each epoch, time of the first frame of any stream)."""
    for info in infos:
        info.packets.drop_outliers()
        times = [None if np.isnan(t) else t for t in info.packets.dts]
        info.packets.epoch = epoch_numbers(times)
    counts = {int(i.packets.epoch[-1]) + 1 for i in infos if len(i.packets)}
    firsts = [i.first_s for i in infos if i.first_s is not None]
    zero = min(firsts, default=0.0)
    if counts <= {1} or len(counts) > 1:
        # A jump in one stream alone is damage, not a new epoch: what overlaps is cut when it is placed.
        for info in infos:
            info.packets.epoch[:] = 0
        return [0.0], zero
    num_epochs = counts.pop()
    starts: list[list[float]] = [[] for _ in range(num_epochs)]
    ends: list[list[float]] = [[] for _ in range(num_epochs)]
    for info in infos:
        pts, duration = np.asarray(info.packets.pts), np.asarray(info.packets.duration)
        for epoch in range(num_epochs):
            here = (info.packets.epoch == epoch) & ~np.isnan(pts)
            if here.any():
                starts[epoch].append(float(pts[here].min()))
                ends[epoch].append(float((pts + duration)[here].max()))
    offsets = epoch_offsets(starts, ends, num_epochs)
    for info in infos:
        info.packets.pts = list(np.asarray(info.packets.pts) + np.asarray(offsets)[info.packets.epoch])
    return offsets, zero


def _is_truncated(path: str, container: Any, infos: list[StreamInfo], last_s: float | None) -> bool:
    """Whether the file ends before its header says. Estimates (raw MP3 and ADTS without a table) don't count."""
    formats = set(container.format.name.split(","))
    if "wav" in formats:
        return _wav_misses_bytes(path)
    if last_s is None or (formats & {"mp3", "aac", "adts"} and not any(i.has_skip_data for i in infos)):
        return False
    if "avi" in formats:  # libavformat shortens an AVI's durations to what is there, but keeps the count
        video = next((i for i in infos if i.num_pictures), None)
        if video is not None and len(video.packets) < video.num_pictures - max(2, video.num_pictures // 50):
            return True
    for info in infos if "asf" not in formats else []:
        end = info.packets.end_s()
        if info.declared_end_s is not None and end is not None and _missing(info.declared_end_s, end):
            return len(set(info.packets.epoch)) < 2
    if container.duration is None or (any(i.declared_end_s is not None for i in infos) and "asf" not in formats):
        return False
    if "asf" in formats:  # every stream has the length of the file, from its first packet on, wherever that is
        return _missing(max((s.duration or 0) * float(s.time_base) for s in container.streams), last_s)
    start = (container.start_time or 0) / av.time_base
    length = container.duration / av.time_base
    # Matroska's duration is the absolute end; others count from the start. Only what both readings miss is missing.
    return _missing(length if "matroska" in formats else start + length, last_s)


def _wav_misses_bytes(path: str) -> bool:
    """Whether a WAV's data chunk is longer than the file (libavformat believes the file). Sizes that streams write
    before they know better (0, 2^31 - 1 and up) say nothing."""
    with open(path, "rb") as file:
        head = file.read(4096)
    start = head.find(b"data", 12)
    if head[:4] != b"RIFF" or start < 0 or start + 8 > len(head):
        return False
    stated = int.from_bytes(head[start + 4 : start + 8], "little")
    return 0 < stated < 0x7FFFFF00 and start + 8 + stated > os.path.getsize(path) + 1


def _missing(declared_end_s: float, end_s: float) -> bool:
    return declared_end_s - end_s > max(TRUNCATED_S, TRUNCATED_SHARE * declared_end_s)
