"""Containers whose times or counts mislead, and files that must not be opened."""

import io
import os

import numpy as np
import pytest
from PIL import Image

from pack.media.load import load_audio, load_image, load_video
from schemas.errors import RowError
from schemas.sources import BytesSource, FileSource
from tests.media_factory import make_clip, picture, time_shown
from tests.pack.media.loading import clip, config


def test_avi_with_b_pictures_is_in_display_order(tmp_path):
    frames, _, meta = clip(make_clip(tmp_path / "a.avi", options={"bf": "3"}, audio_codec="mp3"), fps=30.0)
    shown = [time_shown(f) for f in frames]
    assert min(np.diff(shown)) > -0.02
    assert np.abs(np.array(shown) - meta.frame_times_s).max() < 0.15


@pytest.mark.parametrize("codec", ["h264", "hevc"])
def test_raw_streams_without_times(tmp_path, codec):
    encoder, options = ("libx264", {}) if codec == "h264" else ("libx265", {"x265-params": "log-level=none"})
    path = make_clip(tmp_path / f"a.{codec}", 4.0, fps=30, codec=encoder, options=options, audio_codec=None)
    frames, _, meta = clip(path)
    assert 7 <= len(frames) <= 9
    assert np.abs(np.array([time_shown(f) for f in frames]) - meta.frame_times_s).max() < 0.2


def test_held_pictures_do_not_lengthen_an_mp4(tmp_path):
    times = [*np.arange(0, 3, 1 / 30), *np.arange(5.9, 6, 1 / 30)]
    path = make_clip(tmp_path / "a.mp4", 6.0, times=[round(t * 600) / 600 for t in times], options={"bf": "3"})
    _, _, meta = clip(path)
    assert meta.duration_s == pytest.approx(6.0, abs=0.1)
    assert meta.num_frames == 12


@pytest.mark.parametrize("keep", [0.3, 0.7])
def test_cut_avi_is_truncated(tmp_path, keep):
    path = make_clip(tmp_path / "a.avi", codec="mpeg4", audio_codec="mp3")
    assert "truncated" not in clip(path)[2].flags
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    assert "truncated" in clip(path)[2].flags


def test_wmv_whose_tracks_differ_in_length_is_not_truncated(tmp_path):
    path = make_clip(tmp_path / "a.wmv", 6.0, codec="wmv2", audio_codec="mp3", rate=44100, fps=25, audio_start_s=0.7)
    _, _, meta = clip(path)
    assert "truncated" not in [*meta.flags, *meta.audio.flags]


def test_a_slower_stretch_is_no_hole(tmp_path):
    times = [*np.arange(0, 2, 1 / 50), *np.arange(2, 5, 1 / 7), *np.arange(5, 6, 1 / 50)]
    _, _, meta = clip(make_clip(tmp_path / "a.mp4", times=[round(t * 600) / 600 for t in times]))
    assert "vfr" in meta.flags
    assert meta.gaps_s == []


@pytest.mark.parametrize("max_tokens", [200, 90, 40])
def test_a_budget_that_can_be_met_is_met(tmp_path, max_tokens):
    path = make_clip(tmp_path / "a.mp4", 3.0, audio_codec=None)
    meta = load_video(FileSource(str(path)), config(resize="model", min_frames=4, max_tokens=max_tokens))[1]
    assert -(-meta.num_frames // 2) * (meta.height // 32) * (meta.width // 32) <= max_tokens


def test_spans_and_budgets_of_animations(tmp_path):
    images = [Image.fromarray(picture(t, 160, 120)) for t in np.arange(0, 6, 0.5)]
    path = tmp_path / "a.webp"
    images[0].save(path, save_all=True, append_images=images[1:], duration=500, lossless=True)
    frames, _, meta = clip(path, (1.0, 3.0))
    assert np.allclose([time_shown(f) for f in frames], [1.0, 1.5, 2.0, 2.5], atol=0.05)
    assert meta.duration_s == 2.0
    small = load_video(FileSource(str(path)), config(resize="model", max_tokens=120))[1]
    assert -(-small.num_frames // 2) * (small.height // 32) * (small.width // 32) <= 120
    with pytest.raises(RowError, match="empty_span"):
        clip(path, (8.0, 9.0))


def test_postscript_is_never_run(tmp_path):
    mark = tmp_path / "ran"
    program = f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n({mark}) (w) file closefile\nshowpage\n".encode()
    with pytest.raises(RowError, match="bad_image"):
        load_image(BytesSource(program, "a.jpg"), config())
    assert not mark.exists()


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text", ["ffconcat version 1.0\nfile pipe\n", "#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\npipe\n"]
)
def test_playlists_are_refused_before_what_they_name_is_opened(tmp_path, text):
    os.mkfifo(tmp_path / "pipe")  # whoever opens it waits for ever
    (tmp_path / "a.mp4").write_text(text)
    with pytest.raises(RowError, match="unreadable_container"):
        load_video(FileSource(str(tmp_path / "a.mp4")), config())


def test_deep_and_float_images():
    def stored(image, **options):
        buffer = io.BytesIO()
        image.save(buffer, **options)
        return np.asarray(Image.open(io.BytesIO(load_image(BytesSource(buffer.getvalue(), "x"), config())[0])))

    values = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8).copy()
    values[0, 0] = np.nan
    out = stored(Image.fromarray(values), format="TIFF")
    assert out[7, 7, 0] > 240
    assert out[4, 4, 0] == pytest.approx(255 * values[4, 4], abs=6)


def test_an_unreadable_rest_is_flagged(tmp_path):
    """A container that its demuxer gives up on in the middle is not passed off as whole."""
    ogg = make_clip(tmp_path / "a.ogg", 3.0, codec=None, audio_codec="libopus").read_bytes()
    flac = make_clip(tmp_path / "b.ogg", 3.0, codec=None, audio_codec="flac").read_bytes()
    (tmp_path / "c.ogg").write_bytes(ogg + flac)
    meta = load_audio(FileSource(str(tmp_path / "c.ogg")), config())[1]
    assert {"truncated", "clock_jump", "decode_errors"} & set(meta.flags)
