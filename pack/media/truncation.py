"""Whether a file ends before its header says.

Only what a header states counts: where it is silent, libavformat takes the duration from the last packets that it
finds.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

import av

if TYPE_CHECKING:
    from pack.media.probe import StreamInfo

TRUNCATED_S = 0.3
TRUNCATED_SHARE = 0.01
UNKNOWN_SIZE = 0x7FFFFF00  # what streams write before they know better: 0, or 2^31 - 1 and up
MAX_CHUNKS = 1000
DATED_BY_PACKETS = {"mpegts", "mpeg", "nut"}  # these headers have no duration
FLV_HEAD = 1 << 16
ASF_HEAD = 1 << 20
ASF_FILE_PROPERTIES = bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365")
ASF_BROADCAST = 1


def is_truncated(path: str, container: Any, infos: list[StreamInfo], last_s: float | None) -> bool:
    """Whether the file ends before its header says. last_s: end of the last packet of any stream, None without packets.

    Estimates (raw MP3 and ADTS without a table) don't count.
    """
    formats = set(container.format.name.split(","))
    if "wav" in formats:
        return _wav_misses_bytes(path)
    if last_s is None or (formats & {"mp3", "aac", "adts"} and not any(i.has_skip_data for i in infos)):
        return False
    if "asf" in formats:  # every stream has the length of the file, from its first packet on, wherever that is
        return _missing(_asf_length(path), last_s)
    if "avi" in formats and (known := _avi_is_truncated(path, infos, last_s)) is not None:
        return known
    for info in infos:
        if info.packets.strays and formats & DATED_BY_PACKETS:
            continue  # what is declared there comes from the packets, damaged ones too
        end = info.packets.end_s()
        if info.declared_end_s is not None and end is not None and _missing(info.declared_end_s, end):
            return len(set(info.packets.epoch)) < 2
    if container.duration is None or any(i.declared_end_s is not None for i in infos) or formats & DATED_BY_PACKETS:
        return False
    if "flv" in formats and not flv_states_duration(path):
        return False
    start = (container.start_time or 0) / av.time_base
    length = container.duration / av.time_base
    # Matroska's duration is the absolute end; others count from the start. Only what both readings miss is missing.
    return _missing(length if "matroska" in formats else start + length, last_s)


def flv_states_duration(path: str) -> bool:
    """Whether the metadata at the start of an FLV have a duration: a name, then an AMF number (type 0)."""
    with open(path, "rb") as file:
        head = file.read(FLV_HEAD)
    at = head.find(b"\x00\x08duration\x00")
    if at < 0 or len(head) < at + 19:
        return False
    value = struct.unpack_from(">d", head, at + 11)[0]
    return math.isfinite(value) and value > 0


def _missing(declared_end_s: float, end_s: float) -> bool:
    return declared_end_s - end_s > max(TRUNCATED_S, TRUNCATED_SHARE * declared_end_s)


def _avi_is_truncated(path: str, infos: list[StreamInfo], last_s: float) -> bool | None:
    """None where the durations have to tell. libavformat shortens those to what is there, but keeps the count of
    pictures. That counts pictures that were dropped, too, and have no packets."""
    video = next((i for i in infos if i.num_pictures), None)
    with open(path, "rb") as file:
        misses_bytes = _riff_misses_bytes(file)
    if misses_bytes is False:
        return False
    if video is None or len(video.packets) >= video.num_pictures - max(2, video.num_pictures // 50):
        return None
    return True if misses_bytes or _missing(video.num_pictures * video.time_base, last_s) else None


def _riff_misses_bytes(file: BinaryIO) -> bool | None:
    """Whether one of the RIFF lists that a file consists of ends behind the file; None where its size is not known."""
    size, at = os.fstat(file.fileno()).st_size, 0
    for _ in range(MAX_CHUNKS):
        file.seek(at)
        head = file.read(8)
        if len(head) < 8 or head[:4] != b"RIFF":
            return False if at else None
        stated = int.from_bytes(head[4:], "little")
        if not 0 < stated < 0xFFFFFFFF:
            return None
        at += 8 + stated + stated % 2
        if at > size + 1:
            return True
    return None


def _wav_misses_bytes(path: str) -> bool:
    """Whether a WAV's data chunk is longer than the file: libavformat believes the file."""
    with open(path, "rb") as file:
        size, long_size = os.fstat(file.fileno()).st_size, 0
        for name, start, stated in _wav_chunks(file):
            if name == b"ds64":  # of an RF64 file: u64 size of the file, u64 size of the data
                long_size = int.from_bytes(file.read(16)[8:], "little")
            elif name == b"data":
                if stated == 0xFFFFFFFF and long_size:
                    return start + long_size > size + 1
                return 0 < stated < UNKNOWN_SIZE and start + stated > size + 1
    return False


def _wav_chunks(file: BinaryIO) -> Iterator[tuple[bytes, int, int]]:
    """(name, start of the content, stated size) of each chunk; the file is at the content."""
    if file.read(12)[:4] not in (b"RIFF", b"RF64", b"BW64"):
        return
    at = 12
    for _ in range(MAX_CHUNKS):
        file.seek(at)
        head = file.read(8)
        if len(head) < 8:
            return
        stated = int.from_bytes(head[4:], "little")
        yield head[:4], at + 8, stated
        at += 8 + stated + stated % 2


def _asf_length(path: str) -> float:
    """Seconds of media by the file properties of an ASF file, 0 where they do not tell (libavformat gives no duration
    when the size of the file is not the one stated there)."""
    with open(path, "rb") as file:
        head = file.read(ASF_HEAD)
    at = head.find(ASF_FILE_PROPERTIES)
    if at < 0 or len(head) < at + 92:
        return 0.0
    # Behind GUID, size, file id, file size, date and packets: play and send duration (100 ns), preroll (ms), flags.
    play, _, preroll, flags = struct.unpack_from("<QQQI", head, at + 64)
    return 0.0 if flags & ASF_BROADCAST else max(0.0, play * 1e-7 - preroll * 1e-3)
