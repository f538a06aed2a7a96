from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.errors import ConfigError, IncompleteSourceError
from tests.train.data.loading import data_config, omni_assets, write_clips, write_text
from train.config import BatchConfig, DataConfig
from train.data.prepare import open_data
from train.data.sources import cache_folder, open_sources, row_table


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sources")
    write_clips(made / "clips", 6, per_partition=2)
    write_text(made / "text" / "chats.jsonl", 10)
    return made


def config(folder: Path, tmp_path: Path, *sources: dict[str, Any]) -> DataConfig:
    return data_config([{**source, "path": str(folder / source["path"])} for source in sources], tmp_path / "cache")


CLIPS = {"path": "clips"}
CHATS = {"path": "text", "source_name": "openai_messages", "weight": 2.0}


def test_sources_become_rows_with_lengths_shards_and_fingerprints(folder: Path, tmp_path: Path) -> None:
    told: dict[str, int] = {}

    def advance(name: str, count: int) -> None:
        told[name] = told.get(name, 0) + count

    found = open_sources(config(folder, tmp_path, CLIPS, CHATS), omni_assets(), 0, advance)
    table = row_table(found)
    assert [source.name for source in table.sources] == ["clips", "text"]
    assert table.num_rows == 16 and table.num_shards == 4
    assert table.sources[1].weight == 2.0
    assert np.array_equal(table.sources[0].tokens, found[0].lengths.total) and (table.tokens > 0).all()
    assert told == {"clips": 6, "text": 10}
    place = table.place([0, 5, 6, 15])
    assert place.source.tolist() == [0, 0, 1, 1]
    assert place.shard.tolist() == [0, 2, 3, 3]
    assert place.index.tolist() == [0, 1, 0, 9]
    with pytest.raises(IndexError, match="of 16"):
        table.place([16])


def test_the_fingerprint_follows_content_preprocessor_and_arguments(folder: Path, tmp_path: Path) -> None:
    def fingerprint(**keys: Any) -> str:
        source = {**CHATS, **keys}
        return open_sources(config(folder, tmp_path, source), omni_assets(), 0)[0].rows.fingerprint

    first = fingerprint()
    assert fingerprint(weight=1.0) == first
    assert fingerprint(source_name="plain_sft") != first
    other = write_text(tmp_path / "text" / "chats.jsonl", 9)
    moved = open_sources(data_config([{**CHATS, "path": str(other.parent)}], tmp_path / "cache"), omni_assets(), 0)
    assert moved[0].rows.fingerprint != first


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"path": "text/chats.jsonl"}, "is text, which needs source_name"),
        ({"path": "clips", "source_name": "openai_messages"}, "is packed; its rows went through a preprocessor"),
    ],
)
def test_keys_that_contradict_what_lies_there_are_refused(
    folder: Path, tmp_path: Path, source: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        open_sources(config(folder, tmp_path, source), omni_assets(), 0)


def test_a_path_without_data_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(IncompleteSourceError, match=r"there is no folder .*nowhere; a packed dataset is what"):
        open_sources(config(folder, tmp_path, {"path": "nowhere"}), omni_assets(), 0)
    (tmp_path / "raw").mkdir()
    with pytest.raises(IncompleteSourceError, match=r"raw/index\.json does not exist; `omniloom pack merge` makes it"):
        open_sources(config(folder, tmp_path, {"path": str(tmp_path / "raw")}), omni_assets(), 0)


def test_the_cache_is_the_configured_folder_or_the_user_s(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    data = config(folder, tmp_path, CLIPS)
    assert cache_folder(data) == tmp_path / "cache"
    assert cache_folder(data.model_copy(update={"cache": data.cache.model_copy(update={"dir": None})})) == (
        tmp_path / "home" / "omniloom"
    )


def test_everything_is_opened_once_and_planned(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = config(folder, tmp_path, CLIPS, CHATS)
    _, plans = open_data(data, BatchConfig(global_batch_size=2), omni_assets())
    _, again = open_data(data, BatchConfig(global_batch_size=2), omni_assets(), show=False)
    assert again.digest == plans.digest
    kept = [json.loads(path.read_text())["steps"] for path in (tmp_path / "cache" / "plans").rglob("*.json")]
    assert kept == [plans.epoch(0).steps]
