"""`omniloom train lengths` as a user meets it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from jobs.cli import main
from tests.train.data.dataset import write_dataset
from tests.train.data.hub import TOKENIZER
from tests.train.data.mixes import random_mix
from train.data.processor import load_assets
from train.data.transform import SampleTransform


@dataclass(frozen=True)
class Run:
    returncode: int
    stdout: str
    stderr: str


def _lengths(capfd: pytest.CaptureFixture[str], *arguments: object) -> Run:
    with pytest.raises(SystemExit) as ended:
        main(["train", "lengths", *map(str, arguments), "--processor", str(TOKENIZER)])
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
