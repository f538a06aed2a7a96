"""Part `cold`: from launch to the first step with weights on the local disk, against what the disk reads."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from jobs.bench.claims import Claim
from jobs.bench.headline_setup import Run, model_values, run_config
from train.callbacks.base import Callback
from train.model_build import parallelize
from train.models.spec import read_model
from train.ops.registry import Device, bind_ops, resolve
from train.step import StepResult
from train.trainer import BaseTrainer, VLMTrainer

SHARD_BYTES = 4_000_000_000
BLOCK = 16 << 20  # bytes read at a time
READERS = 8
NOISE = 1 << 24  # elements that tensors are cut from


def write_checkpoint(folder: Path, layers: int, *, quick: bool) -> int:
    """A thinker in the hub's layout, experts apart as released, of random bfloat16; its bytes. Written once."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(model_values(layers, quick=quick)))
        where: dict[str, str] = {}
        for number, tensors in enumerate(shards(hub_tensors(folder))):
            name = f"model-{number + 1:05d}.safetensors"
            save_file(tensors, folder / name, metadata={"format": "pt"})
            where |= dict.fromkeys(tensors, name)
        index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def hub_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Of the model that config.json describes."""
    source = read_model(folder / "config.json")
    device = Device("cpu", None)
    with torch.device("meta"):
        model: nn.Module = source.spec.build(source.config, bind_ops(resolve({}, device, "float32"), device, "float32"))
    noise = torch.randn(NOISE, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()

    def some(*shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        return noise.repeat(-(-size // NOISE))[:size].view(shape).clone()

    for name, parameter in model.named_parameters():
        stem, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj"):
            yield (
                f"thinker.{name}",
                torch.ones(parameter.shape).bfloat16() if "norm" in name else some(*parameter.shape),
            )
            continue
        experts, rows, columns = parameter.shape
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
        for expert in range(experts):
            for part in parts:
                yield f"thinker.{stem}.{expert}.{part}.weight", some(rows // len(parts), columns)


def shards(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Files' worth of them."""
    held: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        held[name] = tensor
        size += tensor.nbytes
        if size >= SHARD_BYTES:
            yield held
            held, size = {}, 0
    if held:
        yield held


def forget(folder: Path) -> None:
    """Takes the files out of the page cache, as far as the kernel does what it is told."""
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def measure_disk(folder: Path) -> Claim:
    """Reading all files past the page cache where the file system allows it, several at a time."""
    forget(folder)
    files = sorted(folder.glob("*.safetensors"))
    blocks = [(path, start) for path in files for start in range(0, path.stat().st_size, BLOCK)]
    began = time.perf_counter()
    with ThreadPoolExecutor(READERS) as pool:
        read = list(pool.map(lambda block: read_block(*block), blocks))
    took = time.perf_counter() - began
    size, direct = sum(count for count, _ in read), all(plain for _, plain in read)
    forget(folder)
    how = "O_DIRECT" if direct else "through the page cache, emptied by posix_fadvise"
    said = f"{size / 1e9:.2f} GB in {took:.2f} s, {READERS} threads, blocks of {BLOCK >> 20} MiB, {how}"
    return Claim("cold: what the disk reads", round(size / took / 1e9, 3), "GB/s", "", None, said)


def read_block(path: Path, start: int) -> tuple[int, bool]:
    """(bytes, whether past the page cache)."""
    buffer = mmap(-1, BLOCK)  # begins at a page
    for direct in (True, False):
        try:
            descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        except OSError:
            continue
        try:
            return os.preadv(descriptor, [buffer], start), direct
        except OSError:
            if not direct:
                raise
        finally:
            os.close(descriptor)
    raise OSError(f"{path} cannot be read")


class ColdTrainer(VLMTrainer):
    """Notes when its weights are there; writes no checkpoint."""

    loading_s = 0.0

    def build_parallel(self) -> None:
        began = time.perf_counter()
        rows = self.args.rows_per_rank
        parallelize(self.model, self.mesh, self.args.train, self.files, fill=True, lora=self.lora, rows=rows)
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize()
        self.loading_s = time.perf_counter() - began

    def save(self, *, final: bool = False) -> Path:
        return Path(self.args.train.checkpoint.output_dir)


class FirstStep(Callback):
    """When the first step is over."""

    done: float = 0.0
    began: float = 0.0

    def on_step_begin(self, trainer: BaseTrainer) -> None:
        self.began = self.began or time.time()

    def on_step_end(self, trainer: BaseTrainer, result: StepResult) -> None:
        if trainer.mesh.device.type == "cuda":
            torch.cuda.synchronize()
        self.done = self.done or time.time()


@contextmanager
def compiling() -> Iterator[list[float]]:
    """Seconds that each kernel took which Triton compiled meanwhile; those from its cache are left out."""
    from triton import knobs  # noqa: PLC0415  # heavy, and not everywhere

    seconds: list[float] = []

    def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            seconds.append(times.total / 1e6)

    before, knobs.compilation.listener = knobs.compilation.listener, listen
    try:
        yield seconds
    finally:
        knobs.compilation.listener = before


def first_step(run: Run, started: float, tell: Callable[[Claim], None]) -> None:
    """One step from weights on disk. started: when the processes were launched."""
    options: dict[str, Any] = dict(run.options)
    imported = time.time()
    settings = {**run.settings, "model.model_path": options["weights"], "train.max_steps": 1}
    config = run_config(replace(run, settings=settings), run.phases[0])
    watch = FirstStep()
    trainer = ColdTrainer(config, callbacks=[watch])
    trainer.build()
    built = time.time()
    with compiling() as compiled:
        trainer.train()
    if trainer.mesh.rank:
        return
    size, disk = float(options["bytes"]) / 1e9, float(options["disk"])
    rate = size / trainer.loading_s
    took = [
        ("imports", imported - started),
        ("building without weights", built - imported - trainer.loading_s),
        ("weights", trainer.loading_s),
        ("waiting for the first batch", watch.began - built),
        ("first step", watch.done - watch.began),
        (f"of it compiling {len(compiled)} kernels", sum(compiled)),
    ]
    said = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in took)
    layers = f"{run.layers} layers, {size:.2f} GB, {run.nproc} ranks"
    tell(
        Claim(
            "cold: from launch to the end of the first step",
            round(watch.done - started, 1),
            "s",
            "",
            None,
            f"{said}; {layers}",
        )
    )
    share = f"{rate:.2f} GB/s of {disk:.2f}; {layers}; page cache emptied before"
    tell(Claim("cold: weights on the GPUs / what the disk reads", round(rate / disk, 3), "x", "", None, share))
