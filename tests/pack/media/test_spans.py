"""Spans of a clip: each has pictures, its own sound, and what the whole clip shows and sounds like there."""

import av
import numpy as np
import pytest

from pack.media.load import load_audio, load_video, split_spans
from schemas.errors import RowError
from schemas.sources import FileSource
from tests.media_factory import beep_times, make_clip, picture, time_shown
from tests.pack.media.loading import config, pictures, samples
from tests.pack.media.test_clips import remux


def cut_stream(source, target, kind, end_s):
    """The clip without the packets of one kind from end_s on."""
    return remux(source, target, lambda p: None if p.stream.type == kind and p.pts * p.time_base >= end_s - 1e-6 else p)


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.ts"])
@pytest.mark.parametrize("sound_s", [6.1, 9.0])
def test_sound_behind_the_last_picture_stays_with_the_last_span(tmp_path, name, sound_s):
    source = make_clip(tmp_path / "source.mp4", sound_s, options={"bf": "0"}, audio_codec="mp2")
    path = cut_stream(source, tmp_path / name, "video", 6.0)
    cfg = config(split_s=2.0)
    loaded = [load_video(s, cfg) for s in split_spans(FileSource(str(path)), cfg)]
    # MPEG sound starts 10 ms before the first picture, so that a frame may fit in at 6.0 s.
    assert [m.num_frames for _, m in loaded] in ([4, 4, 4], [4, 4, 5])
    shown = [time_shown(f) for packed, _ in loaded for f in pictures(packed.frames)]
    assert np.allclose(shown[:12], np.arange(12) / 2, atol=0.1)
    lengths = [len(samples(p.audio)) / 16000 for p, _ in loaded]
    assert lengths == pytest.approx([2.0, 2.0, sound_s - 4.0], abs=0.05)
    last = loaded[-1][1]
    assert last.duration_s == pytest.approx(2.0, abs=0.04)
    assert last.audio.duration_s == pytest.approx(sound_s - 4.0, abs=0.05)
    whole = beep_times(np.concatenate([samples(p.audio) for p, _ in loaded]) / 32768)
    assert whole == pytest.approx(np.arange(1, np.ceil(sound_s)), abs=0.06)


def test_an_asked_span_with_sound_behind_the_picture_is_split_by_its_picture(tmp_path):
    source = make_clip(tmp_path / "source.mp4", 9.0, options={"bf": "0"})
    path = cut_stream(source, tmp_path / "a.mp4", "video", 6.0)
    spans = split_spans(FileSource(str(path), 1.0, 8.0), config(split_s=3.0))
    assert [(s.start_s, s.end_s) for s in spans] == [(1.0, 4.0), (4.0, 8.0)]
    behind = FileSource(str(path), 7.0, 8.5)
    assert split_spans(behind, config(split_s=1.0)) == [behind]


def test_spans_by_number_have_pictures_too(tmp_path):
    """10 pictures per second and 6.09 s of sound: by number the last picture is that of 5.9 s."""
    source = make_clip(tmp_path / "source.mp4", 6.2, fps=10, options={"bf": "0"})
    path = cut_stream(source, tmp_path / "a.mp4", "video", 6.0)
    cfg = config(sampling="qwen", split_s=5.92)
    spans = split_spans(FileSource(str(path)), cfg)
    assert all(load_video(s, cfg)[0].frames for s in spans)
    assert spans[-1].end_s is None or spans[-1].end_s > 6.1


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_a_span_without_a_sound_sample_is_missing_audio(tmp_path, name):
    source = make_clip(tmp_path / "source.mp4", 6.0)
    path = cut_stream(source, tmp_path / name, "audio", 3.0)
    behind, before = FileSource(str(path), 4.0, 6.0), FileSource(str(path), 1.0, 3.0)
    packed, meta = load_video(behind, config())
    assert packed.audio is None
    assert "no_audio" in meta.flags
    with pytest.raises(RowError, match="no_audio") as error:
        load_video(behind, config(rows={"missing_audio": "reject"}))
    assert error.value.stage == "audio"
    assert load_video(before, config(rows={"missing_audio": "reject"}))[0].audio is not None


def skewed(source, target, ahead_s):
    """The clip with its sound written so much before the pictures of the same time; the times stay."""
    options = {"max_interleave_delta": "1", "cluster_time_limit": "1000"}
    with av.open(str(source)) as old, av.open(str(target), "w", options=options) as new:
        streams = {s.index: new.add_stream_from_template(s) for s in old.streams}
        packets = [p for p in old.demux() if p.dts is not None]
        packets.sort(key=lambda p: float(p.dts * p.time_base) - ahead_s * (p.stream.type == "audio"))
        for packet in packets:
            packet.stream = streams[packet.stream.index]
            new.mux_one(packet)
    return target


@pytest.mark.parametrize("ahead_s", [3.0, 12.0, -3.0])
def test_sound_that_is_written_away_from_its_pictures(tmp_path, ahead_s):
    source = make_clip(tmp_path / "source.mkv", 60.0, fps=10, size=(64, 48), audio_codec="pcm_s16le", rate=16000,
                       options={"g": "10", "bf": "0"}, draw=lambda t, w, h: picture(t % 8, w, h))  # fmt: skip
    path = skewed(source, tmp_path / "skewed.mkv", ahead_s)
    for start_s in (10.0, 30.0, 41.5):
        source = FileSource(str(path), start_s, start_s + 4)
        packed, meta = load_video(source, config())
        whole_s = [t for t in np.arange(1, 60) - start_s if 0 <= t < 4]
        x = samples(packed.audio)
        assert len(x) == 64000
        assert beep_times(x / 32768) == pytest.approx(whole_s, abs=0.011)
        shown = np.array([time_shown(f) for f in pictures(packed.frames)])
        off = (shown - start_s - meta.frame_times_s + 4) % 8 - 4
        assert np.abs(off).max() < 0.13
        alone = samples(load_audio(source, config())[0])
        assert np.array_equal(alone, x)
