"""Generated files are current, and the JSON Schema accepts and refuses what the loader does."""

import json
from typing import Annotated

import jsonschema
import pytest
import yaml
from pydantic import BaseModel, Field

from jobs.schemas_json import FILES, REFERENCE, explain, file_model, keys_text, reference_text, schema_path, schema_text
from schemas.config_keys import REQUIRED, child_type, describe_keys, describe_type
from schemas.errors import ConfigError
from schemas.strict import check_config
from train.config import DataSourceConfig


@pytest.mark.parametrize("name", FILES)
def test_the_stored_schema_is_current(name):
    stored = schema_path(name).read_text(encoding="utf-8")
    assert stored == schema_text(name), "run: python -m jobs.schemas_json"


def test_the_stored_reference_is_current():
    assert REFERENCE.read_text(encoding="utf-8") == reference_text(), "run: python -m jobs.schemas_json"


GOOD = {"pack": {"manifest": "a.jsonl", "output": "b"}}


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("{manifest: a, output: b}", True),
        ("{manifest: [a, b], output: b, video: {fps: 3, quality: 100}}", True),
        ("{manifest: [], output: b}", False),
        ("{manifest: a}", False),
        ("{manifest: a, output: b, colour: 1}", False),
        ("{manifest: a, output: b, video: {fps: 0}}", False),
        ("{manifest: a, output: b, video: {quality: 101}}", False),
        ("{manifest: a, output: b, executor: {kind: dask}}", False),
        ("{manifest: a, output: b, executor: {workers: null}}", True),
        ("{manifest: a, output: b, rows: {max_bad_ratio: '0.5'}}", False),
    ],
)
def test_schema_and_loader_agree(text, good):
    data = {"pack": yaml.safe_load(text)}
    schema = json.loads(schema_path("pack").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    assert jsonschema.Draft202012Validator(schema).is_valid(data) == good
    if good:
        check_config(data, file_model("pack"))
    else:
        with pytest.raises(ConfigError):
            check_config(data, file_model("pack"))


@pytest.mark.parametrize("name", FILES)
def test_every_key_says_what_it_does(name):
    infos = describe_keys(file_model(name))
    assert [info.key for info in infos if not info.doc] == []
    assert len({info.key for info in infos}) == len(infos)


def test_keys_have_types_and_defaults_of_the_model():
    infos = {info.key: info for info in describe_keys(file_model("pack"))}
    assert infos["pack.output"].default is REQUIRED
    assert (infos["pack.video.fps"].default, infos["pack.video.fps"].kind) == (2.0, "a number > 0")
    assert infos["pack.executor.workers"].kind == "an integer > 0 or null"
    assert infos["pack.shard.hash"].kind == "'xxh3_64' or 'sha1' or 'sha256'"
    assert infos["pack.video.split_s"].doc.startswith("cut longer clips into spans")
    assert isinstance(infos["pack.video"].section, type) and issubclass(infos["pack.video"].section, BaseModel)


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (list[int], "a list of integers"),
        (list[list[int]], "a list of (a list of integers)"),
        (dict[str, float], "a mapping of names to numbers"),
        (Annotated[str, Field(min_length=1)], "a string with 1 or more characters"),
        (Annotated[list[str], Field(min_length=2)], "a list of strings with 2 or more entries"),
        (dict, "a mapping"),
        (list, "a list"),
        (bool | None, "true or false or null"),
        (tuple[int, int], "a list of integers"),
    ],
)
def test_types_in_words(annotation, words):
    assert describe_type(annotation) == words


def test_child_types():
    assert child_type(dict[str, int] | None, "x") is int
    assert child_type(list[str], 3) is str
    assert child_type(tuple[int, str], 1) is str
    assert child_type(int, "x") is None
    assert child_type(file_model("pack"), "pack").__name__ == "PackConfig"


def test_explain():
    assert explain("pack.audio.sample_rate").split("\n") == [
        "pack.audio.sample_rate",
        "  type     an integer > 0",
        "  default  16000",
        "  meaning  in Hz",
    ]
    section = explain("pack.shard")
    assert "pack.shard: a section" in section and "pack.shard.size_mb" in section and "pack.video" not in section
    for wrong, near in (
        ("pack.video.fsp", "pack.video.fps"),
        ("fsp", "pack.video.fps"),
        ("video.fps", "pack.video.fps"),
    ):
        with pytest.raises(ConfigError, match=f"unknown key '{wrong}'; did you mean '{near}'"):
            explain(wrong)
    assert "pack.output" in keys_text() and "required" in keys_text()


def test_keys_of_the_entries_of_a_list():
    infos = {info.key: info for info in describe_keys(file_model("train"))}
    assert infos["data.sources"].section is None and infos["data.sources.N"].section is DataSourceConfig
    for key in ("data.sources.N", "train.evaluation.sources.N"):
        assert {f"{key}.{name}" for name in DataSourceConfig.model_fields} <= infos.keys()
        assert f"## `{key}`" in reference_text() and f"| `{key}.weight` | a number > 0 |" in reference_text()
    assert explain("data.sources.0.weight") == explain("data.sources.N.weight")
    assert "how often each row is used" in explain("train.evaluation.sources.12.weight")
    assert "data.sources.N.rollouts" in explain("data.sources.0")
    with pytest.raises(ConfigError, match=r"did you mean 'data\.sources\.N\.weight'"):
        explain("data.sources.0.weighting")
    properties = json.loads(schema_text("train"))["$defs"]["DataSourceConfig"]["properties"]
    assert properties["weight"]["description"] == infos["data.sources.N.weight"].doc


def test_every_list_of_mappings_says_its_keys():
    for name in FILES:
        keys = {info.key: info for info in describe_keys(file_model(name))}
        lists = [key for key, info in keys.items() if "list of mappings" in info.kind]
        assert [key for key in lists if f"{key}.N" not in keys] == []
        assert lists or name != "train"


def test_unknown_files():
    with pytest.raises(ConfigError, match="no configuration file is called 'pak'; did you mean 'pack'"):
        schema_text("pak")
