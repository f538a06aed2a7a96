"""Images, extracted frames, colours: against Pillow and closed formulas."""

import io
import os

import av
import numpy as np
import psutil
import pytest
import simplejpeg
import soundfile
from PIL import Image

from pack.config import PackConfig
from pack.media.fetch import check_allowed, local_file
from pack.media.load import load_image, load_video
from pack.media.picture import hdr_to_sdr, over_white, resize, to_rgb
from schemas.errors import RowError
from schemas.sources import BytesSource, FileSource, FramesSource
from tests.media_factory import picture, time_shown, tone
from tests.pack.media.loading import config, pictures, samples


def image_config(**image):
    return PackConfig(manifest="m", output="o", image={"codec": "png", **image})


def encoded(image, **options):
    buffer = io.BytesIO()
    image.save(buffer, **options)
    return BytesSource(buffer.getvalue(), "image")


def stored(source, **image):
    blob, meta = load_image(source, image_config(**image))
    return np.asarray(Image.open(io.BytesIO(blob))), meta


RGB = np.random.default_rng(0).integers(0, 255, (40, 60, 3), np.uint8)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = {
        1: RGB, 2: RGB[:, ::-1], 3: np.rot90(RGB, 2), 4: RGB[::-1], 5: RGB.transpose(1, 0, 2), 6: np.rot90(RGB, -1),
        7: np.rot90(RGB.transpose(1, 0, 2), 2), 8: np.rot90(RGB, 1),
    }  # fmt: skip
    pixels, meta = stored(encoded(Image.fromarray(RGB), format="PNG", exif=exif))
    assert np.array_equal(pixels, upright[orientation])
    assert ("rotated" in meta.flags) == (orientation > 1)


def test_modes_become_rgb():
    grey = Image.fromarray(RGB[..., 0])
    assert np.array_equal(stored(encoded(grey, format="PNG"))[0], RGB[..., :1].repeat(3, 2))
    deep = Image.fromarray(RGB[..., 0].astype(np.uint16) * 257)
    assert np.array_equal(stored(encoded(deep, format="PNG"))[0], RGB[..., :1].repeat(3, 2))
    clear = Image.fromarray(np.dstack([RGB, np.zeros((40, 60), np.uint8)]))
    pixels, meta = stored(encoded(clear, format="PNG"))
    assert pixels.min() == 255
    assert "alpha" in meta.flags
    assert stored(encoded(Image.fromarray(RGB).convert("CMYK"), format="TIFF"))[0].shape == (40, 60, 3)
    assert stored(encoded(Image.fromarray(RGB).quantize(), format="GIF"))[0].shape == (40, 60, 3)


def test_model_size_of_images():
    pixels, meta = stored(encoded(Image.fromarray(RGB), format="PNG"), resize="model")
    assert (meta.height, meta.width) == pixels.shape[:2] == (64, 96)


@pytest.mark.parametrize("data", [b"GIF89a", b"not an image", b"\x89PNG\r\n\x1a\n" + bytes(40)])
def test_broken_images(data):
    with pytest.raises(RowError, match="bad_image"):
        load_image(BytesSource(data, "x"), image_config())


def test_decompression_bombs_are_refused():
    bomb = encoded(Image.new("1", (30000, 30000)), format="PNG")
    with pytest.raises(RowError, match="bad_image"):
        load_image(bomb, image_config())


def test_alpha_blend_equals_pillow():
    rgba = np.random.default_rng(1).integers(0, 255, (50, 50, 4), np.uint8)
    white = Image.new("RGBA", (50, 50), "white")
    white.alpha_composite(Image.fromarray(rgba))
    assert np.abs(over_white(rgba).astype(int) - np.asarray(white.convert("RGB"))).max() <= 1


@pytest.mark.parametrize("size", [(17, 23), (40, 60), (96, 64), (5, 200)])
def test_resize_is_pillows_bicubic(size):
    expected = np.asarray(Image.fromarray(RGB).resize(size[::-1], Image.Resampling.BICUBIC)).astype(int)
    for rounding in ("uint8", "float"):
        difference = np.abs(resize(RGB, size[1], size[0], rounding).astype(int) - expected)
        assert difference.mean() < 0.5
        assert difference.max() <= (3 if rounding == "uint8" else 20)  # Pillow rounds and clips between its two passes


@pytest.mark.parametrize("full_range", [True, False])
@pytest.mark.parametrize(("height", "kr", "kb"), [(240, 0.299, 0.114), (720, 0.2126, 0.0722)])
def test_untagged_pictures_take_the_matrix_of_their_size(height, kr, kb, full_range):
    y, u, v = 140, 90, 180
    frame = av.VideoFrame(64, height, "yuvj420p" if full_range else "yuv420p")
    for plane, value in zip(frame.planes, (y, u, v), strict=True):
        plane.update(bytes([value]) * plane.buffer_size)
    luma, chroma = (y, 1.0) if full_range else ((y - 16) * 255 / 219, 255 / 224)
    red = luma + 2 * (1 - kr) * (v - 128) * chroma
    blue = luma + 2 * (1 - kb) * (u - 128) * chroma
    green = (luma - kr * red - kb * blue) / (1 - kr - kb)
    assert to_rgb(frame, 64, height)[5, 5] == pytest.approx([red, green, blue], abs=2)


def test_hdr_keeps_order_hue_and_white():
    steps = np.linspace(0, 65535, 256).astype(np.uint16)
    for transfer in (16, 18):
        grey = hdr_to_sdr(steps.reshape(1, -1, 1).repeat(3, 2), transfer)[0].astype(int)
        assert (np.diff(grey[:, 0]) >= 0).all()
        assert np.ptp(grey, axis=1).max() <= 1  # grey stays grey
        assert grey[0, 0] == 0
        assert grey[-1, 0] >= 250
    white_203_nits = round(0.5807 * 65535)  # PQ code of reference white
    assert 235 <= hdr_to_sdr(np.full((1, 1, 3), white_203_nits, np.uint16), 16)[0, 0, 0] <= 250


def jpeg(time_s):
    return simplejpeg.encode_jpeg(picture(time_s, 64, 64), 95, "RGB", "420")


def test_extracted_frames_are_kept_byte_for_byte():
    wav = io.BytesIO()
    soundfile.write(wav, tone(3.0, 16000), 16000, format="WAV")
    frames = tuple(BytesSource(jpeg(k / 2), "f") for k in range(6))
    source = FramesSource(frames, 2.0, BytesSource(wav.getvalue(), "a"))
    packed, meta = load_video(source, config(codec="jpeg"))
    assert packed.frames == [f.data for f in frames]
    assert np.array_equal(samples(packed.audio), samples(wav.getvalue()))
    assert (meta.video_fps, meta.duration_s, meta.sampling) == (2.0, 3.0, "given")


def test_extracted_frames_are_thinned_to_the_rate_and_resized():
    frames = np.stack([picture(k / 8, 100, 60) for k in range(32)])
    packed, meta = load_video(FramesSource(frames, 8.0, tone(4.0, 48000), 48000), config(resize="model", factor=32))
    shown = pictures(packed.frames)
    assert meta.video_fps == 2.0
    assert shown.shape[1] % 32 == shown.shape[2] % 32 == 0
    assert np.allclose([time_shown(f) for f in shown], np.arange(8) / 2, atol=0.03)
    assert len(samples(packed.audio)) == 64000


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (FramesSource((), 2.0), "empty_video"),
        (FramesSource((BytesSource(b"xx", "f"),), 2.0), "bad_image"),
        (FramesSource((FileSource("/nowhere/f.jpg"),), 2.0), "missing_file"),
        (FramesSource(np.zeros((2, 8, 8, 3), np.uint8), 2.0, np.zeros(9, np.float32)), "bad_row"),
        (FramesSource(np.zeros((2, 8, 8, 3), np.uint8), 2.0, np.zeros(0, np.float32), 16000), "empty_audio"),
    ],
)
def test_wrong_frames(source, reason):
    with pytest.raises(RowError) as error:
        load_video(source, config())
    assert error.value.reason == reason


def test_paths_are_checked(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "ok").write_bytes(b"x")
    (tmp_path / "out").write_bytes(b"x")
    os.symlink(tmp_path / "out", tmp_path / "in" / "link")
    roots = [str(tmp_path / "in"), "s3://bucket/data"]
    check_allowed(str(tmp_path / "in" / "ok"), roots)
    check_allowed("s3://bucket/data/x.mp4", roots)
    for uri in (
        tmp_path / "out",
        tmp_path / "in" / "link",
        tmp_path / "in" / ".." / "out",
        "s3://bucket/data/../x",
        "s3://b/x",
    ):
        with pytest.raises(RowError, match="unsafe_path"):
            check_allowed(str(uri), roots)


MISSING = {
    "/nowhere/x": "missing_file",
    "/tmp": "missing_file",
    "memory://no": "missing_file",
    "/tmp/" + "x" * 300: "missing_file",
    "nostore://x": "fetch_failed",
}


@pytest.mark.parametrize(("uri", "reason"), MISSING.items())
def test_missing_files(uri, reason):
    with pytest.raises(RowError) as error, local_file(FileSource(uri), []):
        pass
    assert error.value.reason == reason


def test_loading_again_and_again_keeps_nothing():
    source = FileSource("tests/cases/media/hevc_10bit_pq.mp4")
    process = psutil.Process()
    for _ in range(5):
        load_video(source, config())
    before = process.memory_info().rss
    open_files = len(process.open_files())
    for _ in range(40):
        load_video(source, config())
    assert process.memory_info().rss - before < 20e6
    assert len(process.open_files()) == open_files
