"""One raw row -> ManifestRow: forms of media, paths, ids, content keys, and what each fault says."""

import base64
import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import soundfile
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from schemas import media_items
from schemas.errors import RowError
from schemas.manifest import BytesSource, FileSource, FramesSource, content_key, parse_row

TALK = [{"from": "human", "value": "<video>\nWho?"}, {"from": "gpt", "value": "A cat."}]
DATA = b"\x00\x01\xfe\xff media"
URL64 = "data:video/mp4;base64," + base64.b64encode(DATA).decode()


def parse(row, base="/data/set", **kwargs):
    return parse_row({"conversations": TALK, **row}, base=base, location=("m.jsonl", 7), occurrence=0, **kwargs)


def test_a_plain_row():
    row = parse({"id": "a", "source": "web", "videos": ["clips/a.mp4"], "topic": "cats"})
    assert (row.id, row.source, row.location, row.fields) == ("a", "web", ("m.jsonl", 7), {"topic": "cats"})
    assert row.videos == (FileSource("/data/set/clips/a.mp4"),)
    assert (row.audios, row.images) == ((), ())
    assert row.conversations == TALK


@pytest.mark.parametrize(
    ("path", "base", "uri"),
    [
        ("a.mp4", "/data/set", "/data/set/a.mp4"),
        ("./x/a.mp4", "/data/set", "/data/set/x/a.mp4"),
        ("/abs/a.mp4", "/data/set", "/abs/a.mp4"),
        ("../a.mp4", "/data/set", "/data/set/../a.mp4"),  # `set` may be a link: the text of the path stays
        ("a b #1 %20.mp4", "/data", "/data/a b #1 %20.mp4"),
        ("file:///abs/a%20b%23.mp4", "/data", "/abs/a b#.mp4"),
        ("file:///abs/a#b?c.mp4", "/data", "/abs/a#b?c.mp4"),
        ("file://localhost/abs/a.mp4", "/data", "/abs/a.mp4"),
        ("s3://b/k/a.mp4", "/data", "s3://b/k/a.mp4"),
        ("gs://b/a.mp4", "s3://c/d", "gs://b/a.mp4"),
        ("https://h/a.mp4?x=1", "/data", "https://h/a.mp4?x=1"),
        ("x/../a.mp4", "s3://bucket/set", "s3://bucket/set/a.mp4"),
        ("/abs/a.mp4", "s3://bucket/set", "/abs/a.mp4"),
    ],
)
def test_where_a_path_points(path, base, uri):
    assert parse({"videos": [path]}, base=base).videos == (FileSource(uri),)


def test_every_form_of_a_file():
    row = parse(
        {
            "videos": [
                {"path": "a.mp4", "start": 1, "end": 2.5, "duration_s": 9, "bytes": 100},
                {"video": "b.mp4", "video_start": 0.5},
                {"bytes": DATA, "path": "inner.mp4"},
                {"bytes": None, "path": "c.mp4"},
                DATA,
                bytearray(DATA),
                URL64,
            ]
        }
    )
    assert row.videos == (
        FileSource("/data/set/a.mp4", 1.0, 2.5, 9.0, 100),
        FileSource("/data/set/b.mp4", 0.5, None),
        BytesSource(DATA, "inner.mp4"),
        FileSource("/data/set/c.mp4"),
        BytesSource(DATA, "videos[4]"),
        BytesSource(DATA, "videos[5]"),
        BytesSource(DATA, "videos[6]"),
    )


@pytest.mark.parametrize("key", ["video", "videos"])
@pytest.mark.parametrize("value", ["a.mp4", ["a.mp4"], {"path": "a.mp4"}])
def test_singular_and_plural(key, value):
    assert parse({key: value}).videos == (FileSource("/data/set/a.mp4"),)


def test_singular_names_of_the_other_kinds():
    row = parse({"image": "i.jpg", "question_audio": {"bytes": DATA, "path": "q.wav"}})
    assert row.images == (FileSource("/data/set/i.jpg"),)
    assert row.audios == (BytesSource(DATA, "q.wav"),)
    assert row.fields == {}


def test_path_with_data_type():
    row = parse({"path": "./LLaVA/v.mp4", "data_type": "video", "problem": "x"})
    assert row.videos == (FileSource("/data/set/LLaVA/v.mp4"),)
    row = parse({"path": {"image": "i.png", "audio": "a.wav"}, "data_type": "image_audio"})
    assert (row.images, row.audios) == ((FileSource("/data/set/i.png"),), (FileSource("/data/set/a.wav"),))
    assert parse({"path": "x.mp4", "data_type": "video", "videos": ["y.mp4"]}).videos[0].uri == "/data/set/y.mp4"


def test_use_audio_in_video_of_row_and_medium():
    row = parse({"use_audio_in_video": False, "videos": ["a.mp4", {"path": "b.mp4", "use_audio_in_video": True}, DATA]})
    assert [source.use_audio for source in row.videos] == [False, True, False]


def test_frames_with_sound():
    frames = {"frames": ["0.jpg", DATA], "audio": DATA, "video_fps": 4, "audio_fps": 16000}
    (video,) = parse({"videos": [frames]}).videos
    assert video.frames == (FileSource("/data/set/0.jpg"), BytesSource(DATA, "videos[0].frames[1]"))
    assert (video.video_fps, video.audio_fps, video.name) == (4.0, 16000, "videos[0]")
    assert video.audio == BytesSource(DATA, "videos[0].audio")
    (silent,) = parse({"videos": [frames], "use_audio_in_video": False}).videos
    assert silent.audio is None


def test_rates_of_frames_without_one():
    assert parse({"videos": [["0.jpg", "1.jpg"]]}).videos[0].video_fps == 2.0
    assert parse({"videos": [["0.jpg"]]}, frames_fps=5.0).videos[0].video_fps == 5.0
    assert parse({"videos": [{"video": np.zeros((2, 4, 6, 3), np.uint8)}]}).videos[0].video_fps == 30.0


def test_arrays_of_pictures_in_both_layouts():
    pictures = np.arange(2 * 4 * 6 * 3, dtype=np.uint8).reshape(2, 4, 6, 3)
    for given_form in (pictures, pictures.transpose(0, 3, 1, 2), pictures.tolist(), list(pictures)):
        (video,) = parse({"videos": [{"video": given_form, "video_fps": 8}]}).videos
        assert isinstance(video, FramesSource)
        assert video.frames.dtype == np.uint8
        np.testing.assert_array_equal(video.frames, pictures)


def test_sound_arrays_keep_their_values():
    wave = np.array([0.0, 0.5, -1.0], np.float32)
    frames = {"frames": ["0.jpg"], "audio_fps": 8000}
    for given_form in (wave, wave.astype(np.float64), wave.tolist()):
        (video,) = parse({"videos": [frames | {"audio": given_form}]}).videos
        np.testing.assert_array_equal(video.audio, wave)
        assert video.audio.dtype == np.float32
    (video,) = parse({"videos": [frames | {"audio": np.array([0, 16384, -32768], np.int16)}]}).videos
    np.testing.assert_array_equal(video.audio, wave)


def test_decoded_audio_feature_becomes_a_wav_of_the_same_samples():
    wave = np.linspace(-1, 1, 50, dtype=np.float32)
    (audio,) = parse({"audio": {"array": wave, "sampling_rate": 22050, "path": "q.wav"}}).audios
    samples, rate = soundfile.read(io.BytesIO(audio.data), dtype="float32")
    np.testing.assert_array_equal(samples, wave)
    assert (rate, audio.name) == (22050, "q.wav")


def test_media_of_content_parts():
    content = [
        {"type": "image_url", "image_url": {"url": "i.png"}},
        {"type": "video", "video": "v.mp4", "video_start": 1.0},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(DATA).decode(), "format": "wav"}},
        {"type": "text", "text": "Who?"},
    ]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "A cat."}]
    row = parse_row({"messages": messages}, base="/d", location=("m", 0), occurrence=0)
    assert row.images == (FileSource("/d/i.png"),)
    assert row.videos == (FileSource("/d/v.mp4", 1.0),)
    assert [audio.data for audio in row.audios] == [DATA]
    listed = parse_row({"messages": messages, "images": ["j.png"]}, base="/d", location=("m", 0), occurrence=0)
    assert listed.images == (FileSource("/d/j.png"),)


def test_parts_that_name_no_medium_bind_the_list():
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}]
    row = parse_row({"messages": messages, "images": ["a", "b"]}, base="/d", location=("m", 0), occurrence=0)
    assert len(row.images) == 2
    half = [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "image"}]}]
    with pytest.raises(RowError, match=r"message 0 content\[1\] names no image"):
        parse_row({"messages": half}, base="/d", location=("m", 0), occurrence=0)


def test_a_row_without_conversation_goes_whole_to_the_preprocessor():
    raw = {"query": "a", "response": "b", "source": "web"}
    assert parse_row(raw, base="/d", location=("m", 0), occurrence=0).conversations == raw


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"vidoes": ["a.mp4"]}, "unknown key 'vidoes'; did you mean 'videos'"),
        ({"vedios": ["a.mp4"]}, "did you mean 'videos'"),
        ({"Videos": ["a.mp4"]}, "did you mean 'videos'"),
        ({"audois": ["a.wav"]}, "did you mean 'audios'"),
        ({"imges": ["a.png"]}, "did you mean 'images'"),
        ({"video": "a", "videos": ["b"]}, "the row has videos and video; it needs one of them"),
        ({"videos": [""]}, r"videos\[0\] is ''; a path is not empty"),
        ({"videos": ["a\0b"]}, "no NUL"),
        ({"videos": ["a\ud800"]}, "surrogate"),
        ({"videos": [3]}, r"videos\[0\] is 3; it is a path, URL, bytes or a mapping"),
        ({"videos": ["a", None]}, r"videos\[1\] is None"),
        ({"videos": "file://host/a"}, "a file URL is file:///absolute/path"),
        ({"videos": [{"path": "a", "strt": 1}]}, r"videos\[0\] has the unknown key 'strt'; did you mean 'start'"),
        ({"videos": [{"start": 1}]}, "has none of path"),
        ({"videos": [{"path": "a", "url": "b"}]}, "has path and url"),
        ({"videos": [{"path": 3}]}, r"videos\[0\].path is 3"),
        ({"videos": [{"path": "a", "start": 3, "end": 3}]}, "start 3.0 is not before end 3.0"),
        ({"videos": [{"path": "a", "end": 0}]}, "start 0 is not before end 0"),
        ({"videos": [{"path": "a", "start": -1}]}, r"videos\[0\].start is -1; it is finite and >= 0"),
        ({"videos": [{"path": "a", "end": float("nan")}]}, "it is finite"),
        ({"videos": [{"path": "a", "start": "1"}]}, r"videos\[0\].start is '1'; it is a number"),
        ({"videos": [{"path": "a", "start": True}]}, "it is a number"),
        ({"videos": [{"path": "a", "start": 1, "video_start": 1}]}, "start and video_start, which mean the same"),
        ({"videos": [{"path": "a", "duration_s": float("inf")}]}, "duration_s is inf"),
        ({"videos": [{"path": "a", "bytes": -5}]}, r"videos\[0\].bytes is -5"),
        ({"videos": [{"path": "a", "use_audio_in_video": "no"}]}, "it is true or false"),
        ({"use_audio_in_video": 1}, "use_audio_in_video is 1; it is true or false"),
        ({"images": [{"path": "a", "start": 1}]}, "has a span; only a video or sound from a file has one"),
        ({"videos": [{"bytes": DATA, "start": 1}]}, "has bytes and a span"),
        ({"videos": [{"frames": []}]}, r"videos\[0\].frames is empty"),
        ({"videos": [{"frames": ["a"], "video_fps": 0}]}, "video_fps is 0; it is finite and > 0"),
        ({"videos": [{"frames": ["a"], "fps": 2}]}, "unknown key 'fps'"),
        ({"videos": [{"frames": ["a"], "audio": [0.5]}]}, "is an array without .*audio_fps, its rate in Hz"),
        ({"videos": [{"video": np.zeros((1, 2, 2, 3), np.uint8), "audio": np.zeros(9, np.float32)}]}, "audio_fps"),
        ({"videos": [{"frames": ["a"], "audio": np.zeros((2, 9)), "audio_fps": 8}]}, r"shape \[2, 9\]; a sound is one"),
        ({"videos": [{"frames": ["a"], "audio": [0, 200], "audio_fps": 8}]}, "float in"),
        ({"videos": [{"video": np.zeros((4, 4, 3), np.uint8)}]}, r"shape \[4, 4, 3\]"),
        ({"videos": [{"video": np.zeros((1, 4, 4, 3))}]}, "float64; pictures are uint8"),
        ({"videos": [{"video": np.full((1, 4, 4, 3), 300)}]}, "pictures are uint8, 0 to 255"),
        ({"videos": [[np.zeros((2, 2, 3)), np.zeros((3, 3, 3))]]}, "different shapes"),
        ({"audio": {"array": [0.1]}}, "without sampling_rate"),
        ({"videos": ["data:video/mp4;base64"]}, "no comma"),
        ({"videos": ["data:video/mp4;base64,@@@@"]}, "base64 of the data URL is damaged"),
        ({"id": ""}, "id is ''; it is a string that is not empty"),
        ({"id": 1.5}, "id is 1.5"),
        ({"id": True}, "id is True"),
        ({"source": 3}, "source is 3; it is a string"),
        ({3: "x"}, "the keys of a row are strings, not 3"),
    ],
)
def test_wrong_rows_name_key_and_value(row, says):
    with pytest.raises(RowError, match=says) as error:
        parse(row)
    assert error.value.reason == "bad_row"
    assert "\n" not in error.value.detail and len(error.value.detail) < 400


@pytest.mark.parametrize("raw", [None, [], "text", 3])
def test_a_row_is_a_mapping(raw):
    with pytest.raises(RowError, match="a row is a mapping"):
        parse_row(raw, base="/d", location=("m", 0), occurrence=0)


@pytest.mark.parametrize(
    "key",
    [
        "video_id",
        "image_id",
        "videos_url",
        "audio_path",
        "image_2",
        "video1",
        "message",
        "ratio",
        "radio",
        "pages",
        "images_count",
    ],
)
def test_other_keys_are_kept(key):
    assert parse({key: "x"}).fields == {key: "x"}


def test_a_mistyped_conversation_key_is_named():
    with pytest.raises(RowError, match="unknown key 'conversatons'; did you mean 'conversations'"):
        parse_row({"conversatons": TALK}, base="/d", location=("m", 0), occurrence=0)


def test_a_data_url_over_the_limit_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(media_items, "MAX_INLINE_BYTES", 8)
    with pytest.raises(RowError, match=r"a data URL of \d+ bytes; the limit is 8"):
        parse({"videos": [URL64]})


@given(st.binary(max_size=300), st.booleans(), st.booleans())
def test_data_urls_of_any_bytes(data, urlsafe, padded):
    text = (base64.urlsafe_b64encode if urlsafe else base64.b64encode)(data).decode()
    text = text if padded else text.rstrip("=")
    assert media_items.decode_data_url(f"data:audio/wav;base64,{text}", "x") == data


def test_ids():
    assert parse({"id": 17}).id == "17"
    assert parse({"id": np.int64(17)}).id == "17"
    raw = {"conversations": TALK}
    ids = [parse_row(raw, base=b, location=("m", 0), occurrence=n).id for b in ("/a", "/b") for n in (0, 1, 2)]
    assert ids[:3] == ids[3:] and len(set(ids)) == 3
    assert ids[0] == f"{content_key(raw):016x}"
    assert parse_row({"conversations": TALK, "x": 1}, base="/a", location=("m", 0), occurrence=0).id != ids[0]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), json_values, max_size=4), st.randoms(use_true_random=False))
def test_content_key_ignores_the_order_of_keys(row, rng):
    shuffled = list(row.items())
    rng.shuffle(shuffled)
    assert content_key(dict(shuffled)) == content_key(row)
    assert 0 <= content_key(row) < 2**64


@given(json_values, json_values)
def test_content_key_tells_values_apart(one, other):
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (content_key({"x": one}) == content_key({"x": other})) == same


def test_content_key_is_the_hash_of_canonical_json():
    text = '{"a":"é","b":[1,2.5,null,true]}'
    assert content_key({"b": [1, 2.5, None, True], "a": "é"}) == xxhash.xxh3_64_intdigest(text.encode())


def test_content_key_of_bytes_and_arrays():
    array = np.arange(6, dtype=np.int16)
    rows = [
        {"x": DATA},
        {"x": DATA + b"\0"},
        {"x": DATA.hex()},
        {"x": array},
        {"x": array.reshape(2, 3)},
        {"x": array.astype(np.int32)},
        {"x": array + 1},
        {"x": {"y": array}},
        {"x": {"\0bytes": DATA.hex()}},
    ]
    assert len({content_key(row) for row in rows}) == len(rows)
    assert content_key({"x": bytearray(DATA)}) == content_key({"x": DATA})
    assert content_key({"x": np.float64(1.5)}) == content_key({"x": 1.5})
    assert content_key({"x": "\ud800"}) != content_key({"x": "\ud801"})


def test_content_key_is_the_same_in_another_process():
    code = "from schemas.manifest import content_key; print(content_key({'b': [1, 2.5, 'é'], 'a': b'x', 'c': None}))"
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert printed == {f"{content_key({'a': b'x', 'c': None, 'b': [1, 2.5, 'é']})}\n".encode()}


def test_content_key_refuses_what_has_no_stable_form():
    endless: dict = {}
    endless["x"] = endless
    with pytest.raises(RowError, match="cannot be hashed"):
        content_key(endless)
    with pytest.raises(RowError, match="cannot be hashed"):
        content_key({"x": 1, 3: 2})
