"""A damaged time on the first or last packet is mended; late starts, holes and held pictures at the ends are real."""

import struct

import numpy as np
import pytest

from pack.media.strays import FAR_S, stray_run
from tests.media_factory import beep_times, make_clip, time_shown
from tests.pack.media.loading import clip, sound
from tests.pack.media.test_clips import remux

SEGMENT, CLUSTER, GROUP = b"\x18\x53\x80\x67", b"\x1f\x43\xb6\x75", b"\xa0"


def ebml(data, at):
    """(id, place of the content, its end) of a Matroska element."""
    length = 9 - data[at].bit_length()
    size_length = 9 - data[at + length].bit_length()
    size = int.from_bytes(data[at + length : at + length + size_length], "big") & ((1 << 7 * size_length) - 1)
    start = at + length + size_length
    unknown = size == (1 << 7 * size_length) - 1
    return bytes(data[at : at + length]), start, len(data) if unknown else start + size


def block_times(data, track, at=0, end=None):
    """Places of the 16-bit times of the blocks of one Matroska track."""
    end = len(data) if end is None else end
    while at < end:
        name, start, stop = ebml(data, at)
        if name in (SEGMENT, CLUSTER, GROUP):
            yield from block_times(data, track, start, stop)
        elif name in (b"\xa3", b"\xa1") and data[start] == 0x80 | track:
            yield start + 1
        at = stop


def shift_block(source, target, track, which, delta_ms):
    data = bytearray(source.read_bytes())
    at = list(block_times(data, track))[which]
    struct.pack_into(">h", data, at, struct.unpack_from(">h", data, at)[0] + delta_ms)
    target.write_bytes(data)
    return target


def shift_pes(source, target, stream_ids, which, delta_s):
    """Changes the times of one PES header of a transport stream, modulo 2^33 ticks."""
    data = bytearray(source.read_bytes())
    heads = []
    for at in range(0, len(data), 188):
        if data[at + 1] & 0x40:
            start = at + 4 + (1 + data[at + 4] if data[at + 3] & 0x20 else 0)
            if data[start : start + 3] == b"\0\0\1" and data[start + 3] in stream_ids and data[start + 7] & 0x80:
                heads.append(start)
    start = heads[which]
    for at in (start + 9, start + 14) if data[start + 7] & 0x40 else (start + 9,):
        b = data[at : at + 5]
        ticks = (b[0] >> 1 & 7) << 30 | b[1] << 22 | b[2] >> 1 << 15 | b[3] << 7 | b[4] >> 1
        ticks = (ticks + round(delta_s * 90000)) % 2**33
        fields = (b[0] & 0xF1 | (ticks >> 30 & 7) << 1, ticks >> 22 & 255, (ticks >> 15 & 127) << 1 | 1)
        data[at : at + 5] = bytes((*fields, ticks >> 7 & 255, (ticks & 127) << 1 | 1))
    target.write_bytes(data)
    return target


def assert_whole(path, zero_s=0.0):
    """All of the six-second clip, nothing more, in step. zero_s: its pictures start so late on its clock."""
    frames, x, meta = clip(path)
    late = [t - zero_s - time_shown(f) for t, f in zip(meta.frame_times_s, frames, strict=True)]
    assert np.abs(late).max() < 0.12
    assert len(frames) in (12, 13)
    assert meta.duration_s == pytest.approx(6.0, abs=0.06)
    assert abs(len(x) - 96000) < 1700
    assert beep_times(x / 32768) == pytest.approx(np.arange(1, 6) + zero_s, abs=0.03)
    assert not {"truncated", "missing_media"} & {*meta.flags, *meta.audio.flags}


@pytest.mark.parametrize("bf", [0, 2])
@pytest.mark.parametrize(
    ("track", "which", "delta_ms"),
    [(2, 0, 4000), (2, 0, 25000), (1, 0, 4000), (1, 0, 25000), (1, -1, 4000), (2, -1, 4000), (2, -1, 25000)],
)
def test_damaged_ends_in_matroska(tmp_path, bf, track, which, delta_ms):
    source = make_clip(tmp_path / "a.mkv", options={"bf": str(bf)}, audio_codec="flac")
    assert_whole(source)
    assert_whole(shift_block(source, tmp_path / "b.mkv", track, which, delta_ms))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["sound", "video"])
@pytest.mark.parametrize(
    ("which", "delta_s"), [(0, 4), (0, 1000), (0, -5000), (0, -20000), (0, 2**32 / 90000), (-1, 1000), (-1, -4)]
)
def test_damaged_ends_in_transport_streams(tmp_path, kind, which, delta_s):
    source = make_clip(tmp_path / "a.ts", audio_codec="mp2", options={"bf": "0"})
    zero_s = clip(source)[2].shown_times_s[0]
    assert_whole(source, zero_s)
    ids = {0xC0} if kind == "sound" else {0xE0}
    assert_whole(shift_pes(source, tmp_path / "b.ts", ids, which, delta_s), zero_s)


def test_real_ends_stay(tmp_path):
    """Late sound, a late picture, and a last picture after a long hold."""
    _, x, meta = clip(make_clip(tmp_path / "a.mkv", audio_start_s=3.5, audio_codec="flac"))
    assert meta.audio.start_s == pytest.approx(3.5, abs=0.01)
    assert beep_times(x / 32768) == [4.0, 5.0]
    late = remux(
        make_clip(tmp_path / "s.mkv", audio_codec="flac", options={"bf": "0"}),
        tmp_path / "late.mkv",
        lambda p: None if p.stream.type == "video" and p.pts * p.time_base < 3 else p,
    )
    frames, x, meta = clip(late)
    assert "held_start" in meta.flags
    assert time_shown(frames[-1]) == pytest.approx(meta.frame_times_s[-1], abs=0.1)
    assert beep_times(x / 32768) == [1.0, 2.0, 3.0, 4.0, 5.0]
    for name in ("hold.mkv", "hold.mp4", "hold.ts"):
        times = [*np.arange(0, 2, 1 / 30), 9.0]
        source = make_clip(tmp_path / name, 4.0, times=[round(t * 600) / 600 for t in times], options={"bf": "0"})
        frames, _, meta = clip(source)
        assert meta.duration_s > 8.9
        assert time_shown(frames[10]) == pytest.approx(1.97, abs=0.06)


def test_a_title_and_a_hole_after_the_first_packet_stay(tmp_path):
    times = [0.0, *(8 + np.arange(0, 2, 1 / 30))]
    source = make_clip(tmp_path / "a.mkv", 10.0, times=[round(t * 600) / 600 for t in times], options={"bf": "0"})
    frames, _, meta = clip(source)
    assert time_shown(frames[10]) == pytest.approx(0.0, abs=0.06)
    assert meta.duration_s == pytest.approx(10.0, abs=0.1)
    first = [True]

    def change(packet):
        if packet.stream.type != "audio" or packet.pts * packet.time_base > 3.2:
            return packet
        keep, first[0] = first[0], False
        return packet if keep else None

    source = make_clip(tmp_path / "b.mkv", audio_codec="flac")
    _, x, meta = clip(remux(source, tmp_path / "hole.mkv", change))
    assert meta.audio.gaps_s[0] == pytest.approx((0.096, 3.26), abs=0.1)
    assert beep_times(x / 32768) == [4.0, 5.0]


def test_a_short_first_recording_is_no_damage(tmp_path):
    """Both clocks jump back behind it: an epoch."""
    one = make_clip(tmp_path / "1.ts", 1.2, audio_codec="mp2").read_bytes()
    six = make_clip(tmp_path / "2.ts", 6.0, audio_codec="mp2").read_bytes()
    (tmp_path / "j.ts").write_bytes(one + six)
    _, x, meta = clip(tmp_path / "j.ts")
    assert "clock_jump" in meta.flags
    assert meta.duration_s == pytest.approx(7.2, abs=0.15)
    assert len(beep_times(x / 32768)) == 6


def test_a_clock_that_is_set_anew_is_no_damage(tmp_path):
    """Half of the sound is dated 2 s early: what overlaps is cut, the pictures are not moved."""
    path = make_clip(tmp_path / "a.mkv", audio_codec="flac", options={"bf": "0"})
    data = bytearray(path.read_bytes())
    for at in list(block_times(data, 2))[30:]:
        struct.pack_into(">h", data, at, struct.unpack_from(">h", data, at)[0] - 2017)
    path.write_bytes(data)
    frames, _, meta = clip(path)
    assert np.allclose([time_shown(f) for f in frames], meta.frame_times_s, atol=0.12)
    assert meta.duration_s == pytest.approx(6.0, abs=0.05)


def test_sound_alone_loses_nothing(tmp_path):
    source = make_clip(tmp_path / "a.mka", codec=None, audio_codec="flac")
    for which, delta_ms in ((0, 4000), (0, 25000), (-1, 25000)):
        x, _ = sound(shift_block(source, tmp_path / "b.mka", 1, which, delta_ms))
        assert len(x) == 96000
        assert beep_times(x / 32768) == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_runs():
    steady, other = np.arange(200) * 0.02, np.arange(100) * 0.04
    late, early, hole = steady.copy(), steady.copy(), steady.copy()
    late[:5] += 30
    early[:5] -= 30000
    hole[:5] -= 30
    assert stray_run(steady, other, 0.0, FAR_S) == 0
    assert stray_run(late, other, 0.0, FAR_S) == 5
    assert stray_run(late, np.r_[30 + other[:4], other], 0.0, FAR_S) == 0  # a recording that joins another
    pictures = np.r_[np.arange(0.0, 3.0, 0.04), np.arange(0.0, 4.0, 0.04)]
    behind = np.r_[2.7 + steady[:5], steady]  # the first one's sound begins with its last pictures
    assert stray_run(behind, pictures, 0.0, FAR_S) == 0
    assert stray_run(behind, np.arange(0.0, 7.0, 0.04), 0.0, FAR_S) == 5
    assert stray_run(late, np.zeros(0), None, FAR_S) == 0
    assert stray_run(early, other, 0.0, FAR_S) == 5
    assert stray_run(early, other, -30000.0, FAR_S) == 0  # there is something else there
    assert stray_run(hole, other, 0.0, FAR_S) == 0
    assert stray_run(-late[::-1], -other[::-1], -4.0, 2.0) == 0
    assert stray_run(-(steady + np.where(np.arange(200) > 196, 9.0, 0.0))[::-1], -other[::-1], -4.0, 2.0) == 3
