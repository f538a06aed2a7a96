"""`omniloom train lengths` and `compare` as a user meets them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from jobs.cli import main
from tests.train.data.dataset import write_dataset
from tests.train.data.hub import TOKENIZER
from tests.train.data.mixes import random_mix
from tests.train.models.checkpoints import save_model
from train.data.processor import load_assets
from train.data.transform import SampleTransform


@dataclass(frozen=True)
class Run:
    returncode: int
    stdout: str
    stderr: str


def _lengths(capfd: pytest.CaptureFixture[str], *arguments: object) -> Run:
    return _train(capfd, "lengths", *arguments, "--processor", TOKENIZER)


def _train(capfd: pytest.CaptureFixture[str], *arguments: object) -> Run:
    with pytest.raises(SystemExit) as ended:
        main(["train", *map(str, arguments)])
    said = capfd.readouterr()
    return Run(int(ended.value.code or 0), said.out, said.err)


def test_a_dataset_is_counted_and_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    samples = [random_mix(seed, one_rate=False).sample(f"row{seed}") for seed in range(9)]
    folder = write_dataset(tmp_path / "packed", samples)
    made = [SampleTransform(load_assets(TOKENIZER)).packed(sample, "made") for sample in samples]
    run = _lengths(capfd, folder, "--json", "--max-seq-len", 100)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["rows"] == 9 and report["unusable"] == 0 and report["faults"] == []
    assert report["tokens"]["total"] == sum(len(sample) for sample in made)
    assert report["tokens"]["audio"] == sum(sample.num_audio for sample in made)
    assert report["label_tokens"] == sum(sample.num_label_tokens for sample in made)
    assert report["over_max_seq_len"] == sum(len(sample) > 100 for sample in made)
    assert report["length"]["max"] == max(len(sample) for sample in made)
    said = _lengths(capfd, folder).stdout
    assert f"{report['tokens']['total']:,}" in said and "9, 0 unusable, 0 without a label" in said


def test_text_needs_a_preprocessor_and_names_bad_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "chat.jsonl"
    good = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
    file.write_text(json.dumps(good) + "\n" + json.dumps({**good, "videos": ["a.mp4"]}) + "\n")
    run = _lengths(capfd, file)
    assert run.returncode == 2 and "--source-name" in run.stderr and len(run.stderr.splitlines()) == 1
    told = _lengths(capfd, file, "--source-name", "openai_messages")
    assert told.returncode == 0, told.stderr
    assert "2, 1 unusable" in told.stdout and "unusable  row 1: bad_row" in told.stdout


def test_what_is_missing_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = _lengths(capfd, tmp_path)
    assert run.returncode == 8
    assert run.stderr.startswith(f"error: {tmp_path}/index.json does not exist") and len(run.stderr.splitlines()) == 1


def test_a_model_is_compared_with_transformers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_model("vl_moe", tmp_path, "hub")
    run = _train(capfd, "compare", tmp_path, "--op", "moe_implementation=grouped_mm")
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0].split()[:2] == ["input", "module"]
    assert any(line.split()[:2] == ["image", "model.language_model.layers.2"] for line in lines)
    assert not any("self_attn" in line for line in lines)
    assert "modules agree within 0.0001 of the greatest value, on text, image, video" in lines[-1]
    report = json.loads(_train(capfd, "compare", tmp_path, "--json", "--input", "image").stdout)
    assert report["first"] is None and report["weights"] == []
    row = next(r for r in report["modules"] if r["module"] == "model.visual.blocks.1.attn.qkv")
    assert row["input"] == "image" and 0 <= row["max_difference"] < 1e-4


def test_the_first_module_that_differs_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What differs is the last bits of a float, because no difference at all is allowed."""
    save_model("moe", tmp_path)
    how = ["--dtype", "bf16", "--op", "attn_implementation=eager"]
    report = json.loads(_train(capfd, "compare", tmp_path, "--json", *how).stdout)
    inexact = [row["module"] for row in report["modules"] if row["relative"] > 0]
    assert report["first"] is None and report["tolerance"] == 0.05 and inexact
    run = _train(capfd, "compare", tmp_path, "--tolerance", 0, "--all", *how)
    assert run.returncode == 4
    assert run.stderr.splitlines()[-1].startswith("error: ") and "is the first module that differs" in run.stderr
    marked = [line.split()[1] for line in run.stdout.splitlines() if line.endswith("differs")]
    assert marked == inexact and f"{len(inexact)} of {len(report['modules'])} modules differ" in run.stdout


def test_what_compare_cannot_do_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_model("dense", tmp_path / "dense")
    for code, said, arguments in (
        (7, "model_type 'llama' is not among the native models", [tmp_path]),
        (2, "--op sdpa: must be KEY=NAME", [tmp_path, "--op", "sdpa"]),
        (2, "'fast' is no implementation of attention", [tmp_path, "--op", "attn_implementation=fast"]),
        (2, "unknown key", [tmp_path, "--op", "attention=sdpa"]),
        (2, "there are 0 CUDA devices here", [tmp_path, "--device", "cuda"]),
        (2, "takes no input of the kind 'sound'", [tmp_path / "dense", "--input", "sound"]),
    ):
        run = _train(capfd, "compare", *arguments)
        assert run.returncode == code and said in run.stderr and len(run.stderr.splitlines()) == 1, run.stderr
