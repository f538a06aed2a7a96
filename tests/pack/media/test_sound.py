"""Sound is put where its timestamps say, keeps its level and loses nothing at the end."""

import av
import numpy as np
import pytest
import soundfile
import soxr

from pack.media.audio import SoundTrack, mix_gains
from pack.media.load import load_audio
from schemas.sources import FileSource
from tests.media_factory import beep_times, make_clip, tone
from tests.pack.media.loading import clip, config, samples, sound


class Chunk:
    """What SoundTrack reads of a PyAV frame."""

    def __init__(self, samples, rate=16000, layout="mono"):
        self._samples, self.sample_rate, self.layout = np.atleast_2d(samples), rate, av.AudioLayout(layout)
        self.format = av.AudioFormat("fltp")

    def to_ndarray(self):
        return self._samples


def placed(chunks, **kwargs):
    track = SoundTrack(16000, 0.0, **kwargs)
    for time_s, chunk in chunks:
        track.add(Chunk(chunk), time_s)
    return track.finish().astype(float) / 32768, track


def ramp(count, start=0):
    return ((np.arange(count) + start) % 1000 / 2000).astype(np.float32)


def test_contiguous_chunks_are_kept_bit_for_bit():
    whole = np.round(ramp(5000) * 32768) / 32768
    x, _ = placed([(i / 16000, whole[i : i + 1000]) for i in range(0, 5000, 1000)])
    assert np.array_equal(x, whole)


def test_jitter_is_no_silence_and_does_not_add_up():
    rng = np.random.default_rng(0)
    chunks = [(i / 16000 + rng.uniform(-0.01, 0.01), ramp(1000, i)) for i in range(0, 64000, 1000)]
    chunks[0] = (0.0, ramp(1000))
    x, track = placed(chunks)
    assert len(x) == 64000
    assert track.gaps_s == []


def test_a_clock_that_runs_fast_stays_within_the_tolerance():
    """Timestamps 0.1 % ahead of the sample count: corrected in steps, never further off than the tolerance."""
    chunks = [(i * 1.001 / 16000, ramp(1000, i)) for i in range(0, 1_600_000, 1000)]
    x, track = placed(chunks)
    assert abs(len(x) / 16000 - 100.1) < 0.016
    assert track.gaps_s == []


def test_late_start_hole_and_overlap():
    ones = np.ones(8000, np.float32) * 0.25
    x, track = placed([(0.5, ones), (2.0, ones), (2.25, ones)])
    assert track.start_s == 0.5
    assert track.gaps_s == [(1.0, 2.0)]
    assert len(x) == round(2.75 * 16000)
    expected = np.zeros(len(x))
    expected[8000:16000] = expected[32000:44000] = 0.25
    assert np.allclose(x, expected, atol=1e-4)


def test_counted_streams_ignore_timestamps():
    x, track = placed([(0.0, ramp(1000)), (99.0, ramp(1000, 1000))], counted=True)
    assert len(x) == 2000
    assert track.gaps_s == []


def test_span_cuts_to_the_sample():
    whole = np.round(ramp(16000) * 32768) / 32768
    chunks = [(i / 16000 - 0.3, whole[i : i + 700]) for i in range(0, 16000, 700)]
    x, _ = placed(chunks, end_s=0.25)
    assert np.array_equal(x, whole[4800 : 4800 + 4000])


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000])
def test_resampling_in_chunks_equals_soxr_on_the_whole(rate):
    rng = np.random.default_rng(rate)
    whole = rng.uniform(-0.5, 0.5, rate * 2 + 17).astype(np.float32)
    track = SoundTrack(16000, 0.0)
    for i in range(0, len(whole), 1111):
        track.add(Chunk(whole[i : i + 1111], rate), i / rate)
    x = track.finish()
    assert len(x) == -(-len(whole) * 16000 // rate)  # librosa's count
    expected = soxr.resample(whole, rate, 16000, "HQ")
    assert np.abs(x[: len(expected)] / 32768 - expected).max() < 2 / 32768


def test_a_padding_end_is_cut_and_a_wrong_one_is_not():
    chunks = [(i / 16000, ramp(1000, i)) for i in range(0, 10000, 1000)]
    assert len(placed(chunks, source_end_s=0.6)[0]) == 9600
    assert len(placed(chunks, source_end_s=0.3)[0]) == 10000  # 5200 samples are no padding of 1000-sample frames


def test_mixes():
    assert mix_gains(["FL", "FR"]).tolist() == [0.5, 0.5]
    assert mix_gains(["FL", "FR", "FC", "LFE", "SL", "SR"])[2] == 1.0
    assert mix_gains(["FL", "FR", "BL", "BR"])[:2] == pytest.approx([0.5, 0.5], abs=1e-3)
    assert mix_gains(["FL", "FR", "FC", "LFE", "SL", "SR"])[3] == 0.0


@pytest.mark.parametrize(
    ("layout", "channel", "low"),
    [("stereo", 1, 0.2), ("5.1", 2, 0.4), ("7.1", 2, 0.4), ("quad", 2, 0.15), ("3.0", 2, 0.4)],
)
def test_one_channel_alone_is_heard(tmp_path, layout, channel, low):
    path = make_clip(tmp_path / "c.mkv", 3.0, layout=layout, channel=channel, audio_codec="flac")
    _, x, _ = clip(path)
    assert beep_times(x / 32768) == [1.0, 2.0]
    assert np.abs(x).max() / 32768 > low


def test_antiphase_is_flagged(tmp_path):
    beep = tone(3.0, 16000)
    soundfile.write(tmp_path / "a.wav", np.stack([beep, -beep], 1), 16000)
    _, meta = sound(tmp_path / "a.wav")
    assert {"antiphase", "silent"} <= set(meta.flags)


@pytest.mark.parametrize(
    ("name", "subtype"),
    [
        *(("a.wav", kind) for kind in ("PCM_16", "PCM_24", "FLOAT", "DOUBLE", "PCM_U8")),
        *(("a.ogg", kind) for kind in ("VORBIS", "OPUS")),
        ("a.flac", "PCM_24"),
        ("a.aiff", "PCM_16"),
        ("a.mp3", "MPEG_LAYER_III"),
        ("a.au", "ULAW"),
        ("a.w64", "PCM_16"),
    ],
)
def test_sound_files(tmp_path, name, subtype):
    soundfile.write(tmp_path / name, tone(3.0, 48000), 48000, subtype=subtype)
    x, meta = sound(tmp_path / name)
    assert abs(len(x) - 48000) <= 400
    assert np.allclose(beep_times(x / 32768), [1.0, 2.0], atol=0.01)
    assert meta.sample_rate == 16000


def test_too_loud_clips_and_does_not_wrap(tmp_path):
    loud = tone(3.0, 16000, amplitude=2.0)
    soundfile.write(tmp_path / "a.wav", loud, 16000, subtype="FLOAT")
    x, meta = sound(tmp_path / "a.wav")
    assert np.array_equal(np.sign(x[np.abs(loud) > 0.1]), np.sign(loud[np.abs(loud) > 0.1]))
    assert "clipped" in meta.flags


def test_non_finite_samples_become_silence(tmp_path):
    bad = tone(3.0, 16000)
    bad[100:200] = np.nan
    bad[300:310] = np.inf
    soundfile.write(tmp_path / "a.wav", bad, 16000, subtype="FLOAT")
    x, meta = sound(tmp_path / "a.wav")
    assert not x[100:200].any()
    assert not x[300:310].any()
    assert "non_finite" in meta.flags


def test_rate_change_in_raw_adts_is_counted(tmp_path):
    for name, rate in (("1.aac", 48000), ("2.aac", 44100)):
        make_clip(tmp_path / name, 3.0, codec=None, rate=rate)
    (tmp_path / "j.aac").write_bytes((tmp_path / "1.aac").read_bytes() + (tmp_path / "2.aac").read_bytes())
    x, meta = sound(tmp_path / "j.aac")
    first = sound(tmp_path / "1.aac")[0]
    offset = len(first) / 16000
    expected = [1.0, 2.0, 1.0 + offset, 2.0 + offset]
    assert np.allclose(beep_times(x / 32768), expected, atol=0.05)
    assert "rate_changed" in meta.flags


def test_first_track_silent_takes_the_next(tmp_path):
    path = make_clip(tmp_path / "c.mp4", 3.0, silent_first_track=True)
    _, x, meta = clip(path)
    assert beep_times(x / 32768) == [1.0, 2.0]
    assert meta.audio is not None
    assert "several_tracks" in meta.audio.flags
    assert meta.audio.origin.stream_index == 2


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_truncated_wav_is_flagged_and_a_piped_one_is_not(tmp_path, share):
    soundfile.write(tmp_path / "a.wav", tone(6.0, 16000), 16000)
    data = (tmp_path / "a.wav").read_bytes()
    (tmp_path / "cut.wav").write_bytes(data[: int(len(data) * share)])
    assert "truncated" in sound(tmp_path / "cut.wav")[1].flags
    (tmp_path / "pipe.wav").write_bytes(data[:40] + b"\xff\xff\xff\xff" + data[44:])
    assert "truncated" not in sound(tmp_path / "pipe.wav")[1].flags


def test_a_span_of_a_sound_file(tmp_path):
    soundfile.write(tmp_path / "a.wav", tone(6.0, 16000), 16000)
    x, meta = sound(tmp_path / "a.wav", (1.5, 4.0))
    assert len(x) == 40000
    assert beep_times(x / 32768) == [0.5, 1.5]
    assert meta.origin.span_s == (1.5, 4.0)


def test_flac_storage_is_lossless(tmp_path):
    soundfile.write(tmp_path / "a.wav", tone(2.0, 16000), 16000)
    source = FileSource(str(tmp_path / "a.wav"))
    stored = [load_audio(source, config(audio={"codec": codec}))[0] for codec in ("wav", "flac")]
    assert np.array_equal(*map(samples, stored))
    assert len(stored[1]) < len(stored[0])


def test_priming_that_an_mp4_does_not_state_is_kept_and_flagged(tmp_path):
    stated = make_clip(tmp_path / "a.m4a", 3.0, codec=None)
    x, meta = sound(stated)
    assert "priming_kept" not in meta.flags
    assert beep_times(x / 32768) == [1.0, 2.0]
    silent = make_clip(tmp_path / "b.m4a", 3.0, codec=None, container_options={"use_editlist": "0"})
    x, meta = sound(silent)
    assert "priming_kept" in meta.flags
    assert beep_times(x / 32768) == pytest.approx([1.02, 2.02], abs=0.006)
