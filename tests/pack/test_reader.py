"""The reader against streaming's own, extraction to files, and the check of one clock."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from pack.clock import check_sample
from pack.extract import extract, safe_name, write_sample
from pack.merge import merge
from pack.partition import write_partition
from pack.plan_file import load_plan
from pack.reader import PackedDataset, parse_index
from pack.storage import LocalStorage
from schemas.conversation import to_sharegpt
from schemas.errors import ConfigError, IncompleteSourceError, SchemaError
from schemas.sample import PackedSample
from tests.pack.job_fakes import MEDIA, job_config, row, tasks_of, write_clips, write_manifest


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    """Six rows in two partitions: a split clip, several media, no media, an id that is no file name."""
    folder = tmp_path_factory.mktemp("reader")
    write_clips(folder, 6, 0.5)
    (folder / "long.txt").write_text("2.5")
    rows = [
        row(0),
        {"id": "long", "videos": ["long.txt"], "conversations": "q"},
        {"id": "a/b c", "videos": ["1.txt", "2.txt"], "conversations": "two"},
        {"id": "text", "conversations": "no media"},
        row(4),
    ]
    config = job_config(
        write_manifest(folder / "m.jsonl", rows), folder / "out", video={"split_s": 1.0}, shard={"size_mb": 0.13}
    )
    for task in tasks_of(config):
        write_partition(task, MEDIA)
    storage = LocalStorage(folder / "out")
    merge(storage, load_plan(storage))
    return PackedDataset(str(folder / "out"))


IDS = ["r0", "long#000", "long#001", "long#002", "a/b c", "text", "r4"]


def test_places_ids_and_metas_agree(dataset: PackedDataset) -> None:
    assert len(dataset.shards) > 2
    assert [s.meta.id for s in dataset] == IDS
    assert [dataset.sample_id(i) for i in range(len(dataset))] == IDS
    assert list(dataset.metas()) == [s.meta for s in dataset]
    assert dataset[-1] == dataset[len(IDS) - 1]
    places = [dataset.locate(i) for i in range(len(dataset))]
    assert [p for _, p in places] == [k for s in dataset.shards for k in range(s.samples)]
    with pytest.raises(IndexError):
        dataset[len(IDS)]


def test_what_is_no_dataset_says_so(tmp_path: Path) -> None:
    with pytest.raises(IncompleteSourceError, match="not merged yet"):
        PackedDataset(str(tmp_path))
    with pytest.raises(SchemaError, match="no index of MDS shards"):
        parse_index(b'{"shards": [{"format": "mds"}]}', "", "index.json")


def test_extracted_files_are_the_sample(dataset: PackedDataset, tmp_path: Path) -> None:
    assert extract(dataset, tmp_path) == len(IDS)
    folder = tmp_path / "long#001"
    sample = dataset[2]
    frames = sorted((folder / "video0").iterdir())
    assert [p.name for p in frames] == ["00000_0.000.jpg", "00001_0.500.jpg"]
    assert [p.read_bytes() for p in frames] == sample.videos[0].frames
    assert (folder / "video0.wav").read_bytes() == sample.videos[0].audio
    record = json.loads((folder / "sample.json").read_text())
    assert record["id"] == "long#001"
    assert record["conversations"] == to_sharegpt(sample.meta.conversation)
    two = tmp_path / safe_name("a/b c")
    assert json.loads((two / "sample.json").read_text())["id"] == "a/b c"
    assert {p.name for p in two.iterdir()} == {"video0", "video0.wav", "video1", "video1.wav", "sample.json"}
    assert {p.name for p in (tmp_path / "text").iterdir()} == {"sample.json"}


def test_extracting_by_id(dataset: PackedDataset, tmp_path: Path) -> None:
    assert extract(dataset, tmp_path / "one", ["r4"]) == 1
    assert extract(dataset, tmp_path / "row", ["long"]) == 3
    with pytest.raises(ConfigError, match="no sample with the id 'nope'"):
        extract(dataset, tmp_path / "none", ["r4", "nope"])


@given(st.text(min_size=1), st.text(min_size=1))
def test_safe_names_are_safe_and_different(a: str, b: str) -> None:
    name = safe_name(a)
    assert "/" not in name
    assert "\0" not in name
    assert name not in (".", "..")
    assert 0 < len(name.encode("utf-8", "surrogatepass")) < 255
    assert (name == safe_name(b)) == (a == b)


def _wav(samples: int, rate: int) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, [0.0] * samples, rate, format="WAV", subtype="PCM_16")
    return file.getvalue()


def _with_video(sample: PackedSample, **changes: Any) -> PackedSample:
    video = sample.meta.videos[0].model_copy(update=changes)
    return replace(sample, meta=sample.meta.model_copy(update={"videos": [video]}))


def _with_sound(sample: PackedSample, **changes: Any) -> PackedSample:
    return _with_video(sample, audio=sample.meta.videos[0].audio.model_copy(update=changes))


def _blob(sample: PackedSample, **changes: Any) -> PackedSample:
    return replace(sample, videos=[replace(sample.videos[0], **changes)])


def test_a_whole_sample_passes(dataset: PackedDataset, tmp_path: Path) -> None:
    for sample in dataset:
        check_sample(sample)
    assert write_sample(dataset[0], tmp_path).name == "r0"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: _with_video(s, frame_times_s=[0.0, 0.6]), "frame 1 is at 0.6 s; at 2.0 Hz it is 0.5 s"),
        (lambda s: _with_video(s, frame_times_s=[0.25, 0.75]), "frame 0 is at 0.25"),
        (lambda s: _with_video(s, frame_times_s=[0.5, 0.0], sampling="qwen"), "frame_times_s do not rise"),
        (lambda s: _with_video(s, shown_times_s=[0.5, 0.0]), "shown_times_s do not rise"),
        (lambda s: _with_video(s, duration_s=0.3), "its picture ends at 0.3"),
        (lambda s: _with_video(s, width=32), "24x16 pixels, the meta says 32x16"),
        (lambda s: _with_sound(s, duration_s=1.1), "16000 samples at 16000 Hz are not 1.1 s"),
        (lambda s: _with_sound(s, sample_rate=8000, duration_s=2.0), "its header says"),
        (lambda s: _blob(s, audio=_wav(15999, 16000)), "its header says"),
        (lambda s: _blob(s, audio=b"RIFFnonsense"), "no readable wav"),
        (lambda s: _blob(s, frames=[s.videos[0].frames[0], b"\xff\xd8nonsense"]), "frame 1 is no readable JPEG"),
    ],
)
def test_what_is_off_the_clock_is_found(
    dataset: PackedDataset, change: Callable[[PackedSample], PackedSample], said: str
) -> None:
    with pytest.raises(SchemaError, match=said):
        check_sample(change(dataset[2]))
