"""Starting ranks: the torchrun line, how errors of ranks come back, signals on their way to the workers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml

from schemas.errors import ConfigError, OmniloomError, ResumableError, StoppedError
from tests.environment import environment
from tests.train.tiny import omni_config, write_data
from train.launch import OUTCOME_VARIABLE, Launch, Outcome, leave_outcome, raise_worst, read_outcomes


def test_the_command_line() -> None:
    alone = Launch(2).command(["train", "run", "c.yaml"])
    assert alone[1:] == [
        *("-m", "train.launch_agent", "--standalone", "--nproc-per-node=2", "--max-restarts=0"),
        *("-m", "jobs.cli", "train", "run", "c.yaml"),
    ]
    several = Launch(8, 4, "host:29400").command([])
    assert "--nnodes=4" in several and "--rdzv-endpoint=host:29400" in several and "--standalone" not in several


@pytest.mark.parametrize("how", [{"nproc": 0}, {"nproc": 1, "nnodes": 2}, {"nproc": 1, "nnodes": 0}])
def test_what_cannot_be_launched(how: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="--n"):
        Launch(**how)


def test_outcomes_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_outcome(0, None)  # without a launcher: nothing
    monkeypatch.setenv(OUTCOME_VARIABLE, str(tmp_path))
    leave_outcome(1, ConfigError("wrong key"))
    leave_outcome(0, None)
    leave_outcome(2, ValueError("oh"))
    noted = ValueError("no memory")
    noted.add_note("what held it: memory/rank_3.pickle")
    leave_outcome(3, noted)
    found = read_outcomes(tmp_path)
    times = [outcome.time for outcome in found]
    assert times[1] <= times[0] <= times[2] <= times[3] and time.time() - times[1] < 60
    assert [replace(outcome, time=0.0) for outcome in found] == [
        Outcome(0, 0),
        Outcome(1, 2, "wrong key"),
        Outcome(2, 1, "ValueError: oh"),
        Outcome(3, 1, "ValueError: no memory; what held it: memory/rank_3.pickle"),
    ]


@pytest.mark.parametrize(
    ("outcomes", "code", "said", "exit_code"),
    [
        ([Outcome(0, 1, "lost a peer", time=9.0), Outcome(1, 2, "wrong key", time=8.0)], 1, "wrong key (rank 1)", 2),
        ([Outcome(0, 1, "lost a peer", time=9.0), Outcome(3, 1, "no memory", time=8.0)], 1, "no memory (rank 3)", 1),
        ([Outcome(0, 1, "lost a peer"), Outcome(1, 5, "stopped")], 1, "lost a peer", 1),
        ([Outcome(0, 5, "stopped"), Outcome(1, 5, "stopped")], 0, "stopped (rank 0)", 5),
        ([Outcome(0, 0)], 1, "without a word", 1),
        ([], 1, "without a word", 1),
        ([], 5, "without a word", 1),  # nobody asked
        ([Outcome(0, 1, "lost a peer", time=9.0), Outcome(1, 5, "SIGTERM", True, 8.0, True)], 1, "SIGTERM", 5),
        ([Outcome(0, 1, "no memory", time=7.0), Outcome(1, 5, "SIGTERM", True, 8.0, True)], 1, "no memory (rank 0)", 1),
    ],
)
def test_the_worst_of_them_is_raised(outcomes: list[Outcome], code: int, said: str, exit_code: int) -> None:
    with pytest.raises(OmniloomError, match=said.replace("(", r"\(").replace(")", r"\)")) as error:
        raise_worst(outcomes, code)
    assert error.value.exit_code == exit_code


def test_all_is_well() -> None:
    raise_worst([Outcome(0, 0), Outcome(1, 0)], 0)
    raise_worst([Outcome(0, 0), Outcome(1, 0)], 0, signal.SIGTERM)  # it came too late


def test_a_signal_before_the_ranks_could_say_a_word() -> None:
    for code in (5, -signal.SIGTERM):
        with pytest.raises(StoppedError, match=r"^SIGUSR1 before the first step: "):
            raise_worst([], code, signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt):
            raise_worst([], code, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        raise_worst([Outcome(0, 130, "KeyboardInterrupt: ")], 1, signal.SIGINT)
    with pytest.raises(OmniloomError, match="without a word"):  # killed by another signal
        raise_worst([], 1, signal.SIGTERM)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    config = omni_config(folder, write_data(folder), max_steps=400)
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path


def start(recipe: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "jobs.cli", "train", "run", str(recipe), "--nproc", "2", *overrides]
    variables = environment(CUDA_VISIBLE_DEVICES="")
    return subprocess.Popen(
        command, cwd=recipe.parent, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def wait_for_steps(output: Path, count: int, process: subprocess.Popen[str]) -> None:
    for _ in range(1200):
        lines = (output / "metrics.jsonl").read_text().splitlines() if (output / "metrics.jsonl").exists() else []
        if len(lines) >= count:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise TimeoutError(f"no {count} steps")


def test_a_signal_stops_all_ranks_behind_a_step_and_the_code_says_so(recipe: Path) -> None:
    output = recipe.parent / "output"
    process = start(recipe)
    wait_for_steps(output, 2, process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == ResumableError.exit_code, said
    assert said.splitlines()[-1].startswith("stopped and saved after step ") and "error" not in said
    assert said.count("stopping after step") == 1  # not by each rank
    step = int((output / "LATEST").read_text().strip().removeprefix("step_"))
    assert (output / f"step_{step}/COMPLETE").exists()
    steps = [json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1] == step


def test_a_killed_launcher_leaves_no_rank_behind(recipe: Path, tmp_path: Path) -> None:
    process = start(recipe, f"train.checkpoint.output_dir={tmp_path}")
    wait_for_steps(tmp_path, 1, process)
    below = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(below, timeout=30)
    assert alive == []


def test_a_launcher_that_is_killed_before_torchrun_is_there_leaves_none(recipe: Path, tmp_path: Path) -> None:
    process = start(recipe, f"train.checkpoint.output_dir={tmp_path}")
    assert process.stderr is not None
    process.stderr.readline()  # that ranks are started
    below: list[psutil.Process] = []
    while not below:
        assert process.poll() is None
        below = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(below, timeout=30)
    assert alive == []


def test_a_wrong_configuration_is_one_line_from_all_ranks(recipe: Path, tmp_path: Path) -> None:
    process = start(recipe, f"train.checkpoint.output_dir={tmp_path}", "train.accelerator.dp_replicate_size=3")
    _, said = process.communicate(timeout=120)
    assert process.returncode == ConfigError.exit_code, said
    lines = [line for line in said.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and "dp_replicate_size 3" in lines[0]
