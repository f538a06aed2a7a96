"""Lengths against the layouts themselves, and their cache."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from schemas.errors import IncompleteSourceError, RegistryError, SchemaError
from schemas.sample import PackedSample
from tests.train.data import hub
from tests.train.data.dataset import write_dataset
from tests.train.data.mixes import Mix, random_mix
from tests.train.data.packed import packed_sample
from train.data import lengths as under_test
from train.data.lengths import load_lengths, load_text_lengths
from train.data.processor import ProcessorAssets, load_assets
from train.data.text_files import scan_text
from train.data.text_rows import TextRows
from train.data.transform import SampleTransform, decode_unit


@pytest.fixture(scope="module")
def assets() -> ProcessorAssets:
    return hub.small_pictures(load_assets(hub.TOKENIZER))


@pytest.fixture(scope="module")
def samples() -> list[PackedSample]:
    return [random_mix(seed, one_rate=False).sample(f"row{seed}") for seed in range(13)]


@pytest.fixture
def dataset(tmp_path: Path, samples: list[PackedSample]) -> Path:
    return write_dataset(tmp_path / "packed", samples)


def _say_nothing(text: str) -> PackedSample:
    return packed_sample([["user", ("text", text)]])


def test_lengths_are_those_of_the_samples_in_the_order_of_the_index(
    dataset: Path, samples: list[PackedSample], assets: ProcessorAssets
) -> None:
    done: list[int] = []
    found = load_lengths(str(dataset), assets, advance=done.append)
    made = [SampleTransform(assets).packed(sample, "made") for sample in samples]
    assert sum(done) == len(found) == len(samples)
    assert found.total.tolist() == [len(sample) for sample in made]
    for name in ("text", "video", "audio", "image"):
        assert getattr(found, name).tolist() == [getattr(sample, f"num_{name}") for sample in made]
    assert found.labels.tolist() == [sample.num_label_tokens for sample in made]
    grids = [[unit.grid for unit in sample.media if unit.grid] for sample in made]
    assert found.patches.tolist() == [sum(t * h * w for t, h, w in row) for row in grids]
    assert found.patch_pairs.tolist() == [sum(t * (h * w) ** 2 for t, h, w in row) for row in grids]
    assert found.mel.tolist() == [sum(unit.num_mel for unit in sample.media) for sample in made]
    assert found.total.dtype == np.int32
    assert found.faults == ()


def test_a_second_run_reads_the_cache_and_opens_no_rows_table(dataset: Path, assets: ProcessorAssets) -> None:
    first = load_lengths(str(dataset), assets)
    assert len(list((dataset / "lengths").iterdir())) == 1
    for table in dataset.rglob("rows.parquet"):
        table.unlink()
    second = load_lengths(str(dataset), assets)
    assert all(np.array_equal(getattr(first, name), getattr(second, name)) for name in under_test.COLUMNS)
    with pytest.raises(IncompleteSourceError, match=r"rows\.parquet does not exist"):
        load_lengths(str(dataset), replace(assets, fingerprint="another"))


def test_another_processor_or_other_rows_are_counted_anew(
    dataset: Path, samples: list[PackedSample], assets: ProcessorAssets, tmp_path: Path
) -> None:
    pictures_only = hub.small_pictures(load_assets(hub.TOKENIZER, use_audio_in_video=False))
    assert pictures_only.fingerprint != assets.fingerprint
    both, one = load_lengths(str(dataset), assets), load_lengths(str(dataset), pictures_only)
    assert one.audio.sum() < both.audio.sum()
    assert np.array_equal(one.video, both.video)
    write_dataset(tmp_path / "grown", [*samples, _say_nothing("more")])
    grown = load_lengths(str(tmp_path / "grown"), assets, cache=str(dataset / "lengths"))
    assert grown.total[:-1].tolist() == both.total.tolist()
    assert grown.without_labels == 1


def test_a_damaged_cache_is_made_again_and_it_is_said(
    dataset: Path, assets: ProcessorAssets, caplog: pytest.LogCaptureFixture
) -> None:
    first = load_lengths(str(dataset), assets)
    (cache,) = (dataset / "lengths").iterdir()
    cache.write_bytes(cache.read_bytes()[:-200])
    with caplog.at_level(logging.WARNING, "omniloom.train"):
        assert load_lengths(str(dataset), assets).total.tolist() == first.total.tolist()
    assert "damaged" in caplog.text
    assert [file.name for file in (dataset / "lengths").iterdir()] == [cache.name]


def test_a_dataset_that_cannot_be_written_is_cached_for_the_user(
    dataset: Path, assets: ProcessorAssets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (dataset / "lengths").write_text("a file where the folder would be")
    first = load_lengths(str(dataset), assets)
    assert len(list((tmp_path / "home" / "omniloom" / "lengths").iterdir())) == 1
    for table in dataset.rglob("rows.parquet"):
        table.unlink()
    assert load_lengths(str(dataset), assets).total.tolist() == first.total.tolist()


def test_worker_processes_give_the_same(
    dataset: Path, assets: ProcessorAssets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = load_lengths(str(dataset), assets, workers=1, cache=str(tmp_path / "one"))
    monkeypatch.setattr(under_test, "SERIAL_ROWS", 0)
    shared = load_lengths(str(dataset), assets, workers=2, cache=str(tmp_path / "two"))
    assert shared.total.tolist() == alone.total.tolist()
    assert shared.labels.tolist() == alone.labels.tolist()


def test_rows_that_the_model_cannot_take_are_named(tmp_path: Path, assets: ProcessorAssets) -> None:
    turns = [["user", ("audio", None)], ["assistant", ("text", "Yes")]]
    good = Mix(turns=turns, sounds=[np.zeros(16000, np.int16)]).sample("good")
    sound = good.meta.audios[0].model_copy(update={"sample_rate": 24000})
    meta = good.meta.model_copy(update={"id": "fast", "audios": [sound]})
    folder = write_dataset(tmp_path / "packed", [good, replace(good, meta=meta)])
    found = load_lengths(str(folder), assets)
    assert found.total[0] > 0 and found.total[1] == 0
    ((row, why),) = found.faults
    assert row == 1 and "fast" in why and "24000 Hz" in why and "audio.sample_rate: 16000" in why
    assert load_lengths(str(folder), assets).faults == found.faults  # also from the cache


def test_what_is_missing_or_damaged_is_named(tmp_path: Path, dataset: Path, assets: ProcessorAssets) -> None:
    with pytest.raises(IncompleteSourceError, match=r"index\.json does not exist"):
        load_lengths(str(tmp_path), assets)
    table = sorted(dataset.rglob("rows.parquet"))[1]
    table.write_bytes(sorted(dataset.rglob("rows.parquet"))[3].read_bytes())
    with pytest.raises(SchemaError, match=r"00001/rows\.parquet has 1 rows; the index counts 4"):
        load_lengths(str(dataset), assets)
    table.write_bytes(b"no parquet")
    with pytest.raises(SchemaError, match=r"00001/rows\.parquet"):
        load_lengths(str(dataset), assets)


def _write_lines(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_text_rows_take_what_their_layout_takes(tmp_path: Path, assets: ProcessorAssets) -> None:
    messages = [{"role": "user", "content": "Say hi."}, {"role": "assistant", "content": "Hi there."}]
    rows: list[object] = [{"messages": messages}, {"messages": messages, "images": ["a.jpg"]}, ["no object"]]
    files = scan_text(str(_write_lines(tmp_path / "a.jsonl", rows)))
    text = TextRows("openai_messages")
    found = load_text_lengths(files, text, assets, cache=str(tmp_path / "cache"))
    key, turns = text.turns(rows[0], "a.jsonl", 0)
    sample = SampleTransform(assets).text(turns, "chat", key)
    assert found.total.tolist() == [len(sample), 0, 0]
    assert found.labels[0] == sample.num_label_tokens == len(assets.encode("Hi there.")) + 1
    assert [row for row, _ in found.faults] == [1, 2]
    assert "must be packed" in found.faults[0][1]
    again = load_text_lengths(files, text, assets, cache=str(tmp_path / "cache"))
    assert again.faults == found.faults
    with pytest.raises(RegistryError, match="openai_messages"):
        load_text_lengths(files, TextRows("openai_mesages"), assets, cache=str(tmp_path / "cache"))


def test_equal_text_rows_have_ids_of_their_own() -> None:
    text = TextRows("openai_messages")
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    keys = {text.turns(row, "a.jsonl", number)[0] for number in range(3)}
    assert len(keys) == 3
    assert text.turns(row | {"id": "mine"}, "a.jsonl", 7)[0] == "mine"


def test_dead_units_keep_their_geometry(samples: list[PackedSample], assets: ProcessorAssets) -> None:
    for sample in samples:
        for unit in SampleTransform(assets).packed(sample, "made").media:
            alive, dead = decode_unit(unit), decode_unit(replace(unit, blobs=()))
            assert dead.values is not None and alive.values is not None
            assert not dead.values.any()
            assert dead.grid == alive.grid and np.array_equal(dead.rows, alive.rows)
            assert dead.values.shape[1:] == alive.values.shape[1:]
