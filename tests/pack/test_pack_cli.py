"""`omniloom pack` as a user meets it: output, one clear line per mistake, exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.cli import main
from pack.plan_file import load_plan
from pack.storage import LocalStorage

ROOT = Path(__file__).parents[2]
TEXT = [{"from": "human", "value": "What is a shard?"}, {"from": "gpt", "value": "A file of samples."}]


def _run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["pack", *words])
    return int(ended.value.code or 0)


def _job(folder: Path, rows: list[object], extra: str = "") -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "m.jsonl").write_text("".join(line + "\n" for line in lines))
    config = folder / "c.yaml"
    config.write_text(
        f"pack:\n  manifest: {folder}/m.jsonl\n  output: {folder}/out\n  executor: {{kind: local, workers: 1}}\n{extra}"
    )
    return str(config)


def _good(count: int) -> list[object]:
    return [{"id": f"r{i}", "conversations": TEXT} for i in range(count)]


def _error(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr that is no progress."""
    progress = ("planning:", "packing:", "merging:", "verifying:")
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(progress)]
    assert len(lines) == 1, lines
    return lines[0]


def test_a_small_job_command_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*_good(9), {"id": "bad", "source": "web", "conversations": [{"from": "human", "value": "<video> where?"}]}]
    config = _job(tmp_path, rows, "  rows: {max_bad_ratio: 0.5}\n")
    out = str(tmp_path / "out")
    assert _run("plan", config) == 0
    assert "10 rows of 1 file in 1 partition," in capsys.readouterr().out
    assert not (tmp_path / "out/parts").exists()
    assert _run("status", out) == 0
    assert "0 of 1 committed" in capsys.readouterr().out
    assert _run("run", config) == 0
    said = capsys.readouterr().out
    assert "10 in, 9 packed, 1 rejected" in said
    assert "1 marker_mismatch" in said
    assert f"preview: {out}/preview.html" in said
    assert (tmp_path / "out/preview.html").stat().st_size > 1000
    assert _run("run", config) == 0
    assert capsys.readouterr().out.startswith("nothing to do")
    assert _run("status", config, "--json") == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["state"], status["rows_done"], status["rejected"]) == ("finished", 10, 1)
    assert _run("verify", out) == 0
    assert "9 samples of 1 partition," in capsys.readouterr().out
    assert _run("rejects", out, "--json") == 0
    (reject,) = json.loads(capsys.readouterr().out)
    assert {k: reject[k] for k in ("id", "source", "stage", "reason", "row")} == {
        "id": "bad",
        "source": "web",
        "stage": "preprocess",
        "reason": "marker_mismatch",
        "row": 9,
    }
    assert "1 <video> and the row has 0 videos" in reject["detail"]
    assert _run("rejects", out) == 0
    assert "bad [web]  preprocess  marker_mismatch: " in capsys.readouterr().out
    assert _run("extract", out, str(tmp_path / "x"), "--id", "r3") == 0
    assert [p.name for p in (tmp_path / "x").iterdir()] == ["r3"]
    assert _run("merge", out) == 0
    assert _run("preview", out, "--out", str(tmp_path / "page.html")) == 0
    assert (tmp_path / "page.html").exists()
    assert _run("gc", out) == 0
    capsys.readouterr()
    assert _run("retry-rejected", out) == 0
    assert "1 rejected row tried again" in capsys.readouterr().out
    assert _run("verify", out) == 0


def test_overrides_in_both_forms(tmp_path: Path) -> None:
    config = _job(tmp_path, _good(1))
    assert _run("plan", config, "pack.video.fps=1", "--pack.video.quality", "80") == 0
    video = load_plan(LocalStorage(tmp_path / "out")).config.video
    assert (video.fps, video.quality) == (1.0, 80)


def test_over_the_threshold_is_exit_code_3_and_again_on_a_second_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _job(tmp_path, [*_good(3), "{broken"])
    assert _run("run", config) == 3
    assert "1 of 4 rows were rejected (25.0%); rows.max_bad_ratio allows 5.0%" in _error(capsys)
    assert _run("run", config) == 3
    assert _run("run", config, "pack.rows.max_bad_ratio=0.5") == 0


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ("  vidoe: {fps: 1}\n", r"c.yaml:5.*vidoe.*video"),
        ("  source_name: sharegpt4v_pretrian\n", "sharegpt4v_pretrain"),
        ("  imports: [no_such_module]\n", "no_such_module"),
        ("  preprocessor_args: {rng: 1}\n", "rng is passed by the packer"),
    ],
    ids=["key", "preprocessor", "import", "argument"],
)
def test_a_wrong_configuration_is_exit_code_2_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: str, said: str
) -> None:
    assert _run("run", _job(tmp_path, _good(1), extra)) == 2
    assert re.search(said, _error(capsys))
    assert not (tmp_path / "out").exists()


def test_missing_and_empty_manifests_are_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("run", _job(tmp_path, [])) == 2
    assert "not one row" in _error(capsys)
    (tmp_path / "m.jsonl").unlink()
    assert _run("run", str(tmp_path / "c.yaml")) == 2
    assert _error(capsys) == f"error: pack.manifest: there is no {tmp_path}/m.jsonl"
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_not_ours_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = _job(tmp_path, _good(1))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").write_text("years of work")
    assert _run("run", config) == 2
    assert "is not empty and no output of `omniloom pack` (it has thesis.txt)" in _error(capsys)
    (tmp_path / "out/thesis.txt").unlink()
    (tmp_path / "out").rmdir()
    (tmp_path / "out").write_text("a file")
    assert _run("run", config) == 2
    assert "is a file, not a folder" in _error(capsys)


def test_commands_on_what_is_no_dataset_are_exit_code_8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("status", "merge", "verify", "preview", "rejects", "gc"):
        assert _run(command, str(tmp_path / "nothing")) == 8
        assert "nothing was planned yet" in _error(capsys)
    assert _run("extract", str(tmp_path / "nothing"), str(tmp_path / "x")) == 8


def test_damage_is_exit_code_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("run", _job(tmp_path, _good(2))) == 0
    shard = next((tmp_path / "out").glob("parts/*/*.mds"))
    data = bytearray(shard.read_bytes())
    data[-50] ^= 1
    shard.write_bytes(data)
    capsys.readouterr()
    assert _run("verify", str(tmp_path / "out")) == 4
    assert f"{shard}: sample 1: " in _error(capsys)


def test_an_unknown_reason_lists_the_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = _job(tmp_path, _good(1))
    assert _run("retry-rejected", config, "--reason", "bad_luck") == 2
    assert "missing_file" in _error(capsys)
    assert _run("plan", config) == 0
    assert _run("retry-rejected", str(tmp_path / "out"), "pack.seed=1") == 2


def test_retrying_a_dataset_is_about_that_dataset_wherever_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two folders with the same configuration, whose paths are relative to each."""
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        _job(folder, [*_good(2), {"id": "bad", "videos": ["none.mp4"], "conversations": TEXT}])
        text = "pack: {manifest: m.jsonl, output: out, executor: {kind: local, workers: 1}, rows: {max_bad_ratio: 1}}\n"
        (folder / "c.yaml").write_text(text)
        monkeypatch.chdir(folder)
        assert _run("run", "c.yaml") == 0
    before = (tmp_path / "b/out/plan/plan.json").read_bytes()
    assert _run("retry-rejected", str(tmp_path / "a/out")) == 0
    assert f"dataset{tmp_path}/a/out" in "".join(capsys.readouterr().out.split())  # a long path is folded
    assert (tmp_path / "b/out/plan/plan.json").read_bytes() == before
    assert max(p.generation for p in load_plan(LocalStorage(tmp_path / "a/out")).partitions) == 1
    monkeypatch.chdir(tmp_path / "b/out")
    assert _run("retry-rejected", ".") == 0
    assert max(p.generation for p in load_plan(LocalStorage(tmp_path / "b/out")).partitions) == 1


def test_roots_that_are_relative_to_another_folder_are_not_guessed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _job(tmp_path, _good(1), "  rows: {allowed_roots: [clips]}\n")
    assert _run("run", config) == 0
    capsys.readouterr()
    assert _run("retry-rejected", str(tmp_path / "out")) == 2
    assert "rows.allowed_roots has clips, which is relative to where the job was started" in _error(capsys)
    assert _run("retry-rejected", config) == 0


def test_an_edited_preprocessor_is_another_plan_and_may_mend_rejected_rows(tmp_path, monkeypatch):
    """Packed rows are never mixed with those of other code; retrying rejected rows with mended code is no mix."""
    monkeypatch.chdir(tmp_path)
    module = tmp_path / "mine_edited.py"
    code = (
        "from schemas.registry import PREPROCESSOR_REGISTRY\n"
        "@PREPROCESSOR_REGISTRY.register('mine_edited')\n"
        "def mine(conversations, **kwargs):\n"
        "    '''Text rows.'''\n"
        "    {check}\n"
        "    return [['user', ('text', conversations[0]['value'])], ['assistant', ('text', '{reply}')]]\n"
    )
    rows = [{"id": f"r{i}", "conversations": [{"from": "human", "value": f"q{i}"}]} for i in range(4)]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "c.yaml").write_text(
        "pack: {manifest: m.jsonl, output: out, source_name: mine_edited, imports: [mine_edited],\n"
        "  executor: {kind: local, workers: 1}, rows: {max_bad_ratio: 1.0}}\n"
    )

    def run(*words):
        command = [sys.executable, "-m", "jobs.cli", "pack", *words]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)

    module.write_text(code.format(check="assert conversations[0]['value'] != 'q2'", reply="one"))
    assert run("run", "c.yaml").returncode == 0
    assert "r2" in run("rejects", "out").stdout
    module.write_text(code.format(check="pass", reply="one"))
    assert run("retry-rejected", "c.yaml").returncode == 0
    assert json.loads(run("rejects", "out", "--json").stdout) == []
    mended = load_plan(LocalStorage(tmp_path / "out")).fingerprint
    assert run("plan", "c.yaml").returncode == 0
    assert load_plan(LocalStorage(tmp_path / "out")).fingerprint == mended
    module.write_text(code.format(check="pass", reply="two"))
    assert run("plan", "c.yaml").returncode == 0
    assert load_plan(LocalStorage(tmp_path / "out")).fingerprint != mended
