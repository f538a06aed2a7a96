"""`omniloom train logprobs` and `compare-logprobs` as a user meets them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from jobs.cli import main
from tests.environment import environment
from tests.train import pseudo
from tests.train.logprob_cases import dump_config, dumped, write_rows
from train.config import OmniConfig
from train.data.labelling import TOKEN_CHOICES
from train.logprobs import DumpOptions
from train.logprobs_cli import TOKENS
from train.logprobs_hub import HubLogprobRun


@dataclass(frozen=True)
class Made:
    """A configuration, as it is and on disk, and transformers' dump of it."""

    config: OmniConfig
    file: Path
    reference: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    top = tmp_path_factory.mktemp("logprobs_cli")
    config = dump_config(pseudo.make_omni(top / "model"), write_rows(top / "rows", 1), top)
    file = top / "train.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)))
    return Made(config, file, dumped(config, top / "reference", hub=True, features=True))


def run(capfd: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """(exit code, output, errors) in this process."""
    with pytest.raises(SystemExit) as ended:
        main(["train", *map(str, words)])
    said = capfd.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_two_ranks_dump_and_agree(made: Made, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The launcher hands on every option."""
    out = tmp_path / "dump"
    words = ["train", "logprobs", str(made.file), "--out", str(out), "--tokens", "all", "--features", "--nproc", "2"]
    variables = environment(CUDA_VISIBLE_DEVICES="")
    ended = subprocess.run(
        [sys.executable, "-m", "jobs.cli", *words, "--max-samples", "5", "train.accelerator.ulysses_size=2"],
        env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "of 5 usable rows (5 in all)" in ended.stderr and "2 sequence slices" in ended.stderr
    card = json.loads((out / "dump.json").read_text())
    assert card["samples"] == 5 and card["degrees"]["ulysses"] == 2 and card["tokens"] == "all"
    assert f"{out}: {card['token_count']} tokens of 5 samples in 1 files" in ended.stdout
    picture = tmp_path / "d.svg"
    limits = ("--max-tolerance", "1e-4", "--mean-tolerance", "1e-5", "--feature-tolerance", "1e-4")
    code, told, said = run(capfd, "compare-logprobs", out, made.reference, "--json", "--plot", picture, *limits)
    assert code == 0, said
    report = json.loads(told)
    assert report["groups"][0]["count"] == card["token_count"] and report["only_first"]["tokens"] == 0
    assert report["only_second"]["samples"] > 0 and report["features"]
    assert picture.read_text().startswith("<svg")
    code, told, said = run(capfd, "compare-logprobs", out, made.reference, "--max-tolerance", "1e-12")
    assert code == 4 and "error: the dumps do not agree" in said and "max |d|" in said
    assert "modality audio" in told and "features of video, deepstack1" in told and "only in" in told


def test_transformers_from_the_command_line(made: Made, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By default labelled tokens, beside what training writes."""
    words = ("--backend", "transformers", f"train.checkpoint.output_dir={tmp_path}")
    code, told, said = run(capfd, "logprobs", made.file, *words)
    assert code == 0, said
    assert f"{tmp_path / 'logprobs'}: " in told
    card = json.loads((tmp_path / "logprobs/dump.json").read_text())
    assert (card["backend"], card["tokens"], card["dtype"]) == ("transformers", "labelled", "float32")
    assert card["versions"].keys() == {"omniloom", "torch", "transformers", "python"}
    code, _, said = run(capfd, "logprobs", made.file, *words)
    assert code == 2 and "holds a whole dump already" in said


def test_the_command_knows_what_the_data_path_knows() -> None:
    """Its own list keeps `--help` fast."""
    assert TOKENS == TOKEN_CHOICES


WRONG = [
    (("--tokens", "labeled"), "error: --tokens labeled; did you mean 'labelled'? known: labelled, text, all"),
    (("--backend", "hf"), "error: --backend hf; known: native, transformers"),
    (("train.accelerator.dp_shard_size=3",), "but there are 1 ranks"),
    (("--max-samples", "0"), "--max-samples 0: must be at least 1"),
]


@pytest.mark.parametrize(("words", "expected"), WRONG)
def test_wrong_words(
    made: Made, tmp_path: Path, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], expected: str
) -> None:
    code, _, said = run(capfd, "logprobs", made.file, "--out", tmp_path / "dump", *words)
    assert code == 2 and expected in said
    assert not (tmp_path / "dump/dump.json").exists()


def test_features_that_are_not_there(made: Made, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bare = dumped(made.config, tmp_path / "bare")
    code, _, said = run(capfd, "compare-logprobs", bare, made.reference, "--feature-tolerance", "1")
    assert code == 2 and "not both dumps have features" in said
    assert run(capfd, "compare-logprobs", bare, made.reference)[0] == 0


def test_the_export_of_a_checkpoint_is_named(made: Made, tmp_path: Path) -> None:
    """In the error of a reference that would take a checkpoint, where there is an export."""
    run = HubLogprobRun(made.config, DumpOptions(tmp_path / "hub"))
    run.checkpointer = SimpleNamespace(output_dir=tmp_path)  # type: ignore[assignment]
    assert run._export(tmp_path / "step_3") == "EXPORT"
    (tmp_path / "hf" / "step_3").mkdir(parents=True)
    assert run._export(tmp_path / "step_3") == str(tmp_path / "hf" / "step_3")
