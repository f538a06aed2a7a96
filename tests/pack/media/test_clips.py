"""Whole clips of every awkward kind, made in code: right picture at the right time, sound in step, honest flags."""

import struct
from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image

from pack.media.load import load_video, split_spans
from schemas.errors import RowError
from schemas.sources import FileSource
from tests.media_factory import beep_times, make_clip, picture, time_shown
from tests.pack.media.loading import clip, config, pictures, samples


def in_sync(frames, sound, meta, tolerance_s=0.02):
    """Every frame shows the picture of its own time (one source frame late at most); beeps sound when it flashes."""
    late = [t - time_shown(f) for t, f in zip(meta.frame_times_s, frames, strict=True)]
    assert max(late) < 0.13, late
    assert min(late) > -0.09, late
    beeps = beep_times(sound / 32768)
    assert beeps, "no beep at all"
    first = meta.frame_times_s[0] - time_shown(frames[0]) if "held_start" not in meta.flags else late[-1]
    assert all(abs(b - round(b)) < tolerance_s + abs(first) + 0.045 for b in beeps), (beeps, first)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("a.mp4", {}),
        ("a.mp4", {"fps": Fraction(30000, 1001)}),
        ("a.mp4", {"fps": 120, "codec": "libx265", "options": {"x265-params": "log-level=none"}}),
        ("a.mkv", {"audio_codec": "libopus"}),
        ("a.mkv", {"audio_codec": "ac3", "audio_start_s": 0.5}),
        ("a.mp4", {"audio_start_s": 0.5}),
        ("a.mp4", {"audio_start_s": 0.812, "rate": 44100}),
        ("a.ts", {"audio_codec": "mp2"}),
        ("a.mpg", {"codec": "mpeg2video", "audio_codec": "mp2", "fps": 25}),
        ("a.avi", {"codec": "mpeg4", "audio_codec": "mp3", "fps": 25}),
        ("a.flv", {"codec": "flv1", "audio_codec": "mp3", "rate": 44100, "fps": 25}),
        ("a.webm", {"codec": "libvpx", "audio_codec": "libopus", "options": {"deadline": "realtime", "cpu-used": "8"}}),
        ("a.mov", {"codec": "mjpeg", "pixel_format": "yuvj420p", "audio_codec": "pcm_s16le"}),
        ("a.mp4", {"container_options": {"movflags": "frag_keyframe+empty_moov+default_base_moof"}}),
    ],
)
def test_containers_and_codecs(tmp_path, name, kwargs):
    frames, sound, meta = clip(make_clip(tmp_path / name, **kwargs))
    in_sync(frames, sound, meta)
    assert 12 <= len(frames) <= 13
    assert abs(len(sound) - 96000) < 1700
    assert not {"truncated", "decode_errors", "missing_media", "vfr"} & {*meta.flags, *meta.audio.flags}


def test_variable_rate_shows_the_held_picture(tmp_path):
    times = [*np.arange(0, 2, 1 / 30), *np.arange(2, 4.2, 0.1), *np.arange(4.9, 6, 1 / 30)]
    frames, sound, meta = clip(make_clip(tmp_path / "v.mp4", times=[round(t * 600) / 600 for t in times]))
    shown = [time_shown(f) for f in frames]
    assert shown[9] == pytest.approx(4.1, abs=0.06)  # at 4.5 s the picture of 4.1 s is on screen
    assert np.allclose(np.delete(shown, 9), np.delete(meta.frame_times_s, 9), atol=0.11)
    assert meta.shown_times_s[9] == pytest.approx(4.1, abs=0.01)
    assert {"vfr", "missing_media"} <= set(meta.flags)
    assert beep_times(sound / 32768) == [1.0, 2.0, 3.0, 4.0, 5.0]


def with_display_matrix(source, target, matrix):
    """Rewrites the matrix in the video track's header of an MP4 (the one whose height is not 0)."""
    data = bytearray(source.read_bytes())
    at = data.find(b"tkhd")
    while at >= 0:
        if struct.unpack_from(">I", data, at + 80 + 4)[0]:
            struct.pack_into(">9i", data, at + 44, *matrix)
        at = data.find(b"tkhd", at + 4)
    target.write_bytes(data)
    return target


ONE, W = 1 << 16, 1 << 30


@pytest.mark.parametrize(
    ("matrix", "upright"),
    [
        ((0, ONE, 0, -ONE, 0, 0, 0, 0, W), lambda x: np.rot90(x, -1)),
        ((0, -ONE, 0, ONE, 0, 0, 0, 0, W), lambda x: np.rot90(x, 1)),
        ((-ONE, 0, 0, 0, -ONE, 0, 0, 0, W), lambda x: np.rot90(x, 2)),
        ((-ONE, 0, 0, 0, ONE, 0, 0, 0, W), lambda x: x[:, ::-1]),
        ((ONE, 0, 0, 0, -ONE, 0, 0, 0, W), lambda x: x[::-1]),
        ((0, ONE, 0, ONE, 0, 0, 0, 0, W), lambda x: x.transpose(1, 0, 2)),
    ],
    ids=["90cw", "90ccw", "180", "mirror", "flip", "transpose"],
)
def test_display_matrix(tmp_path, matrix, upright):
    plain = make_clip(tmp_path / "p.mp4", 2.0)
    turned = with_display_matrix(plain, tmp_path / "t.mp4", matrix)
    expected = [upright(f) for f in clip(plain)[0]]
    frames, _, meta = clip(turned)
    assert np.array_equal(frames, expected)
    assert "rotated" in meta.flags
    assert (meta.height, meta.width) == expected[0].shape[:2]


def remux(source, target, change):
    """Copies packets through `change(packet) -> packet or None`."""
    with av.open(str(source)) as old, av.open(str(target), "w") as new:
        streams = {s.index: new.add_stream_from_template(s) for s in old.streams}
        for packet in old.demux():
            if packet.dts is not None and (packet := change(packet)) is not None:
                packet.stream = streams[packet.stream.index]
                new.mux(packet)
    return target


def test_hole_in_the_sound_is_silence_and_flagged(tmp_path):
    source = make_clip(tmp_path / "a.mp4")

    def change(packet):
        in_hole = packet.stream.type == "audio" and 2.2 <= packet.pts * packet.time_base <= 3.7
        return None if in_hole else packet

    for name in ("h.mp4", "h.mkv"):
        _, sound, meta = clip(remux(source, tmp_path / name, change))
        assert [round(b) for b in beep_times(sound / 32768)] == [1, 2, 4, 5]
        assert "missing_media" in meta.audio.flags
        assert meta.audio.gaps_s[0] == pytest.approx((2.2, 3.7), abs=0.05)


def test_clip_that_starts_late_is_rebased(tmp_path):
    source = make_clip(tmp_path / "a.mp4")

    def change(packet):
        packet.pts += round(10 / packet.time_base)
        packet.dts += round(10 / packet.time_base)
        return packet

    frames, sound, meta = clip(remux(source, tmp_path / "late.mkv", change))
    in_sync(frames, sound, meta)
    assert len(frames) in (12, 13)
    assert "truncated" not in meta.flags
    assert meta.origin.clock_zero_s == pytest.approx(10, abs=0.05)


def test_joined_transport_streams_go_on(tmp_path):
    one = make_clip(tmp_path / "a.ts", 3.0, audio_codec="mp2").read_bytes()
    (tmp_path / "j.ts").write_bytes(one + one)
    frames, sound, meta = clip(tmp_path / "j.ts")
    assert "clock_jump" in meta.flags
    beeps = beep_times(sound / 32768)
    assert len(beeps) == 4
    assert meta.duration_s == pytest.approx(6.0, abs=0.1)
    second = [time_shown(f) for t, f in zip(meta.frame_times_s, frames, strict=True) if t > 3.1]
    assert second[0] < 1.0
    assert np.diff(second).min() > 0


def test_damaged_middle_of_a_transport_stream(tmp_path):
    data = make_clip(tmp_path / "a.ts", audio_codec="mp2").read_bytes()
    n = len(data) // 188
    (tmp_path / "d.ts").write_bytes(data[: n * 40 // 100 * 188] + data[n * 55 // 100 * 188 :])
    frames, sound, meta = clip(tmp_path / "d.ts")
    assert "missing_media" in meta.flags
    assert "missing_media" in meta.audio.flags
    assert time_shown(frames[-1]) == pytest.approx(meta.frame_times_s[-1], abs=0.1)  # what follows is still in step
    assert beep_times(sound / 32768)[-1] == pytest.approx(5.0, abs=0.03)


def test_one_damaged_timestamp_does_not_stretch_the_clip(tmp_path):
    source = make_clip(tmp_path / "a.mp4", options={"bf": "0"})
    count = {"video": 0, "audio": 0}

    def change(packet):
        count[packet.stream.type] += 1
        if (packet.stream.type, count[packet.stream.type]) in {("audio", 90), ("audio", 91)}:
            packet.pts += 40 * 1024
            packet.dts += 40 * 1024
        return packet

    whole = clip(source)
    with av.open(str(source)) as old, av.open(str(tmp_path / "s.ts"), "w") as new:
        streams = {s.index: new.add_stream_from_template(s) for s in old.streams}
        for packet in old.demux():
            if packet.dts is not None:
                packet.stream = streams[packet.stream.index]
                new.mux(packet)
    data = bytearray((tmp_path / "s.ts").read_bytes())
    hits = [i for i in range(0, len(data) - 188, 188) if b"\x00\x00\x01\xc0" in data[i : i + 40]]
    at = data.index(b"\x00\x00\x01\xc0", hits[len(hits) // 2]) + 9
    data[at] ^= 0x0E  # the top bits of the presentation time: hours ahead
    (tmp_path / "s.ts").write_bytes(data)
    _, sound, meta = clip(tmp_path / "s.ts")
    assert len(sound) == pytest.approx(len(whole[1]), abs=1600)
    assert meta.duration_s == pytest.approx(6.0, abs=0.1)


@pytest.mark.parametrize("keep", [0.6, 0.8])
def test_cut_short_files_are_flagged_or_rejected(tmp_path, keep):
    fast = make_clip(tmp_path / "f.mp4", container_options={"movflags": "+faststart"})
    mkv = make_clip(tmp_path / "m.mkv", audio_codec="libopus")
    for path in (fast, mkv):
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * keep)])
        frames, _, meta = clip(path)
        assert "truncated" in meta.flags
        assert 1 <= len(frames) < 12
        with pytest.raises(RowError) as error:
            load_video(FileSource(str(path)), config(rows={"truncated": "reject"}))
        assert error.value.reason == "truncated"


def test_sample_aspect_ratio_widens(tmp_path):
    path = make_clip(tmp_path / "s.mp4", 2.0)
    with av.open(str(path)) as old, av.open(str(tmp_path / "w.mkv"), "w") as new:
        out = new.add_stream("libx264", rate=30)
        out.width, out.height, out.pix_fmt = 160, 120, "yuv420p"
        out.codec_context.sample_aspect_ratio = Fraction(2)
        for frame in old.decode(video=0):
            frame.pts = None
            new.mux(out.encode(frame.reformat(format="yuv420p")))
        new.mux(out.encode(None))
    _, _, meta = clip(tmp_path / "w.mkv")
    assert (meta.width, meta.height) == (320, 120)
    assert "stretched" in meta.flags


def test_animations(tmp_path):
    images = [Image.fromarray(picture(t, 64, 48)) for t in np.arange(0, 4, 0.5)]
    for name, options in (("a.gif", {}), ("a.webp", {"lossless": True})):
        images[0].save(tmp_path / name, save_all=True, append_images=images[1:], duration=500, loop=0, **options)
        frames, sound, meta = clip(tmp_path / name)
        assert sound is None
        assert len(frames) == 8
        assert np.allclose([time_shown(f) for f in frames], np.arange(0, 4, 0.5), atol=0.25)
        assert meta.duration_s == pytest.approx(4.0, abs=0.11)


def test_transparent_webm_lies_on_white(tmp_path):
    path = tmp_path / "a.webm"
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libvpx-vp9", rate=10, options={"auto-alt-ref": "0", "deadline": "realtime"})
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuva420p"
        rgba = np.zeros((64, 64, 4), np.uint8)
        rgba[:32, :, 3] = 255
        for _ in range(10):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(rgba, format="rgba").reformat(format="yuva420p")))
        out.mux(stream.encode(None))
    frames, _, meta = clip(path)
    assert "alpha" in meta.flags
    assert frames[0, 8, 8].max() < 20
    assert frames[0, 56, 8].min() > 235


def test_picture_size_that_changes_keeps_the_first(tmp_path):
    small = make_clip(tmp_path / "1.ts", 2.0, audio_codec=None, size=(160, 120)).read_bytes()
    large = make_clip(tmp_path / "2.ts", 2.0, audio_codec=None, size=(320, 240)).read_bytes()
    (tmp_path / "j.ts").write_bytes(small + large)
    frames, _, meta = clip(tmp_path / "j.ts")
    assert frames.shape[1:3] == (120, 160)
    assert {"size_changed", "clock_jump"} <= set(meta.flags)


@pytest.mark.parametrize("content", [b"", b"<html><body>404</body></html>", bytes(range(256)) * 400])
def test_no_media_is_rejected_by_name(tmp_path, content):
    (tmp_path / "x.mp4").write_bytes(content)
    with pytest.raises(RowError) as error:
        load_video(FileSource(str(tmp_path / "x.mp4")), config())
    assert error.value.reason == ("empty_file" if not content else "unreadable_container")


@pytest.mark.parametrize("resize", ["none", "model", "fast"])
def test_thinner_than_the_model_takes(tmp_path, resize):
    path = make_clip(tmp_path / "a.mp4", 1.0, size=(1600, 6), codec="mpeg4", audio_codec=None)
    with pytest.raises(RowError, match=r"aspect_ratio: .*1600x6"):
        load_video(FileSource(str(path)), config(resize=resize))


def test_sound_alone_is_no_video(tmp_path):
    path = make_clip(tmp_path / "a.mp4", 2.0, codec=None)
    with pytest.raises(RowError, match="no_video"):
        load_video(FileSource(str(path)), config())


def test_missing_sound_is_kept_or_rejected(tmp_path):
    path = make_clip(tmp_path / "a.mp4", 2.0, audio_codec=None)
    _, sound, meta = clip(path)
    assert sound is None
    assert meta.audio is None
    assert "no_audio" in meta.flags
    with pytest.raises(RowError, match="no_audio"):
        load_video(FileSource(str(path)), config(rows={"missing_audio": "reject"}))


def test_playlists_open_nothing(tmp_path):
    clip_path = make_clip(tmp_path / "a.ts", 2.0, audio_codec="mp2")
    (tmp_path / "list.mp4").write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:2,\n{clip_path}\n#EXT-X-ENDLIST\n")
    (tmp_path / "concat.mp4").write_text(f"ffconcat version 1.0\nfile {clip_path.name}\n")
    for name in ("list.mp4", "concat.mp4"):
        with pytest.raises(RowError, match="unreadable_container"):
            load_video(FileSource(str(tmp_path / name)), config())


def test_spans_are_cut_on_one_clock(tmp_path):
    path = make_clip(tmp_path / "a.mp4", 60.0, options={"g": "60"}, draw=lambda t, w, h: picture(t % 8, w, h))
    frames, sound, meta = clip(path, (41.25, 45.0))
    assert np.allclose([time_shown(f) for f in frames], np.array(meta.frame_times_s) + 1.25, atol=0.1)
    assert len(sound) == 60000
    assert beep_times(sound / 32768) == pytest.approx([0.75, 1.75, 2.75], abs=0.011)
    assert meta.origin.span_s == pytest.approx((41.25, 45.0))
    with pytest.raises(RowError, match="empty_span"):
        clip(path, (70.0, 80.0))


def test_split_spans_cover_the_clip(tmp_path):
    path = make_clip(tmp_path / "a.mp4", 25.0, draw=lambda t, w, h: picture(t % 8, w, h))
    cfg = config(split_s=10.0)
    spans = split_spans(FileSource(str(path)), cfg)
    assert [(s.start_s, s.end_s) for s in spans] == [(0, 10), (10, 20), (20, 25)]
    loaded = [load_video(s, cfg) for s in spans]
    assert [m.num_frames for _, m in loaded] == [20, 20, 10]
    assert sum(len(samples(p.audio)) for p, _ in loaded) == 400_000
    whole = pictures(load_video(FileSource(str(path)), config())[0].frames)
    assert np.array_equal(np.concatenate([pictures(p.frames) for p, _ in loaded]), whole)


def test_token_budget(tmp_path):
    path = make_clip(tmp_path / "a.mp4", 20.0, fps=10, size=(320, 240))
    free = load_video(FileSource(str(path)), config(resize="model"))[1]
    tight = load_video(FileSource(str(path)), config(resize="model", max_tokens=3000, min_frames=4))[1]
    tokens = -(-tight.num_frames // 2) * (tight.height // 32) * (tight.width // 32) + 260
    assert tokens <= 3000
    assert tight.num_frames < free.num_frames
    assert "fps_lowered" in tight.flags
    assert tight.video_fps == pytest.approx(tight.num_frames / 20)
    tiny = load_video(FileSource(str(path)), config(resize="model", max_tokens=300, min_frames=4))[1]
    assert (tiny.height // 32) * (tiny.width // 32) * 2 + 260 <= 300
    with pytest.raises(RowError, match="over_budget"):
        load_video(FileSource(str(path)), config(resize="model", max_tokens=200))
