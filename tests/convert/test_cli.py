"""The commands of `omniloom convert` as a user types them: outputs, plans, exit codes."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from convert.progress import Meter
from jobs.cli import main
from tests.convert.models import edit_config, make_omni, read_weights, rewrite_weights


def omniloom(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["convert", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_there_and_back(omni: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert omniloom("omni-to-vl", omni, tmp_path / "vl") == 0
    assert "tensors: 93 made, 210 dropped; verified" in capsys.readouterr().out
    assert omniloom("vl-to-omni", tmp_path / "vl", tmp_path / "back", "--base", omni, "--no-verify") == 0
    assert filecmp.cmp(tmp_path / "back" / "model.safetensors", omni / "model.safetensors", shallow=False)
    assert "210 from the base; not verified" in capsys.readouterr().out
    assert omniloom("hf-to-dcp", omni, tmp_path / "dcp", "--names", "transformers") == 0
    assert omniloom("dcp-to-hf", tmp_path / "dcp", tmp_path / "out", "--base", omni) == 0
    assert filecmp.cmp(tmp_path / "out" / "model.safetensors", omni / "model.safetensors", shallow=False)


def test_second_run_has_nothing_to_do(omni: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert omniloom("omni-to-text", omni, tmp_path / "text") == 0
    capsys.readouterr()
    assert omniloom("omni-to-text", omni, tmp_path / "text") == 0
    assert "nothing to do" in capsys.readouterr().out


def test_dry_run_says_everything_and_writes_nothing(
    omni: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--dry-run", "--dtype", "bf16", "--shard-size", "100KB", "--workers", "3")
    assert omniloom("omni-to-vl", omni, tmp_path / "vl", *options) == 0
    said = capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    weights = {
        name: t
        for name, t in read_weights(omni).items()
        if name.startswith(("thinker.model", "thinker.visual", "thinker.lm"))
    }
    size = sum(tensor.nbytes for tensor in weights.values())
    assert f"read     {size / 1e9:.4f} GB of 369 source tensors" in said
    assert "GB in 3 files" in said
    assert "93 made, 210 dropped" in said
    assert "cast     93 tensors float32 -> bfloat16" in said
    assert "drop     45 tensors: Qwen3-VL has no audio tower" in said
    assert "about 9 MB" in said


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["omni-to-vl", "{omni}", "{out}", "--dtype", "int8"], 2, "'int8' is no dtype"),
        (["omni-to-vl", "{omni}", "{out}", "--layout", "hubb"], 2, "known: hub, v5"),
        (["omni-to-vl", "{omni}", "{out}", "--shard-size", "big"], 2, "is no size"),
        (["omni-to-vl", "{omni}/nowhere", "{out}"], 2, "no such directory"),
        (["vl-to-omni", "{omni}", "{out}", "--base", "{omni}"], 7, "model_type is 'qwen3_omni_moe'"),
        (["vl-to-omni", "{omni}", "{out}"], 2, "--base"),
        (["dcp-to-hf", "{omni}", "{out}", "--base", "{omni}"], 2, "no torch distributed checkpoints"),
        (["hf-to-dcp", "{omni}", "{out}", "--names", "megatron"], 2, "no style of names"),
        (["megatron-to-hf", "{omni}", "{out}"], 2, "--base"),
        (["omni-to-vl", "{omni}", "{omni}"], 2, "is not the result of this conversion"),
    ],
)
def test_exit_codes(
    omni: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str
) -> None:
    places = {"omni": str(omni), "out": str(tmp_path / "out")}
    assert omniloom(*(argument.format(**places) for argument in arguments)) == code
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_damaged_sources_have_exit_codes_of_their_own(
    omni: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def outcome(name: str) -> int:
        code = omniloom("omni-to-vl", tmp_path / name, tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out")) == []
        return code

    for name in ("nan", "missing", "unknown", "shape", "truncated", "unsafe"):
        shutil.copytree(omni, tmp_path / name)
    weights = read_weights(omni)
    expert = "thinker.model.layers.0.mlp.experts.1.up_proj.weight"
    rewrite_weights(tmp_path / "nan", {**weights, expert: weights[expert] / 0})
    rewrite_weights(tmp_path / "missing", {name: tensor for name, tensor in weights.items() if name != expert})
    rewrite_weights(tmp_path / "unknown", {**weights, "thinker.extra": weights[expert].clone()})
    edit_config(tmp_path / "shape", "thinker_config", "text_config", vocab_size=321)
    whole = (tmp_path / "truncated" / "model.safetensors").read_bytes()
    (tmp_path / "truncated" / "model.safetensors").write_bytes(whole[:-1])
    (tmp_path / "unsafe" / "model.safetensors").unlink()
    index = {"weight_map": {expert: "../nan/model.safetensors"}}
    (tmp_path / "unsafe" / "model.safetensors.index.json").write_text(json.dumps(index))
    codes = {name: outcome(name) for name in ("nan", "missing", "unknown", "shape", "truncated", "unsafe")}
    assert codes == {"nan": 4, "missing": 8, "unknown": 7, "shape": 7, "truncated": 8, "unsafe": 6}
    said = capsys.readouterr().err
    assert said.count("error: ") == 6


def test_terminated_run_can_be_resumed(tmp_path: Path) -> None:
    """SIGTERM: exit code 5, finished files kept, the same command goes on."""
    source = make_omni(tmp_path / "omni", hidden=64, moe=96, experts=96, layers=6)
    command = [sys.executable, "-m", "jobs.cli", "convert", "omni-to-vl", str(source), str(tmp_path / "vl")]
    command += ["--shard-size", "200KB", "--workers", "1"]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path.cwd())
    partial = tmp_path / "vl.partial"
    for _ in range(3000):
        if partial.exists() and len(list(partial.glob("model-*.safetensors"))) > 3:
            break
        time.sleep(0.01)
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate()
    assert child.returncode == 5, said
    assert "stopped by SIGTERM; the same command goes on from here" in said
    kept = {path.name: path.stat().st_ino for path in partial.glob("model-*.safetensors")}
    assert len(kept) > 3
    assert omniloom(*command[4:]) == 0
    assert {name: os.stat(tmp_path / "vl" / name).st_ino for name in kept} == kept


def test_meter_counts_what_this_run_does() -> None:
    now = [0.0]
    meter = Meter(lambda: now[0])
    now[0] = 3.2
    assert (meter.title, meter.say()) == ("planning", "3 s")
    now[0] = 0.0
    meter.begin("writing", 10_000_000_000, 4_000_000_000)
    now[0] = 2.0
    meter.add(2_000_000_000)
    assert meter.say() == "6.00 of 10.00 GB, 1.00 GB/s, 0:04 left"
    meter.begin("verifying", 500, 0)
    assert meter.say() == "0.0000 of 0.0000 GB, 0.0000 GB/s"
