"""Clips for benchmarks, made from the demo's film: real pictures, any length and size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av

FILM = Path(__file__).parent.parent / "assets" / "bunny.mp4"


def make_film(path: Path, width: int, height: int, bit_rate: int, group: int = 250) -> Path:
    """The demo's film (5.28 s, 25 pictures per s, with sound) scaled and encoded again as H.264 and AAC."""
    source: Any = av.open(str(FILM))
    out: Any = av.open(str(path), "w")
    with source, out:
        video = out.add_stream("libx264", rate=25, options={"preset": "veryfast", "g": str(group)})
        video.width, video.height, video.pix_fmt, video.bit_rate = width, height, "yuv420p", bit_rate
        audio = out.add_stream("aac", rate=48000)
        audio.layout = "stereo"
        resampler = av.AudioResampler(format="fltp", layout="stereo", rate=48000)
        for frame in source.decode(source.streams.video[0], source.streams.audio[0]):
            if isinstance(frame, av.VideoFrame):
                scaled = frame.reformat(width, height, "yuv420p", interpolation="BICUBIC")
                scaled.pict_type = 0  # the encoder chooses
                out.mux(video.encode(scaled))
            else:
                for piece in resampler.resample(frame):
                    out.mux(audio.encode(piece))
        out.mux(video.encode(None))
        out.mux(audio.encode(None))
    return path


def loop_film(source: Path, path: Path, seconds: float) -> Path:
    """The clip again and again, without encoding: packets with later times."""
    once: Any = av.open(str(source))
    with once:
        packets = [(p.stream.index, p.pts, p.dts, bytes(p), p.is_keyframe, p.duration) for p in once.demux() if p.size]
        bases = {s.index: s.time_base for s in once.streams}
        end = max((pts + duration) * bases[i] for i, pts, _, _, _, duration in packets)
        length = end - min(dts * bases[i] for i, _, dts, _, _, _ in packets)  # decoding times must rise
        out: Any = av.open(str(path), "w")
        with out:
            streams = {s.index: out.add_stream_from_template(s) for s in once.streams}
            for turn in range(int(seconds / length) + 1):
                for index, pts, dts, data, key, duration in packets:
                    shift = round(turn * length / bases[index])
                    if (dts + shift) * bases[index] >= seconds:
                        continue
                    packet: Any = av.Packet(data)
                    packet.stream, packet.time_base, packet.duration = streams[index], bases[index], duration
                    packet.pts, packet.dts, packet.is_keyframe = pts + shift, dts + shift, key
                    out.mux(packet)
    return path
