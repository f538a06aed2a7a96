"""MP4 files whose edit list keeps a part of the media, several parts, or starts late: only what is kept counts."""

import struct

import numpy as np
import pytest

from tests.media_factory import GREY_PER_S, GREY_ZERO, beep_times, make_clip, time_shown
from tests.pack.media.loading import assert_as_a_player_shows, clip

NESTED = {b"moov", b"trak", b"mdia"}


def boxes(data):
    """[type, payload or boxes] of an MP4."""
    found, at = [], 0
    while at < len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        payload = data[at + 8 : at + size]
        found.append([kind, boxes(payload) if kind in NESTED else payload])
        at += size
    return found


def joined(tree):
    parts = [(kind, joined(body) if kind in NESTED else body) for kind, body in tree]
    return b"".join(struct.pack(">I4s", len(body) + 8, kind) + body for kind, body in parts)


def child(tree, kind):
    return next((body for name, body in tree if name == kind), None)


def with_edits(source, target, video, audio):
    """Rewrites the edit lists. video, audio: (seconds, from which second of the media on, None = nothing)."""
    tree = boxes(source.read_bytes())
    moov = child(tree, b"moov")
    movie_scale = struct.unpack_from(">I", child(moov, b"mvhd"), 12)[0]
    for trak in [body for kind, body in moov if kind == b"trak"]:
        mdia = child(trak, b"mdia")
        scale = struct.unpack_from(">I", child(mdia, b"mdhd"), 12)[0]
        old = child(trak, b"edts")
        first = max(0, struct.unpack_from(">i", old, 20)[0]) if old else 0  # edts: size, elst, version, count, entry
        edits = video if child(mdia, b"hdlr")[8:12] == b"vide" else audio
        entries = [(round(s * movie_scale), -1 if at is None else round(at * scale) + first) for s, at in edits]
        elst = struct.pack(">II", 0, len(entries)) + b"".join(struct.pack(">IiHH", *e, 1, 0) for e in entries)
        edts = [b"edts", struct.pack(">I4s", len(elst) + 8, b"elst") + elst]
        trak[:] = [box for box in trak if box[0] != b"edts"]
        trak.insert(1, edts)
    target.write_bytes(joined(tree))
    return target


def media_time(edits, at):
    """Second of the media at `at` of the clip, which starts at the first edit that keeps something."""
    for seconds, start in edits:
        if at < seconds - 1e-6:
            return start + at
        at -= seconds
    raise AssertionError(at)


def plays(path, edits):
    """Every frame shows its media time; length, beeps and flags are those of the edits."""
    frames, sound, meta = clip(path, fps=5.0)
    whole_s = sum(seconds for seconds, _ in edits)
    assert meta.duration_s == pytest.approx(whole_s, abs=0.001)
    assert len(frames) == pytest.approx(5 * whole_s, abs=1)
    wanted = [media_time(edits, t) for t in meta.frame_times_s]
    assert np.allclose([time_shown(f) for f in frames], wanted, atol=1 / 30 + 1.5 / GREY_PER_S)
    assert max(wanted) < (255 - GREY_ZERO) / GREY_PER_S
    assert len(sound) == pytest.approx(16000 * whole_s, abs=400)
    starts = np.cumsum([0, *(seconds for seconds, _ in edits)])
    beeps = [
        b - s + t for (n, s), t in zip(edits, starts[:-1], strict=True) for b in range(1, 8) if s < b < s + n - 0.05
    ]
    assert beep_times(sound / 32768) == pytest.approx(beeps, abs=0.03)
    assert not {"truncated", "clock_jump", "missing_media", "decode_errors"} & {*meta.flags, *meta.audio.flags}
    return meta


@pytest.fixture(scope="module", params=[{"bf": "0"}, {"bf": "3"}], ids=["no B pictures", "B pictures"])
def media(tmp_path_factory, request):
    return make_clip(tmp_path_factory.mktemp("media") / "a.mp4", 8.0, options=request.param)


@pytest.mark.parametrize(
    "edits",
    [
        [(4.0, 2.37)],
        [(5.0, 0.0)],
        [(2.2, 0.0), (3.1, 4.3)],
        [(1.9, 0.0), (2.0, 3.53)],
        [(2.25, 4.3), (2.0, 0.3)],
        [(1.5, 0.7), (1.5, 2.7), (1.4, 4.7)],
    ],
)
def test_only_what_is_kept_counts(tmp_path, media, edits):
    plays(with_edits(media, tmp_path / "e.mp4", edits, edits), edits)


def test_pictures_of_a_slow_clip_go_on_over_an_edit(tmp_path):
    """The decoding times of a slow clip step back at an edit by as much as pictures are reordered."""
    slow = make_clip(tmp_path / "s.mp4", 8.0, fps=4, options={"bf": "3", "g": "8"}, audio_codec=None)
    edits = [(2.0, 0.0), (3.0, 4.4)]
    meta = assert_as_a_player_shows(with_edits(slow, tmp_path / "e.mp4", edits, edits), fps=4.0)
    assert meta.duration_s == pytest.approx(5.0, abs=0.001)
    assert not {"clock_jump", "missing_media", "truncated"} & set(meta.flags)


def test_late_start_and_early_end(tmp_path, media):
    late = [(0.5, None), (4.0, 2.2)]
    plays(with_edits(media, tmp_path / "a.mp4", late, late), late[1:])


def test_sound_that_starts_late_and_is_cut(tmp_path, media):
    path = with_edits(media, tmp_path / "a.mp4", [(8.0, 0.0)], [(1.5, None), (6.0, 0.0)])
    frames, sound, meta = clip(path)
    assert not {"truncated", "clock_jump", "missing_media"} & {*meta.flags, *meta.audio.flags}
    assert beep_times(sound / 32768) == pytest.approx([2.5, 3.5, 4.5, 5.5, 6.5], abs=0.03)
    assert len(sound) == pytest.approx(16000 * 7.5, abs=400)
    assert len(frames) == 16


def header_first(path):
    """Moves the header of an MP4 to its front, as in files that can be read from the start."""
    ftyp, *rest, (_, moov) = boxes(path.read_bytes())
    header = bytearray(joined([[b"moov", moov]]))
    at = header.find(b"stco")
    while at >= 0:
        for k in range(struct.unpack_from(">I", header, at + 8)[0]):
            offset = struct.unpack_from(">I", header, at + 12 + 4 * k)[0]
            struct.pack_into(">I", header, at + 12 + 4 * k, offset + len(header))
        at = header.find(b"stco", at + 4)
    path.write_bytes(joined([ftyp]) + header + joined(rest))


@pytest.mark.parametrize("late_s", [0.5, 2.0])
@pytest.mark.parametrize("length_s", [6.0, 8.0])
def test_a_late_start_that_is_cut_short_is_truncated(tmp_path, media, late_s, length_s):
    edits = [(late_s, None), (length_s, 0.0)]
    path = with_edits(media, tmp_path / "a.mp4", edits, edits)
    header_first(path)
    assert "truncated" not in clip(path)[2].flags
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    assert "truncated" in clip(path)[2].flags
