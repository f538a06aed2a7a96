"""The parts of the headline benchmark, one after the other, whatever happens in one of them."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from jobs.bench.claims import Claim, report
from jobs.bench.headline_cold import measure_disk, write_checkpoint
from jobs.bench.headline_data import make_data
from jobs.bench.headline_jobs import free_port, run_ranks
from jobs.bench.headline_setup import TOP_LAYERS, Phase, Run, parse_setting

LORA = {
    "rank": 16,
    "alpha": 32,
    "lora_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
KEEP = "train.gradient_checkpointing.keep"
# what is not experts stays gathered for the whole step, whose micro-batches' gradients are reduced together; averages
# visit the GPU in the optimizer's step alone; attention, its projections and the experts' first half are not computed
# again
FAST = {
    "train.accelerator.fsdp_config.sync_every_micro_batch": False,
    "train.accelerator.fsdp_config.reshard_after_forward": False,
    "train.accelerator.fsdp_config.reshard_after_backward": False,
    "train.accelerator.offload_config.enable_optimizer": True,
    KEEP: "mlp",
    "train.gradient_checkpointing.keep_gb": 48.0,
    "train.gradient_checkpointing.audio_share": 0.0,
}
# twice as many rows; all batches of a step wait on the GPU
LONGER = FAST | {"train.gradient_checkpointing.keep_gb": 36.0, "data.dataloader.device_prefetch": 4}
# blocks compute long enough to hide gathers of whole experts, whose buffers are smaller than those of gathered rows
LONG = {"train.accelerator.offload_config.enable_activation": True, "train.accelerator.ep_size": 1}
ROOMY = {
    "train.accelerator.offload_config.enable_optimizer": True,
    KEEP: "projections",
    "train.gradient_checkpointing.keep_gb": 24.0,
}
LONGEST = LONG | {KEEP: "attention", "train.gradient_checkpointing.keep_gb": 10.0}
FROZEN = {"train.freeze_vit": True, "train.freeze_audio_tower": True}
LIMITS_S = {
    "data": 240.0, "profile": 150.0, "full": 300.0, "half": 200.0, "32k": 210.0, "64k": 240.0, "160k": 420.0,
    "lora": 240.0, "veomni": 150.0, "cold": 240.0,
}  # fmt: skip
KINDS = {"32k": ("4k", "32k"), "64k": ("4k", "64k")}  # part -> packed documents, or one document


class Bench:
    """Sizes, places and the claims so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.quick: bool = arguments.quick
        self.json: Path | None = arguments.json
        self.folder: Path = arguments.folder.resolve()
        self.nproc: int = arguments.nproc
        self.layers: int | None = arguments.layers
        self.whole: bool = arguments.whole
        self.limit: float | None = arguments.limit
        self.settings = dict(parse_setting(text) for text in arguments.set)
        self.title: str = arguments.title
        self.claims: list[Claim] = []
        if self.json is not None and arguments.add and self.json.exists():
            self.claims = [Claim(**values) for values in json.loads(self.json.read_text())]

    def add(self, claim: Claim) -> None:
        """Tells and writes it at once."""
        if self.title:
            claim = replace(claim, claim=f"{claim.claim} [{self.title}]")
        self.claims.append(claim)
        value = f"{claim.value:g} {claim.unit}"
        print(f"  {claim.claim}: {value} ({claim.goal or 'no goal'}: {claim.met}) {claim.conditions}", flush=True)
        if self.json is not None:
            self.json.write_text(json.dumps([asdict(c) for c in self.claims], indent=1) + "\n")

    def run(self, part: str, kind: str, phases: Sequence[Phase], layers: int = TOP_LAYERS, **more: Any) -> None:
        """Ranks of a part. more: of `Run`."""
        depth = 3 if self.quick else self.layers or layers
        settings = {**more.pop("settings", {}), **self.settings}
        if self.quick and settings.get(KEEP) == "mlp":
            settings[KEEP] = "projections"  # only Triton's experts leave more
        nproc = more.pop("nproc", self.nproc)
        made = Run(
            part=part, kind=kind, quick=self.quick, nproc=nproc, layers=depth, out=str(self.folder / part),
            data=str(self.folder / "data"), phases=tuple(self.sized(phase) for phase in phases), settings=settings,
            **more,
        )  # fmt: skip
        run_ranks(made, self.limit or LIMITS_S[part], self.add, {"MASTER_PORT": free_port()})

    def sized(self, phase: Phase) -> Phase:
        """With --quick short sequences and few steps."""
        if not self.quick:
            return phase
        tokens = {"4k": 1024, "4k half": 1024, "32k": 1024, "64k": 1024, "160k": 2048}[phase.documents]
        return replace(phase, tokens=tokens, micro=min(phase.micro, 2), warm=1, steps=1)

    def data(self, kind: str) -> None:
        """Made once."""
        began = time.perf_counter()
        found = make_data(self.folder / "data", kind, quick=self.quick)
        took = time.perf_counter() - began
        said = ", ".join(f"{name} {value:,.4g}" for name, value in found.items())
        self.add(Claim(f"data: documents of {kind} drawn and packed", round(took, 1), "s", "", None, said))


def profile_part(bench: Bench) -> None:
    bench.data("4k")
    bench.run("profile", "train", [Phase("1 micro-batch of 16k", "4k", 16384, 1, 3, 4, watched=True)], layers=8)


def full_part(bench: Bench) -> None:
    """One micro-batch a step first, which is when kernels are compiled."""
    bench.data("4k")
    phases = [
        Phase("1 micro-batch of 16k a step", "4k", 16384, 1, 2, 3),
        Phase("8 micro-batches of 16k a step", "4k", 16384, 8, 1, 3, watched=True),
    ]
    bench.run("full", "train", phases, settings=FAST)


def half_part(bench: Bench) -> None:
    bench.data("4k half")
    phase = Phase("8 micro-batches of 16k a step", "4k half", 16384, 8, 1, 3)
    bench.run("half", "train", [phase], settings=FAST)


def longer_part(part: str, tokens: int, micro: int, settings: dict[str, Any]) -> Callable[[Bench], None]:
    def measure(bench: Bench) -> None:
        kind = KINDS[part][bench.whole]
        bench.data(kind)
        what = "one document" if bench.whole else "documents of 4k"
        phase = Phase(f"{micro} micro-batches of {part} a step, {what}", kind, tokens, micro, 1, 2)
        bench.run(part, "train", [phase], settings=settings)

    return measure


def longest_part(bench: Bench) -> None:
    bench.data("160k")
    phase = Phase("one sample of 163,840 tokens, sp=2", "160k", 163840, 1, 1, 1)
    bench.run("160k", "train", [phase], sp=2, settings=LONGEST)


def lora_part(bench: Bench) -> None:
    bench.data("4k")
    settings = {"model.lora_config": LORA, **FROZEN, "train.optimizer.type": "adamw", "train.optimizer.lr": 1e-4}
    settings[KEEP] = "mlp"
    phases = [
        Phase("1 micro-batch of 16k a step", "4k", 16384, 1, 2, 3, watched=True),
        Phase("8 micro-batches of 16k a step", "4k", 16384, 8, 1, 2),
    ]
    bench.run("lora", "train", phases, nproc=1, settings=settings)


def veomni_part(bench: Bench) -> None:
    """Each model in processes of its own: they do not share a GPU's memory."""
    from jobs.bench.headline_veomni import DIVIDED, SUBJECTS, compare  # noqa: PLC0415  # its peer may be missing

    first, told = len(bench.claims), set[str]()
    for subject in SUBJECTS if bench.nproc > 1 else (name for name in SUBJECTS if name != DIVIDED):
        options = {"subject": subject}
        try:
            bench.run("veomni", "veomni", [], layers=8, options=options)
        except Exception as error:  # noqa: BLE001  # the others are measured all the same
            bench.add(failure(f"veomni: {subject}", error))
        for claim in compare(bench.claims[first:], bounded=not bench.quick):
            if claim.claim not in told:
                told.add(claim.claim)
                bench.add(claim)


def cold_part(bench: Bench) -> None:
    bench.data("4k")
    layers = 3 if bench.quick else bench.layers or 8
    folder = bench.folder / "cold" / "weights"
    size = write_checkpoint(folder, layers, quick=bench.quick)
    disk = measure_disk(folder)
    bench.add(disk)
    phase = Phase("first step", "4k", 16384, 1, 0, 1)
    options = {"weights": str(folder), "bytes": size, "disk": disk.value}
    bench.run("cold", "cold", [phase], layers=layers, options=options)


PARTS: dict[str, Callable[[Bench], None]] = {
    "profile": profile_part,
    "full": full_part,
    "half": half_part,
    "32k": longer_part("32k", 32768, 4, LONGER),
    "64k": longer_part("64k", 65536, 2, LONG | ROOMY),
    "160k": longest_part,
    "lora": lora_part,
    "veomni": veomni_part,
    "cold": cold_part,
}


def failure(what: str, error: Exception) -> Claim:
    said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return Claim(f"{what}: runs to its end", 0, "", "does", False, said)


def _leave(*_: object) -> NoReturn:
    """Ends the ranks, too, which are in sessions of their own."""
    raise SystemExit(128 + signal.SIGTERM)


def run_parts(arguments: argparse.Namespace) -> int:
    """The exit code: 0 when all claims hold. arguments: of `jobs.bench.headline`."""
    wanted = arguments.only or list(PARTS)
    needed = 1 if set(wanted) <= {"lora"} else arguments.nproc
    if not arguments.quick and torch.cuda.device_count() < needed:
        print(f"jobs.bench.headline needs {needed} CUDA devices; --quick tries it on CPUs", file=sys.stderr)
        return 2
    bench = Bench(arguments)
    signal.signal(signal.SIGTERM, _leave)
    for name in wanted:
        began = time.monotonic()
        print(f"{name}: begins", flush=True)
        try:
            PARTS[name](bench)
        except Exception as error:  # noqa: BLE001  # told as a claim that does not hold
            traceback.print_exc()
            bench.add(failure(name, error))
        print(f"{name}: took {time.monotonic() - began:.1f} s", flush=True)
    return 0 if report("headline", bench.claims, arguments.json) else 1
