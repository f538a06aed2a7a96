"""The launch files for training: that they parse, that what they name exists, that a signal reaches the ranks."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from jobs import cli
from schemas.strict import check_config, load_config
from train.config import OmniConfig

ROOT = Path(cli.__file__).parents[1]
CLUSTER = ROOT / "jobs/cluster"
SCRIPTS = ("train_torchrun.sh", "train_slurm.sbatch")
SLURM = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4"}


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
    executable(folder, "srun", f'{note}\nwhile [[ $1 == -* ]]; do shift; done\nexec "$@"')
    executable(folder, "scontrol", f"{note}\n[[ $1 != show ]] || printf 'n1\\nn2\\n'")
    executable(folder, "scancel", f"{note}\npkill -USR1 -f {folder}/omniloom")
    executable(folder, "nvidia-smi", "printf 'GPU 0\\nGPU 1\\n'")
    executable(folder, "omniloom", f"{note}\nexit ${{TRAIN_EXIT:-0}}")
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


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_parse_may_be_executed_and_say_how_they_are_used(script: str, stand_ins: Path) -> None:
    subprocess.run(["bash", "-n", str(CLUSTER / script)], check=True)
    assert os.access(CLUSTER / script, os.X_OK)
    code, calls, said = launch(script, stand_ins)
    assert code == 2 and "usage:" in said and "CONFIG" in said and not calls


def test_machines_without_a_scheduler(stand_ins: Path) -> None:
    code, calls, _ = launch("train_torchrun.sh", stand_ins, "my.yaml", "train.seed=1", TRAIN_EXIT="5")
    assert (code, calls) == (5, ["omniloom train run my.yaml --nproc 2 --nnodes 1 train.seed=1"])
    (stand_ins.parent / "calls").unlink()
    several = {"NNODES": "3", "RDZV": "host1:29400", "NPROC": "8"}
    code, calls, _ = launch("train_torchrun.sh", stand_ins, "my.yaml", **several)
    assert calls == ["omniloom train run my.yaml --nproc 8 --nnodes 3 --rdzv host1:29400"]
    code, _, said = launch("train_torchrun.sh", stand_ins, "my.yaml", NNODES="2")
    assert code == 2 and "needs RDZV" in said


@pytest.mark.parametrize(("ends_with", "requeued"), [(0, False), (2, False), (5, True)])
def test_a_slurm_job_that_can_be_resumed_is_queued_again(stand_ins: Path, ends_with: int, requeued: bool) -> None:
    code, calls, _ = launch(
        "train_slurm.sbatch", stand_ins, "my.yaml", "train.seed=1", TRAIN_EXIT=str(ends_with), **SLURM
    )
    assert code == ends_with
    assert "omniloom train run my.yaml --nproc 4 --nnodes 2 --rdzv n1:20077 train.seed=1" in calls
    assert ("scontrol requeue 77" in calls) == requeued


def test_the_signal_before_the_time_limit_reaches_the_ranks(stand_ins: Path, tmp_path: Path) -> None:
    body = f"echo started > {tmp_path}/started; trap 'sleep 0.3; exit 5' USR1; while true; do sleep 0.05; done"
    executable(stand_ins, "omniloom", body)
    shell = (
        f"bash {CLUSTER}/train_slurm.sbatch my.yaml & job=$!; until [ -e started ]; do sleep 0.05; done; sleep 0.2;"
        " kill -TERM $job; wait $job"
    )
    values = os.environ | {"PATH": f"{stand_ins}:{os.environ['PATH']}"} | SLURM
    answer = subprocess.run(["bash", "-c", shell], env=values, cwd=tmp_path, timeout=60, check=False)
    assert answer.returncode == 5
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[-2:] == ["scancel --signal=USR1 77", "scontrol requeue 77"]


def test_the_kubernetes_job_is_of_one_piece() -> None:
    config, service, job = yaml.safe_load_all((CLUSTER / "train_job.yaml").read_text())
    settings = check_config(yaml.safe_load(config["data"]["train.yaml"]), OmniConfig)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    args = container["args"]
    nodes = args[args.index("--nnodes") + 1]
    assert str(job["spec"]["completions"]) == str(job["spec"]["parallelism"]) == nodes
    assert args[args.index("--rdzv") + 1].startswith(f"{job['metadata']['name']}-0.{pod['subdomain']}:")
    assert pod["subdomain"] == service["metadata"]["name"]
    assert int(args[args.index("--nproc") + 1]) == container["resources"]["limits"]["nvidia.com/gpu"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == volumes
    assert settings.train.checkpoint.output_dir.startswith(mounts["data"])
    assert args[3] == f"{mounts['config']}/train.yaml"


@pytest.mark.parametrize("recipe", sorted((ROOT / "jobs/train").glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_load_strictly(recipe: Path) -> None:
    settings = load_config(recipe, [], OmniConfig)
    assert (settings.model.model_path is None) == recipe.stem.startswith("tiny")  # only the tiny ones begin at random
