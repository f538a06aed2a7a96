"""Which names count as near, and which are names of their own."""

import pytest

from schemas.nearest import is_typo, nearest_key


@pytest.mark.parametrize("name", ["vidoes", "vedios", "video", "videoss", "videis", "Videos", "vvideos", "ideos"])
def test_slips(name):
    assert is_typo(name, "videos")


@pytest.mark.parametrize("name", ["videos", "video1", "video_", "radios", "vids", "media", "videos_2", "soediv", ""])
def test_names_of_their_own(name):
    assert not is_typo(name, "videos")


@pytest.mark.parametrize(
    ("name", "near"), [("fsp", "fps"), ("FPS", "fps"), ("max_frame", "max_frames"), ("colour", None), ("", None)]
)
def test_nearest_key(name, near):
    assert nearest_key(name, ["fps", "max_frames", "quality"]) == near
