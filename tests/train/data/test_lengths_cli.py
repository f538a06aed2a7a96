"""`omniloom train lengths` counts once, for training, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.cli import main
from schemas.registry import PREPROCESSOR_REGISTRY
from tests.train.data.loading import TOKENIZER, data_config, omni_assets, write_clips, write_text
from train.config import BatchConfig
from train.data import lengths as under_test
from train.data.prepare import open_data
from train.data.text_rows import TextRows

TINY = TOKENIZER.parent / "tiny_qwen3_omni"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    write_clips(tmp_path / "clips", 4)
    write_text(tmp_path / "text.jsonl", 20)
    return tmp_path


def _count(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["train", "lengths", *map(str, words)])
    return int(ended.value.code or 0)


def _open_without_counting(folder: Path, monkeypatch: pytest.MonkeyPatch, **cache: Any) -> list[int]:
    """Rows of both sources; fails when one is counted again."""
    monkeypatch.setattr(under_test, "_computed", lambda *_: pytest.fail("counted again"))
    sources = [{"path": str(folder / "clips")}, {"path": str(folder / "text.jsonl"), "source_name": "openai_messages"}]
    data = data_config(sources, folder / "unused").model_copy(update={"cache": data_cache(**cache)})
    opened, _ = open_data(data, BatchConfig(global_batch_size=2), omni_assets(), show=False)
    return [len(source.lengths) for source in opened]


def data_cache(**cache: Any) -> Any:
    return data_config([{"path": "x"}], Path("y"), cache=cache).cache


@pytest.mark.parametrize("own", [False, True])
def test_training_finds_what_was_counted(folder: Path, monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    assert _count(folder / "clips", "--processor", TOKENIZER) == 0
    assert _count(folder / "text.jsonl", "--source-name", "openai_messages", "--processor", TOKENIZER) == 0
    assert _open_without_counting(folder, monkeypatch, **({"dir": str(folder / "own")} if own else {})) == [4, 20]


def test_a_configuration_counts_all_of_its_sources(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sources = [{"path": str(folder / "clips")}, {"path": str(folder / "text.jsonl"), "source_name": "openai_messages"}]
    config = {
        "model": {"config_path": str(TINY)},
        "data": {"sources": sources, "processor_path": str(TOKENIZER), "cache": {"dir": str(folder / "own")}},
    }
    (folder / "c.yaml").write_text(json.dumps(config))
    assert _count(folder / "c.yaml", "--json", "data.max_seq_len=30") == 0
    reports = json.loads(capfd.readouterr().out)
    assert {name: report["rows"] for name, report in reports.items()} == {"clips": 4, "text.jsonl": 20}
    assert reports["clips"]["over_max_seq_len"] > 0
    assert _open_without_counting(folder, monkeypatch, dir=str(folder / "own")) == [4, 20]


def test_mistakes_are_named(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _count(folder / "clips") == 2 and "--processor is missing" in capfd.readouterr().err
    assert _count(folder / "clips", "--processor", TOKENIZER, "--sourc-name", "x") == 2
    assert "'--sourc-name' is no option" in capfd.readouterr().err
    words = ("--source-name", "openai_messages", "--source-arg", "x", "--processor", TOKENIZER)
    assert _count(folder / "text.jsonl", *words) == 2 and "write KEY=VALUE" in capfd.readouterr().err


def test_the_seed_counts_only_where_chance_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_chance(conversations: Any, rng: Any = None, **_: Any) -> Any:
        return rng.choice(conversations)

    def handing_on(conversations: Any, **given: Any) -> Any:
        return with_chance(conversations, **given)

    def without(conversations: Any, **_: Any) -> Any:
        return conversations

    made = {"with_chance": with_chance, "handing_on": handing_on, "without": without}
    monkeypatch.setattr(type(PREPROCESSOR_REGISTRY), "__getitem__", lambda self, name: made[name])
    monkeypatch.setattr(type(PREPROCESSOR_REGISTRY), "__contains__", lambda self, name: name in made)
    prints = {name: {TextRows(name, seed=seed).fingerprint for seed in (0, 42)} for name in made}
    assert {name: len(found) for name, found in prints.items()} == {"with_chance": 2, "handing_on": 2, "without": 1}
