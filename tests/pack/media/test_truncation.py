"""`truncated` is said of files that are cut short, and of no others."""

import struct

import av
import numpy as np
import pytest
import soundfile

from tests.media_factory import make_clip, tone
from tests.pack.media.loading import clip, later, sound
from tests.pack.media.test_clips import remux


def halved(path, share=0.5):
    data = path.read_bytes()
    cut = path.with_name("cut" + path.suffix)
    cut.write_bytes(data[: int(len(data) * share)])
    return cut


def flags_of(path):
    _, _, meta = clip(path)
    return {*meta.flags, *meta.audio.flags}


def chunk(name, content):
    return name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


def wav(chunks, name=b"RIFF"):
    """A WAV of 16-bit mono at 16 kHz from chunks of one's own."""
    body = b"WAVE" + chunk(b"fmt ", struct.pack("<HHIIHH", 1, 1, 16000, 32000, 2, 16)) + b"".join(chunks)
    return name + struct.pack("<I", len(body)) + body


PCM = (tone(3.0, 16000) * 32767).astype("<i2").tobytes()


@pytest.mark.parametrize(
    "before",
    [
        [],
        [chunk(b"LIST", b"INFO" + chunk(b"ICMT", b"my data file "))],
        [chunk(b"LIST", b"INFO" + chunk(b"ICMT", b"data" * 9))],
        [chunk(b"bext", b"odd" * 3001)],  # 9003 bytes: the samples are far behind, and a byte is padding
        [chunk(b"junk", b"")],
    ],
    ids=["plain", "comment", "comments", "long", "empty"],
)
def test_chunks_before_the_samples_of_a_wav(tmp_path, before):
    path = tmp_path / "a.wav"
    path.write_bytes(wav([*before, chunk(b"data", PCM)]))
    x, meta = sound(path)
    assert len(x) == 48000
    assert "truncated" not in meta.flags
    path.write_bytes(path.read_bytes()[: -len(PCM) // 2])
    x, meta = sound(path)
    assert abs(len(x) - 24000) < 2000
    assert "truncated" in meta.flags


def test_a_wav_with_64_bit_sizes(tmp_path):
    soundfile.write(tmp_path / "a.wav", tone(3.0, 16000), 16000, format="RF64")
    assert (tmp_path / "a.wav").read_bytes()[:4] == b"RF64"
    assert "truncated" not in sound(tmp_path / "a.wav")[1].flags
    assert "truncated" in sound(halved(tmp_path / "a.wav"))[1].flags


@pytest.mark.parametrize("options", [{}, {"flvflags": "no_duration_filesize"}], ids=["duration", "no duration"])
@pytest.mark.parametrize("start_s", [0.0, 10.0])
def test_flv(tmp_path, options, start_s):
    source = make_clip(tmp_path / "s.mp4", options={"bf": "0"})
    path = later(source, tmp_path / "a.flv", start_s, options)
    assert "truncated" not in flags_of(path)
    assert "truncated" in flags_of(halved(path))


def test_nut_that_starts_late(tmp_path):
    source = make_clip(tmp_path / "s.mp4", options={"bf": "0"})
    for start_s in (0.0, 10.0):
        assert "truncated" not in flags_of(later(source, tmp_path / "a.nut", start_s))


def test_avi_with_dropped_pictures(tmp_path):
    source = make_clip(tmp_path / "a.avi", codec="mpeg4", audio_codec="mp3", options={"g": "1", "bf": "0"})

    def dropped(first_s, end_s):
        def change(packet):
            in_hole = packet.stream.type == "video" and first_s <= packet.pts * packet.time_base < end_s
            return None if in_hole else packet

        return change

    assert "truncated" not in flags_of(source)
    hole = remux(source, tmp_path / "hole.avi", dropped(2.0, 2.8))
    with av.open(str(hole)) as container:
        assert container.streams.video[0].frames > 170  # the header counts what was dropped
    flags = flags_of(hole)
    assert "truncated" not in flags
    assert "missing_media" in flags
    for path in (source, hole):
        for share in (0.4, 0.8):
            assert "truncated" in flags_of(halved(path, share))


def test_avi_of_an_unknown_size(tmp_path):
    """A stream could not go back to write how long it is: the durations tell."""
    path = make_clip(tmp_path / "a.avi", codec="mpeg4", audio_codec="mp3", fps=25)
    data = path.read_bytes()
    path.write_bytes(data[:4] + bytes(4) + data[8:])
    assert "truncated" not in flags_of(path)
    assert "truncated" in flags_of(halved(path))


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_half_a_wmv(tmp_path, share):
    path = make_clip(tmp_path / "a.wmv", codec="wmv2", audio_codec="mp3", rate=44100, fps=25)
    assert "truncated" not in flags_of(path)
    _, _, meta = clip(halved(path, share))
    assert "truncated" in meta.flags
    assert "truncated" in meta.audio.flags
    assert meta.duration_s == pytest.approx(6 * share, abs=0.6)


def test_half_a_wma(tmp_path):
    path = make_clip(tmp_path / "a.wma", codec=None, audio_codec="mp3", rate=44100)
    assert "truncated" not in sound(path)[1].flags
    assert "truncated" in sound(halved(path))[1].flags
    assert np.abs(sound(halved(path))[0]).max() > 1000
