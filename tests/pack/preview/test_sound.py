import io
import math

import numpy as np
import pytest
import soundfile

from pack.preview import sound
from tests.pack.preview.samples import RATE, sine


@pytest.mark.parametrize("codec", ["wav", "flac"])
def test_levels_of_a_sine_are_the_textbook_ones(codec: str) -> None:
    measured = sound.measure(sine(2.0, amplitude=0.5, codec=codec))
    assert measured.peak_dbfs == pytest.approx(20 * math.log10(0.5), abs=0.01)
    assert measured.rms_dbfs == pytest.approx(20 * math.log10(0.5 / math.sqrt(2)), abs=0.01)


def test_the_outline_is_lowest_and_highest_sample_of_each_bin() -> None:
    samples = np.zeros(1000, dtype=np.int16)
    samples[250], samples[990] = 16384, -8192
    out = io.BytesIO()
    soundfile.write(out, samples, RATE, format="WAV")
    outline = sound.measure(out.getvalue(), bins=10).outline
    assert outline.shape == (10, 2)
    expected = np.zeros((10, 2))
    expected[2, 1], expected[9, 0] = 0.5, -0.25
    assert outline == pytest.approx(expected)


def test_silence_and_no_samples_at_all() -> None:
    silent = sound.measure(sine(0.5, amplitude=0.0))
    assert (silent.peak_dbfs, silent.rms_dbfs) == (sound.FLOOR_DBFS, sound.FLOOR_DBFS)
    assert sound.outline_path(silent, 0, 1000, 80).startswith("M0.0,40.0")
    empty = sound.measure(sine(0.0))
    assert len(empty.outline) == 0 and sound.outline_path(empty, 0, 1000, 80) == ""


def test_the_path_spans_exactly_the_width_it_is_given() -> None:
    path = sound.outline_path(sound.measure(sine(1.0)), 100, 300, 80)
    xs = [float(pair.split(",")[0]) for pair in path.strip("MZ").split("L")]
    ys = [float(pair.split(",")[1]) for pair in path.strip("MZ").split("L")]
    assert (min(xs), max(xs)) == (100, 400)
    assert min(ys) == pytest.approx(40 * 0.04, abs=0.2) and max(ys) == pytest.approx(40 * 1.96, abs=0.8)


@pytest.mark.parametrize("codec", ["wav", "flac"])
def test_a_sound_within_the_limit_is_kept_and_a_longer_one_keeps_its_beginning(codec: str) -> None:
    whole = sine(4.0, codec=codec)
    assert sound.shorten(whole, len(whole)) == (whole, 4.0)
    part, seconds = sound.shorten(whole, len(whole) // 4)
    samples, rate = soundfile.read(io.BytesIO(part), dtype="int16")
    assert seconds == len(samples) / rate and seconds == pytest.approx(1.0, abs=0.01)
    assert np.array_equal(samples, soundfile.read(io.BytesIO(whole), dtype="int16")[0][: len(samples)])
    assert soundfile.info(io.BytesIO(part)).format == codec.upper()
