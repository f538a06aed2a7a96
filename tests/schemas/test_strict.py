"""YAML and overrides -> model: every fault at once, with its place, key, allowed values and the nearest name."""

import pickle
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from pack.config import PackFile
from schemas.errors import ConfigError
from schemas.strict import check_config, dump_config, load_config, split_overrides


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Optimizer(Strict):
    kind: Literal["adamw", "muon"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 1e-5
    betas: list[float] = [0.9, 0.95]


class Source(Strict):
    path: str
    weight: float = 1.0


class Train(Strict):
    output: str
    steps: int | None = None
    resume: bool = False
    sources: Annotated[list[Source], Field(min_length=1)] = [Source(path="x")]
    paths: str | list[str] = "a"
    args: dict[str, int | str] = {}
    optimizer: Optimizer = Optimizer()
    low: int = 0
    high: int = 1

    @model_validator(mode="after")
    def _ordered(self):
        if self.low > self.high:
            raise ValueError(f"low {self.low} is over high {self.high}")
        return self


class File(Strict):
    train: Train


def write(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return path


def faults(path, *overrides, model=File):
    with pytest.raises(ConfigError) as error:
        load_config(path, list(overrides), model)
    assert error.value.exit_code == 2
    return [line.replace(f"{path}:", "") for line in str(error.value).split("\n")]


def test_a_good_file_with_every_form_of_override(tmp_path):
    path = write(tmp_path, "train:\n  output: out\n  sources: [{path: a}, {path: b}]\n")
    overrides = ["train.steps=5", "--train.optimizer.lr", "1e-3", "--train.resume=true", "train.sources.1.weight=2"]
    train = load_config(path, overrides, File).train
    assert (train.output, train.steps, train.resume, train.optimizer.lr) == ("out", 5, True, 1e-3)
    assert [(s.path, s.weight) for s in train.sources] == [("a", 1.0), ("b", 2.0)]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.output=2024", {"output": "2024"}),
        ("train.output=on", {"output": "on"}),
        ("train.output=null", {"output": "null"}),
        ("train.output='2024'", {"output": "2024"}),
        ("train.output=a # b", {"output": "a # b"}),
        ("train.output=s3://b/k", {"output": "s3://b/k"}),
        ("train.output=a: b", {"output": "a: b"}),
        ("train.output=x=y", {"output": "x=y"}),
        ("train.steps=null", {"steps": None}),
        ("train.paths=[a, b]", {"paths": ["a", "b"]}),
        ("train.paths=7", {"paths": "7"}),
        ("train.args.n=7", {"args": {"n": 7}}),
        ("train.args={n: x}", {"args": {"n": "x"}}),
        ("train.optimizer={kind: muon}", {"optimizer": Optimizer(kind="muon")}),
        ("train.optimizer.betas=[0.5, 1]", {"optimizer": Optimizer(betas=[0.5, 1.0])}),
    ],
)
def test_values_of_overrides(tmp_path, override, expected):
    train = load_config(write(tmp_path, "train: {output: out}"), [override], File).train
    assert {key: getattr(train, key) for key in expected} == expected


def test_all_faults_at_once_one_line_each(tmp_path):
    text = """\
train:
  oputput: x
  steps: "5"
  resume: yes
  sources: [{path: 1, weigt: 2}]
  paths: [a, 3]
  args: {n: [1]}
  optimizer: {kind: adam, lr: 0, betas: 0.9}
  low: 1.0
  kind: muon
"""
    assert faults(write(tmp_path, text)) == [
        "2:3: train.output: missing; it is a string",
        "2:3: train.oputput: unknown key; did you mean 'output'? known: output, steps, resume, sources, paths, args, "
        "optimizer, low, high",
        "3:10: train.steps: is '5' (string); it must be an integer or null",
        "4:11: train.resume: is 'yes' (string); it must be true or false",
        "5:20: train.sources.0.path: is 1 (integer); it must be a string",
        "5:23: train.sources.0.weigt: unknown key; did you mean 'weight'? known: path, weight",
        "6:14: train.paths.1: is 3 (integer); it must be a string",
        "7:13: train.args.n: is a list of 1; it must be an integer or a string",
        "8:21: train.optimizer.kind: is 'adam' (string); it must be 'adamw' or 'muon'; did you mean 'adamw'?",
        "8:31: train.optimizer.lr: is 0 (integer); it must be a number > 0",
        "8:41: train.optimizer.betas: is 0.9 (number); it must be a list of numbers",
        "9:8: train.low: is 1.0 (number); it must be an integer",
        "10:3: train.kind: unknown key; did you mean 'train.optimizer.kind'? known: output, steps, resume, sources, "
        "paths, args, optimizer, low, high",
    ]


def test_an_override_without_its_section_is_answered_with_the_whole_key(tmp_path):
    path = write(tmp_path, "train: {output: out}")
    assert faults(path, "optimizer.lr=1") == [
        "override optimizer.lr=1: optimizer.lr: unknown key; did you mean 'train.optimizer.lr'?"
    ]
    assert "did you mean 'train'?" in faults(path, "trainn.steps=1")[0]


def test_faults_of_overrides_name_the_override(tmp_path):
    path = write(tmp_path, "train: {output: out, sources: [{path: a}]}")
    assert faults(path, "train.stps=3") == [
        "override train.stps=3: train.stps: unknown key; did you mean 'steps'? known: output, steps, resume, sources, "
        "paths, args, optimizer, low, high"
    ]
    assert faults(path, "--train.steps", "x") == [
        "override train.steps=x: train.steps: is 'x' (string); it must be an integer or null"
    ]
    assert faults(path, "train.sources.3.path=x")[0].endswith(
        "train.sources is a list of 1; '3' is no index of it (from 0)"
    )
    assert "train.output is 'out' (string) and has no key 'x'" in faults(path, "train.output.x=3")[0]
    assert "has an empty part" in faults(path, "train..x=3")[0]
    assert "duplicate key" in faults(path, "train.args={a: 1, a: 2}")[0]


def test_duplicates_and_other_faults_come_together(tmp_path):
    lines = faults(write(tmp_path, "train:\n  output: a\n  output: b\n  stps: 1\n"))
    assert len(lines) == 2
    assert "train.output: duplicate key" in lines[0] and "did you mean 'steps'" in lines[1]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "is empty; it needs the keys train"),
        ("# only a comment\n", "is empty"),
        ("- a\n", "1:1: is a list of 1; a configuration is a mapping"),
        ("just text", "1:1: is 'just text' (string); a configuration is a mapping"),
        ("train:\n", "1:7: train: is null; it must be a mapping"),
        ("{}", "1:1: train: missing; it is a mapping"),
        ("train: {}", "1:8: train.output: missing; it is a string"),
        ("output: x\ntrain: {output: x}", "1:1: output: unknown key; did you mean 'train.output'? known: train"),
        ("train: {output: x, low: 3}", "1:8: train: low 3 is over high 1"),
        ("train: {output: x, sources: []}", "it must be a list of mappings with 1 or more entries"),
        ("train: {output: x, zzzz: 1}", "1:20: train.zzzz: unknown key; known: output"),
    ],
)
def test_one_clear_line(tmp_path, text, line):
    (found,) = faults(write(tmp_path, text))
    assert line in found


def test_missing_and_unreadable_files(tmp_path):
    assert faults(tmp_path / "none.yaml") == [" no such file"]
    (line,) = faults(write(tmp_path, "train: ["))
    assert "not YAML" in line


@pytest.mark.parametrize("words", [["train"], ["--train.x"], ["--train.x", "--train.y=1"], ["=3"], ["--=3"]])
def test_overrides_without_a_value(words):
    with pytest.raises(ConfigError, match=r"has no value; write key\.of\.it=value"):
        split_overrides(words)


def test_negative_values_are_values():
    assert split_overrides(["--a.b", "-1", "c=--x"]) == [("a.b", "-1"), ("c", "--x")]


def test_check_config_of_plain_data():
    assert check_config({"train": {"output": "x"}}, File).train.output == "x"
    with pytest.raises(ConfigError, match=r"^plan\.json: train\.steps: is 'x' \(string\)"):
        check_config({"train": {"output": "x", "steps": "x"}}, File, "plan.json")


def test_the_dump_is_the_configuration(tmp_path):
    text = "pack: {manifest: [a.jsonl, b.jsonl], output: '7', preprocessor_args: {x: 'on', y: 1e-5, z: null}}"
    config = load_config(write(tmp_path, text), ["pack.rows.max_bad_ratio=1e-5"], PackFile)
    assert config.pack.rows.max_bad_ratio == 1e-5
    again = load_config(write(tmp_path, dump_config(config)), [], PackFile)
    assert again == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_the_file_of_the_design_loads(tmp_path):
    text = """\
pack:
  manifest: clips.jsonl
  output: packed
  source_name: qwen_omni_offline_av
  imports: []
  executor: {kind: ray, workers: null, address: null}
  video: {fps: 2.0, sampling: time_grid, resize: model, factor: 32, min_pixels: null, max_pixels: null,
          min_frames: 4, max_frames: 768, codec: jpeg, quality: 95}
  audio: {sample_rate: 16000, codec: wav}
  rows: {missing_audio: keep, truncated: keep, max_bad_ratio: 0.05, timeout_s: 600, max_memory_gb: 3}
  partition: {target_mb: 512}
  shard: {size_mb: 128, hash: xxh3_64}
"""
    config = load_config(write(tmp_path, text), [], PackFile)
    assert config == check_config({"pack": {"manifest": "clips.jsonl", "output": "packed"}}, PackFile)


def test_min_over_max_names_the_section(tmp_path):
    text = "pack:\n  manifest: a\n  output: b\n  video: {min_frames: 10, max_frames: 4}\n"
    assert faults(write(tmp_path, text), model=PackFile) == ["4:10: pack.video: min_frames 10 is over max_frames 4"]
