"""Packed samples: framing, columns both ways, and everything damaged or foreign is refused."""

import json
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from streaming.base.format.mds.encodings import mds_decode, mds_encode

from schemas import sample as sample_module
from schemas.errors import SchemaError
from schemas.sample import (
    COLUMNS,
    AudioMeta,
    ImageMeta,
    Origin,
    PackedSample,
    PackedVideo,
    Provenance,
    SampleMeta,
    VideoMeta,
    frame_blobs,
    from_columns,
    media_blobs,
    parse_meta,
    to_columns,
    unframe_blobs,
)

blob = st.binary(min_size=0, max_size=40)


def audio_meta(samples=160):
    return AudioMeta(
        codec="wav", sample_rate=16000, num_samples=samples, duration_s=samples / 16000, origin=Origin(uri="a")
    )


def video_meta(frames, sound):
    times = [k / 2 for k in range(frames)]
    return VideoMeta(
        num_frames=frames,
        width=64,
        height=32,
        codec="jpeg",
        video_fps=2.0,
        frame_times_s=times,
        shown_times_s=times,
        duration_s=frames / 2,
        sampling="time_grid",
        flags=["vfr"],
        gaps_s=[(0.5, 1.0)],
        origin=Origin(uri="v.mp4", span_s=(1.0, 2.5)),
        audio=audio_meta() if sound else None,
    )


def make(videos=((b"f0", b"f1"),), sounds=(b"wav",), audios=(b"a",), images=(b"i",), **changes):
    packed = [PackedVideo(list(frames), sound) for frames, sound in zip(videos, sounds, strict=True)]
    media = frame_blobs(media_blobs(packed, audios, images))
    parts = [("video", None)] * len(packed) + [("audio", None)] * len(audios) + [("image", None)] * len(images)
    meta = SampleMeta(
        **{
            "id": "row1",
            "source": "clips",
            "conversation": [["user", *parts, ("text", "Who?")], ["assistant", ("text", "A cat.")]],
            "videos": [
                video_meta(len(frames), sound is not None) for frames, sound in zip(videos, sounds, strict=True)
            ],
            "audios": [audio_meta() for _ in audios],
            "images": [ImageMeta(width=4, height=2, codec="png", origin=Origin(uri="i")) for _ in images],
            "extra": {"choices": ["a", "b"], "answer": "A", "score": 0.5, "none": None},
            "provenance": Provenance(manifest="m.jsonl", row=3, preprocessor="p", versions={"av": "18.1"}),
            "media_bytes": len(media),
            "media_crc32": zlib.crc32(media),
            **changes,
        }
    )
    return PackedSample(meta, packed, list(audios), list(images))


@given(st.lists(blob, max_size=8))
def test_framing_is_what_the_docstring_says(blobs):
    media = frame_blobs(blobs)
    words = [len(blobs), *map(len, blobs)]
    assert media == b"".join(word.to_bytes(4, "little") for word in words) + b"".join(blobs)
    assert unframe_blobs(media) == blobs


@given(st.lists(blob, max_size=5), st.binary(min_size=1, max_size=9))
def test_framing_refuses_bytes_left_over_or_missing(blobs, more):
    media = frame_blobs(blobs)
    with pytest.raises(SchemaError, match="adds up to"):
        unframe_blobs(media + more)
    for end in range(len(media)):
        with pytest.raises(SchemaError):
            unframe_blobs(media[:end])


@given(st.binary(max_size=60))
def test_framing_of_garbage_is_refused_or_consistent(garbage):
    try:
        blobs = unframe_blobs(garbage)
    except SchemaError:
        return
    assert frame_blobs(blobs) == garbage


def test_framing_does_not_trust_a_huge_count():
    with pytest.raises(SchemaError, match="cannot list 4294967295 blobs"):
        unframe_blobs(struct.pack("<I", 2**32 - 1) + b"x" * 100)


def test_a_sample_that_no_shard_can_hold(monkeypatch):
    monkeypatch.setattr(sample_module, "MAX_MEDIA_BYTES", 20)
    assert len(frame_blobs([b"x" * 12])) == 20
    with pytest.raises(SchemaError, match="media of 21 bytes; a sample holds at most 20"):
        frame_blobs([b"x" * 13])


videos_and_sounds = st.lists(st.tuples(st.lists(blob, min_size=1, max_size=3), st.none() | blob), max_size=3)


@given(videos_and_sounds, st.lists(blob, max_size=2), st.lists(blob, max_size=2))
def test_columns_both_ways(clips, audios, images):
    sample = make([c[0] for c in clips], [c[1] for c in clips], audios, images)
    columns = to_columns(sample)
    assert columns.keys() == COLUMNS.keys()
    stored = {k: mds_decode(kind, mds_encode(kind, columns[k])) for k, kind in COLUMNS.items()}  # as MDS stores them
    assert from_columns(stored) == sample
    assert to_columns(from_columns(stored)) == columns


def test_order_of_the_media():
    sample = make([(b"a0", b"a1"), (b"b0",)], [b"as", None], [b"x", b"y"], [b"i"])
    assert unframe_blobs(to_columns(sample)["media"]) == [b"a0", b"a1", b"as", b"b0", b"x", b"y", b"i"]


def test_the_offline_av_form():
    assert make([(b"a0", b"a1"), (b"b0",)], [b"as", None], [b"x"], [b"i"]).as_offline_av() == {
        "videos": [
            {"frames": [b"a0", b"a1"], "audio": b"as", "video_fps": 2.0, "audio_fps": 16000},
            {"frames": [b"b0"], "audio": None, "video_fps": 2.0, "audio_fps": 0},
        ],
        "audios": [b"x"],
        "images": [b"i"],
        "conversations": [
            ["user", ("video", None), ("video", None), ("audio", None), ("image", None), ("text", "Who?")],
            ["assistant", ("text", "A cat.")],
        ],
    }


@given(st.data())
def test_a_flipped_bit_in_the_media_is_found(data):
    columns = to_columns(make())
    media = bytearray(columns["media"])
    bit = data.draw(st.integers(0, len(media) * 8 - 1))
    media[bit // 8] ^= 1 << bit % 8
    with pytest.raises(SchemaError):
        from_columns({**columns, "media": bytes(media)})


def reframed(columns, blobs):
    media = frame_blobs(blobs)
    meta = {**columns["meta"], "media_bytes": len(media), "media_crc32": zlib.crc32(media)}
    return {**columns, "media": media, "meta": meta}


def test_blobs_that_the_meta_does_not_describe():
    columns = to_columns(make())
    blobs = unframe_blobs(columns["media"])
    with pytest.raises(SchemaError, match="sample row1: 4 blobs are fewer than its meta describes"):
        from_columns(reframed(columns, blobs[:-1]))
    with pytest.raises(SchemaError, match="sample row1: 2 blobs more than its meta describes"):
        from_columns(reframed(columns, [*blobs, b"", b"x"]))


def change(columns, path, value):
    meta = json.loads(json.dumps(columns["meta"]))
    node = meta
    for key in path[:-1]:
        node = node[key]
    if value is KeyError:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return {**columns, "meta": meta}


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (["id"], "other", "id or source differ"),
        (["source"], "other", "id or source differ"),
        (["id"], KeyError, "id: Field required"),
        (["colour"], 1, "colour: Extra inputs"),
        (["version"], 2, "has shard version 2; this omniloom reads 1"),
        (["version"], "1", "has shard version 1; this"),
        (["media_bytes"], "12", "media_bytes: Input should be a valid integer"),
        (["media_crc32"], 1.0, "media_crc32: Input should be a valid integer"),
        (["conversation", 0, 0], "human", "conversation: .*turn 0 is"),
        (["conversation", 0, 1], ["video", "x"], "payload of video is None"),
        (["conversation", 0, 1], ["audio", None], "has 0 <video> and the row has 1 video"),
        (["conversation"], "x", "conversation: .*turns are a list"),
        (["videos", 0, "num_frames"], 3, "3 frames, 2 frame times"),
        (["videos", 0, "frame_times_s", 0], "0", "videos.0.frame_times_s.0: Input should be a valid number"),
        (["videos", 0, "frame_times_s", 0], float("nan"), "finite number"),
        (["videos", 0, "codec"], "webp", "videos.0.codec"),
        (["videos", 0, "width"], 0, "greater than 0"),
        (["videos", 0, "flags"], ["odd"], r"unknown flags \['odd'\]; known: truncated"),
        (["videos", 0, "gaps_s", 0], [1.0], "gaps_s.0"),
        (["videos", 0, "gaps_s", 0], [1.0, "2"], "gaps_s.0.1: Input should be a valid number"),
        (["videos", 0, "origin", "span_s"], [1.0, 2.0, 3.0], "span_s"),
        (["videos", 0, "audio", "rate"], 3, "audio.rate: Extra inputs"),
        (["audios", 0, "sample_rate"], True, "sample_rate"),
        (["images", 0, "origin"], KeyError, "images.0.origin: Field required"),
        (["extra"], [], "extra: Input should be a valid dictionary"),
        (["extra", "score"], float("inf"), "extra.score: .*not finite"),
        (["extra", "deep"], {"a": [1, float("nan")]}, "extra.deep: .*not finite"),
        (["provenance", "row"], "3", "provenance.row"),
    ],
)
def test_a_meta_that_is_not_exactly_one(path, value, says):
    with pytest.raises(SchemaError, match=says) as error:
        from_columns(change(to_columns(make()), path, value))
    assert "row1" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"media": "text"}, "columns of a wrong type: {'media': 'str'}"),
        ({"meta": "{}"}, "columns of a wrong type: {'meta': 'str'}"),
        ({"id": 3}, "columns of a wrong type: {'id': 'int'}"),
        ({"more": 1}, r"columns \['id', 'media', 'meta', 'more', 'source'\]; a sample has exactly"),
    ],
)
def test_columns_are_exactly_the_declared_ones(changes, says):
    with pytest.raises(SchemaError, match=says):
        from_columns({**to_columns(make()), **changes})
    columns = to_columns(make())
    del columns["source"]
    with pytest.raises(SchemaError, match=r"columns \['id', 'media', 'meta'\]"):
        from_columns(columns)


def test_parse_meta_does_not_read_the_media():
    sample = make()
    assert parse_meta({**to_columns(sample), "media": b""}) == sample.meta


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"videos": []}, "0 videos and 1 descriptors"),
        ({"audios": [b"a", b"b"]}, "2 audios and 1 descriptors"),
        ({"images": []}, "0 images and 1 descriptors"),
        ({"videos": [PackedVideo([b"f0"], b"wav")]}, "video 0 has 1 frames"),
        ({"videos": [PackedVideo([b"f0", b"f1"], None)]}, "video 0 has 2 frames, its meta says otherwise"),
        ({"audios": [b"z"]}, "meta has another size or crc than its media"),
        ({"images": ["text"]}, "media are bytes, not str"),
        ({"videos": [PackedVideo([b"f0", None], b"wav")]}, "media are bytes, not NoneType"),
    ],
)
def test_to_columns_refuses_a_meta_of_other_media(changes, says):
    good = make()
    with pytest.raises(SchemaError, match=says):
        to_columns(PackedSample(**{**good.__dict__, **changes}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"id": ""}, "at least 1 character"),
        ({"id": 3}, "valid string"),
        ({"conversation": [["user", ("text", "x")]]}, "has 0 <video>"),
        ({"extra": {"x": {1, 2}}}, "extra"),
        ({"extra": {"x": float("nan")}}, "not finite"),
        ({"version": 2}, "version"),
    ],
)
def test_a_meta_is_checked_when_it_is_made(changes, says):
    with pytest.raises(ValidationError, match=says):
        make(**changes)


def test_metas_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        make().meta.id = "other"
