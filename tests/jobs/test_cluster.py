"""The launch files: that they parse, that what they name exists, and that the Slurm script does things in order."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from jobs import cli
from pack.config import PackFile
from schemas.strict import load_config

ROOT = Path(cli.__file__).parents[1]
CLUSTER = ROOT / "jobs/cluster"
SCRIPTS = ("ray_job_submit.sh", "slurm.sbatch")


def executable(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """A folder with programs of the cluster that only write down how they were called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    note = f'echo "$(basename "$0") $*" >> {tmp_path}/calls'
    executable(folder, "ray", f"{note}\n[[ $1 != start ]] || exec sleep 60")
    executable(folder, "srun", f'{note}\nwhile [[ $1 == -* ]]; do shift; done\nexec "$@"')
    executable(folder, "scontrol", f"{note}\n[[ $1 != show ]] || printf 'n1\\nn2\\nn3\\n'")
    three = f"[ $(grep -c '^ray start' {tmp_path}/calls) -ge 3 ]"
    wait = f"for i in $(seq 200); do {three} && break; sleep 0.05; done"
    executable(folder, "omniloom", f"{note}\n{wait}\nexit ${{PACK_EXIT:-0}}")
    (tmp_path / "my.yaml").write_text("pack: {manifest: m, output: o}\n")
    return folder


def launch(script: str, folder: Path, *arguments: str, **environment: str) -> tuple[int, list[str], str]:
    """(exit code, calls of the stand-ins, stderr)."""
    values = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"} | environment
    command = ["bash", str(CLUSTER / script), *arguments]
    answer = subprocess.run(
        command, env=values, cwd=folder.parent, capture_output=True, text=True, timeout=60, check=False
    )
    calls = folder.parent / "calls"
    return answer.returncode, calls.read_text().splitlines() if calls.exists() else [], answer.stderr


SLURM = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_ID": "77", "SLURM_CPUS_PER_TASK": "8"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_bash_that_parses_and_may_be_executed(script: str) -> None:
    subprocess.run(["bash", "-n", str(CLUSTER / script)], check=True)
    assert os.access(CLUSTER / script, os.X_OK)


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_a_configuration_they_say_how_they_are_used(script: str, stand_ins: Path) -> None:
    code, calls, said = launch(script, stand_ins)
    assert code == 2 and "usage:" in said and "CONFIG" in said and not calls


def test_the_slurm_job_starts_head_workers_and_the_job(stand_ins: Path) -> None:
    code, calls, _ = launch("slurm.sbatch", stand_ins, "my.yaml", "pack.video.fps=1.0", **SLURM)
    assert code == 0
    starts = sorted(call for call in calls if call.startswith("ray start"))
    options = "--num-cpus=8 --disable-usage-stats --block"
    assert starts == [
        *[f"ray start --address=n1:20077 {options}"] * 2,
        f"ray start --head --port=20077 --include-dashboard=false {options}",
    ]
    on = [match[1] for call in calls if (match := re.match(r"srun .*--nodelist=(\w+)", call))]
    assert sorted(on) == ["n1", "n2", "n3"]
    run = "omniloom pack run my.yaml pack.executor.kind=ray pack.executor.address=n1:20077 pack.video.fps=1.0"
    assert run in calls and calls.index("ray status --address n1:20077") < calls.index(run)


@pytest.mark.parametrize(("ends_with", "requeued"), [(0, False), (3, False), (5, True)])
def test_a_job_that_can_be_resumed_is_queued_again(stand_ins: Path, ends_with: int, requeued: bool) -> None:
    code, calls, _ = launch("slurm.sbatch", stand_ins, "my.yaml", PACK_EXIT=str(ends_with), **SLURM)
    assert code == ends_with
    assert ("scontrol requeue 77" in calls) == requeued


def test_the_signal_before_the_time_limit_reaches_the_job(stand_ins: Path, tmp_path: Path) -> None:
    body = f"echo started > {tmp_path}/started; trap 'sleep 0.3; exit 5' TERM; while true; do sleep 0.05; done"
    executable(stand_ins, "omniloom", body)
    shell = (
        f"bash {CLUSTER}/slurm.sbatch my.yaml & job=$!; until [ -e started ]; do sleep 0.05; done; sleep 0.2;"
        " kill -TERM $job; wait $job"
    )
    values = os.environ | {"PATH": f"{stand_ins}:{os.environ['PATH']}"} | SLURM
    answer = subprocess.run(["bash", "-c", shell], env=values, cwd=tmp_path, timeout=60, check=False)
    assert answer.returncode == 5
    assert "scontrol requeue 77" in (tmp_path / "calls").read_text()


def test_submitting_uploads_the_configuration_and_named_files_only(stand_ins: Path, tmp_path: Path) -> None:
    find = "while [[ $1 != --working-dir ]]; do shift; done"
    executable(stand_ins, "ray", f'echo "ray $*" >> {tmp_path}/calls\n{find}\nls $2 > {tmp_path}/uploaded')
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "other.txt").write_text("")
    environment = {"RAY_ADDRESS": "http://head:8265", "OMNILOOM_FILES": "mine.py"}
    code, calls, _ = launch("ray_job_submit.sh", stand_ins, "my.yaml", "pack.video.fps=1.0", **environment)
    assert code == 0
    assert (tmp_path / "uploaded").read_text().split() == ["mine.py", "my.yaml"]
    assert calls[0].startswith("ray job submit --address http://head:8265 --working-dir ")
    assert calls[0].endswith("-- omniloom pack run my.yaml pack.executor.kind=ray pack.video.fps=1.0")


def test_submitting_needs_an_address(stand_ins: Path) -> None:
    code, calls, said = launch("ray_job_submit.sh", stand_ins, "my.yaml", RAY_ADDRESS="")
    assert code == 2 and said.startswith("error: set RAY_ADDRESS") and not calls


def test_every_option_of_ray_exists() -> None:
    text = "".join((CLUSTER / name).read_text() for name in SCRIPTS)
    ray = ROOT / ".venv/bin/ray"
    program = str(ray) if ray.exists() else "ray"
    for command, options in {
        "start": [
            "--head",
            "--port",
            "--include-dashboard",
            "--num-cpus",
            "--disable-usage-stats",
            "--block",
            "--address",
        ],
        "job submit": ["--address", "--working-dir", "--runtime-env-json"],
        "status": ["--address"],
    }.items():
        answer = subprocess.run([program, *command.split(), "--help"], capture_output=True, text=True, check=True)
        assert f"ray {command}" in text
        for option in options:
            assert option in answer.stdout, f"ray {command} {option}"
            assert option in text


def test_every_omniloom_command_and_key_exists(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("pack: {manifest: m, output: o}\n")
    text = "".join(path.read_text() for path in CLUSTER.iterdir())
    words = set(re.findall(r"omniloom (pack \w+|doctor)", text))
    assert {"pack run", "pack status", "doctor"} == words
    for line in words:
        command = typer.main.get_command(cli.app)
        context = typer.Context(command)
        for word in line.split():
            _, command, _ = command.resolve_command(context, [word])  # type: ignore[attr-defined]
    for key in set(re.findall(r"(pack\.executor\.\w+)=", text)):
        load_config(config, [f"{key}=ray"], PackFile)


def test_the_rayjob_has_what_kuberay_needs() -> None:
    documents = list(yaml.safe_load_all((CLUSTER / "rayjob.yaml").read_text()))
    config_map, job = documents
    assert (config_map["kind"], job["apiVersion"], job["kind"]) == ("ConfigMap", "ray.io/v1", "RayJob")
    spec = job["spec"]
    assert spec["entrypoint"] == "omniloom pack run /config/pack.yaml" and spec["shutdownAfterJobFinishes"]
    cluster = spec["rayClusterSpec"]
    locked = re.search(r"^ray==(\S+)", (ROOT / "requirements.lock").read_text(), re.M)
    assert locked and cluster["rayVersion"] == locked[1]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert all(isinstance(value, str) for group in groups for value in group["rayStartParams"].values())
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] == "omniloom:0.1.0" and container["resources"]["limits"]
        assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    assert {"groupName", "replicas", "minReplicas", "maxReplicas"} <= cluster["workerGroupSpecs"][0].keys()


def test_the_configuration_in_the_rayjob_is_one(tmp_path: Path) -> None:
    config_map = next(yaml.safe_load_all((CLUSTER / "rayjob.yaml").read_text()))
    path = tmp_path / "pack.yaml"
    path.write_text(config_map["data"]["pack.yaml"])
    assert load_config(path, [], PackFile).pack.executor.kind == "ray"


def test_the_image_is_made_from_files_that_exist() -> None:
    text = (CLUSTER / "Dockerfile").read_text()
    for sources in re.findall(r"^COPY (.+) \S+$", text, re.M):
        assert all((ROOT / source).exists() for source in sources.split())
    assert "pip install --no-cache-dir --no-deps -r requirements.lock" in text
