"""What trainings do to the memory of GPUs: where contexts are opened, what an evaluation leaves reserved, what is
written when memory runs out, and what the profiler sees. On a CPU the same trainings run without the memory."""

from __future__ import annotations

import gc
import gzip
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.errors import OmniloomError
from schemas.strict import check_config
from tests import dist as processes
from tests.environment import environment
from tests.train.data.loading import write_clips, write_text
from tests.train.test_defaults_gpu import GPUS, values_of
from train.callbacks.base import Callback
from train.config import OmniConfig, OpsImplementationConfig
from train.data.batch import Batch
from train.launch import Launch, launch, under_torchrun
from train.mesh import Mesh
from train.run_cli import outcome_told
from train.trainer import BaseTrainer, VLMTrainer, make_trainer

FP32 = {"fsdp_config": {"mixed_precision": {"enable": False}}}
RUNS, SETTLED = 6, 2  # evaluations, and after how many all memory is there that they need
FAILS_AT, ENDS_S, STARTS_S = 2, 60.0, 90.0
MODULE = "tests.train.test_device_memory_gpu"
OUT_OF_MEMORY = "there is no more memory"

on_cpu = pytest.param(
    "cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a training takes the GPU that is there")
)


def on_gpus(count: int) -> Any:
    why = f"needs {count} CUDA devices, there are {GPUS}"
    return pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(count > GPUS, reason=why)])


def config_of(folder: Path, **train: Any) -> OmniConfig:
    """Without worker processes, which take seconds to start."""
    values = values_of(folder, **train)
    values["data"]["dataloader"] = {"num_workers": 0}
    return check_config(values, OmniConfig)


def contexts() -> list[bool]:
    """For each GPU, whether this process, which uses one, has a context there: hundreds of megabytes of its memory."""
    if not torch.cuda.is_available():
        return []
    has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
    return [bool(has_context(number)) for number in range(torch.cuda.device_count())]


def _contexts_of_a_rank(config: OmniConfig) -> dict[str, Any]:
    """At the moments when something could have opened one, and where the batches of a step were."""
    trainer = make_trainer(config)
    trainer.build()
    found: dict[str, Any] = {"after building": contexts()}
    steps = iter(trainer.train_dataloader)
    batches = next(steps).micro_batches
    found["after a batch"] = contexts()
    found["devices"] = {str(tensor.device) for batch in batches for tensor in _on_device(batch)}
    steps.close()  # type: ignore[attr-defined]
    assert trainer.evaluator is not None
    trainer.evaluator.run(trainer.model)
    found["after an evaluation"] = contexts()
    return found


def _on_device(batch: Batch) -> list[torch.Tensor]:
    assert batch.features is not None
    return [batch.ids, batch.labels, batch.features.patches, batch.features.mel]


@pytest.mark.parametrize("device", [on_cpu, on_gpus(2)])
def test_a_rank_opens_no_context_on_the_gpu_of_another(tmp_path: Path, device: str) -> None:
    """Without worker processes; with them: `parallel.test_ranks_gpu`."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    for rank, seen in enumerate(processes.run(2, _contexts_of_a_rank, config_of(tmp_path), backend=backend)):
        assert seen.pop("devices") == {f"cuda:{rank}" if device == "cuda" else "cpu"}
        assert len(seen) == 3 and seen == dict.fromkeys(seen, own_context(rank, device)), f"rank {rank}: {seen}"


def own_context(rank: int, device: str) -> list[bool]:
    """What `contexts` is where a rank has one on its own GPU alone."""
    return [number == rank for number in range(GPUS)] if device == "cuda" else []


class OnCpu(VLMTrainer):
    """Also where there is a GPU."""

    def build_distributed(self) -> None:
        super().build_distributed()
        self.mesh = Mesh.make(self.args.train.accelerator, 1, 0, torch.device("cpu"))


@pytest.mark.parametrize("device", [on_cpu, on_gpus(1)])
def test_evaluations_take_no_more_memory_each_time(tmp_path: Path, device: str) -> None:
    """Of two micro-batches, the second of which is made while the first run of the model takes its time: so the first
    evaluation needs as much as any."""
    write_clips(tmp_path / "few", 4, seed=1)
    write_text(tmp_path / "other.jsonl", 6, first=200)
    sources = [
        {"path": str(tmp_path / "few"), "name": "few"},
        {"path": str(tmp_path / "other.jsonl"), "name": "other", "source_name": "openai_messages"},
    ]
    keys: dict[str, Any] = {"accelerator": FP32, "evaluation": {"sources": sources, "max_batches": 2}}
    # what would be chosen in float32 is compiled for half a minute
    trainer = make_trainer(with_ops(config_of(tmp_path / "here", **keys), attn_implementation="sdpa"))
    trainer.build()
    assert trainer.mesh.device.type == device and trainer.evaluator is not None
    losses, reserved = [], []
    for _ in range(RUNS):
        losses.append(trainer.evaluator.run(trainer.model))
        gc.collect()
        if device == "cuda":
            torch.cuda.synchronize()
            reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1:] == reserved[SETTLED - 1 : SETTLED], reserved
    references = dict.fromkeys(OpsImplementationConfig.model_fields, "eager")
    reference = OnCpu(with_ops(config_of(tmp_path / "cpu", **keys), **references))
    reference.build()
    assert reference.evaluator is not None
    expected = reference.evaluator.run(reference.model)
    assert expected.keys() == {"loss", "loss/few", "loss/other"}
    for found in losses:
        assert found == pytest.approx(expected, rel=1e-3)


def with_ops(config: OmniConfig, **chosen: str) -> OmniConfig:
    """The configuration with implementations of operations."""
    ops = config.model.ops_implementation.model_copy(update=chosen)
    return config.model_copy(update={"model": config.model.model_copy(update={"ops_implementation": ops})})


class Exhausts(Callback):
    """Fails in step 2 as an allocation does. recorded: whether memory was being recorded then."""

    def __init__(self) -> None:
        self.recorded: bool | None = None

    def on_step_end(self, trainer: BaseTrainer, result: Any) -> None:
        if trainer.state.step == 2:
            self.recorded = recording()
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)


def recording() -> bool:
    return torch.cuda.is_available() and bool(torch._C._cuda_isHistoryEnabled())


def entries() -> int:
    """Of the record of allocations, on all GPUs."""
    return sum(len(trace) for trace in torch.cuda.memory._snapshot()["device_traces"])


@pytest.mark.parametrize("device", [on_cpu, on_gpus(1)])
def test_what_held_the_memory_is_written_when_a_step_runs_out_of_it(tmp_path: Path, device: str) -> None:
    exhausts = Exhausts()
    trainer = make_trainer(config_of(tmp_path), callbacks=[exhausts])
    with pytest.raises(torch.OutOfMemoryError, match=OUT_OF_MEMORY) as caught:
        trainer.train()
    assert trainer.mesh.device.type == device and trainer.state.step == 2
    folder = tmp_path / "output" / "memory"
    notes = " ".join(getattr(caught.value, "__notes__", []))
    assert "failed, too" not in notes
    assert not recording() and exhausts.recorded == (device == "cuda")
    if device == "cpu":
        assert not folder.exists() and "what held the memory" not in notes
        return
    assert f"what held the memory: {folder / 'rank_0.pickle'}" in notes
    snapshot = pickle.loads((folder / "rank_0.pickle").read_bytes())
    assert snapshot["segments"] and any(snapshot["device_traces"])
    assert "Allocated memory" in (folder / "rank_0.txt").read_text()
    before = entries()
    assert torch.empty(1 << 28, dtype=torch.uint8, device=device).numel() and entries() == before


@pytest.mark.parametrize("device", [on_cpu, on_gpus(1)])
def test_the_profiler_sees_the_steps_that_it_is_to_see(tmp_path: Path, device: str) -> None:
    profile = {"enable": True, "start_step": 1, "end_step": 3}
    checkpoint = {"output_dir": str(tmp_path / "output"), "save_hf_weights": False}
    trainer = make_trainer(config_of(tmp_path, profile=profile, checkpoint=checkpoint, evaluation={}))
    trainer.train()
    assert trainer.mesh.device.type == device
    (trace,) = (tmp_path / "output" / "profile").iterdir()
    assert trace.name == "trace_step_3.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    kinds = {event.get("cat") for event in events}
    assert {"cpu_op", "kernel"} <= kinds if device == "cuda" else "cpu_op" in kinds, kinds
    updates = [event for event in events if event.get("cat") != "ac2g" and "AdamW.step" in event.get("name", "")]
    assert len({(event["cat"], event["ts"]) for event in updates if event["cat"] in ("cpu_op", "user_annotation")}) == 2


class FailsOnOne(Callback):
    """On rank 1, where the second step begins, while the others are in it. Each rank leaves its process number, and
    its contexts at that moment, of a training with worker processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_begin(self, trainer: BaseTrainer) -> None:
        rank = trainer.mesh.rank
        if trainer.state.step != FAILS_AT - 1:
            return
        (self.folder / f"rank_{rank}.json").write_text(json.dumps({"pid": os.getpid(), "contexts": contexts()}))
        if rank == 1:
            (self.folder / "failed").write_text(str(time.time()))
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)


@dataclass(frozen=True)
class Ranks(Launch):
    """Of `run_failing` in the place of the command."""

    def command(self, arguments: Sequence[str]) -> list[str]:
        return [*super().command([])[:-1], MODULE, *arguments]


class Failing:
    """A training of two ranks that `run_failing` starts, in the background, as it takes half a minute to end."""

    def __init__(self, device: str, folder: Path) -> None:
        self.folder = folder
        file = folder / "train.json"
        file.write_text(check_config(values_of(folder, evaluation={}), OmniConfig).model_dump_json())
        variables = environment(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
        variables |= {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        with (folder / "log").open("w") as log:
            command = [sys.executable, "-m", MODULE, str(file), str(folder)]
            self.process = subprocess.Popen(command, env=variables, stdout=log, stderr=log)

    def end(self) -> dict[str, Any]:
        """What it came to: said, time."""
        try:
            code = self.process.wait(ENDS_S + STARTS_S)
        except subprocess.TimeoutExpired:
            code = None
        assert code == 0, (self.folder / "log").read_text()
        found: dict[str, Any] = json.loads((self.folder / "ended.json").read_text())
        return found


def run_failing(config: str, folder: str) -> None:
    """The launcher, and each rank that it starts; the launcher leaves what was raised, and when."""
    if under_torchrun():
        settings = check_config(json.loads(Path(config).read_text()), OmniConfig)
        with outcome_told(int(os.environ["RANK"])):
            make_trainer(settings, callbacks=[FailsOnOne(Path(folder))]).train()
        return
    said = ""
    try:
        launch(Ranks(2), [config, folder])
    except OmniloomError as error:
        said = str(error)
    Path(folder, "ended.json").write_text(json.dumps({"said": said, "time": time.time()}))


if __name__ == "__main__":
    run_failing(*sys.argv[1:])
