"""Leaving out what no wanted picture depends on changes no pixel, whatever the codec and its groups."""

import numpy as np
import pytest

from pack.media.decode import ClipDecoder, plan_decoding
from pack.media.picture import to_rgb
from pack.media.probe import probe
from tests.media_factory import make_clip

CODECS = {
    "h264 long groups": ("a.mp4", "libx264", {"g": "250", "bf": "3"}),
    "h264 open groups": ("a.mkv", "libx264", {"g": "25", "x264-params": "open-gop=1:bframes=3:scenecut=0"}),
    "h264 pyramid": ("a.mp4", "libx264", {"g": "40", "x264-params": "b-pyramid=normal:bframes=7:b-adapt=0"}),
    "h264 in ts": ("a.ts", "libx264", {"g": "50", "bf": "2"}),
    "hevc open groups": ("a.mkv", "libx265", {"x265-params": "log-level=none:open-gop=1:keyint=24:bframes=4"}),
    "hevc": ("a.mp4", "libx265", {"x265-params": "log-level=none:open-gop=0:keyint=40"}),
    "vp9": ("a.webm", "libvpx-vp9", {"g": "30", "deadline": "realtime", "cpu-used": "8"}),
    "vp8 with hidden pictures": ("a.webm", "libvpx", {"g": "60", "auto-alt-ref": "1", "lag-in-frames": "16"}),
    "mpeg4": ("a.mp4", "mpeg4", {"g": "40", "bf": "2"}),
    "mpeg2": ("a.mkv", "mpeg2video", {"g": "15", "bf": "2"}),
    "mjpeg": ("a.mov", "mjpeg", {}),
    "av1": ("a.mp4", "libsvtav1", {"preset": "12", "g": "60", "svtav1-params": "lp=1"}),
}  # fmt: skip


def decoded(probed, wanted, plan):
    """{tick: RGB bytes} of the wanted pictures, and how many pictures came out."""
    base, found = probed.video.time_base, {}

    def sink(frame, time_s):
        tick = round(time_s / base)
        if tick in wanted:
            found[tick] = to_rgb(frame, frame.width, frame.height).tobytes()

    decoder = ClipDecoder(probed)
    decoder.run(sink, None, plan)
    assert decoder.errors == 0
    return found, decoder.num_pictures


@pytest.mark.parametrize("name", CODECS)
def test_planned_pictures_equal_a_full_decode(tmp_path, name):
    file, codec, options = CODECS[name]
    pixel_format = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    path = make_clip(
        tmp_path / file, 6.0, fps=25, codec=codec, options=options, audio_codec=None, pixel_format=pixel_format
    )
    probed = probe(str(path), "clip", True)
    ticks = sorted({round(t / probed.video.time_base) for t in probed.video.packets.pts})
    for wanted in ({*ticks[::12]}, {*ticks[5::60]}, {ticks[77]}, {ticks[0]}, {ticks[-1]}, {*ticks}):
        plan = plan_decoding(probed, wanted)
        full, count = decoded(probed, wanted, None)
        if plan is None:
            assert file == "a.ts"
            continue
        part, fewer = decoded(probed, wanted, plan)
        assert part == full
        assert fewer <= count
    if codec == "mjpeg":
        assert fewer == count
        assert decoded(probed, {ticks[40]}, plan_decoding(probed, {ticks[40]}))[1] == 1


def test_long_groups_are_entered_only_where_needed(tmp_path):
    path = make_clip(tmp_path / "a.mp4", 20.0, fps=25, options={"g": "50", "bf": "2"}, audio_codec=None)
    probed = probe(str(path), "clip", True)
    ticks = sorted(round(t / probed.video.time_base) for t in probed.video.packets.pts)
    plan = plan_decoding(probed, {ticks[0], ticks[260]})
    used = np.flatnonzero(plan.use)
    wanted = int(np.flatnonzero(plan.use == 2)[1])
    entry = max(i for i in np.flatnonzero(probed.video.packets.keyframe) if i <= wanted)
    assert used.tolist() == [0, *range(entry, wanted + 1)]
    assert np.flatnonzero(plan.restart).tolist() == [entry]
