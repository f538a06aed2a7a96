"""Streaming conversion of a Megatron checkpoint with Adam states: memory, bytes read and time, beside a plain copy of
the same bytes and beside loading everything.

    python -m jobs.bench.convert [--quick] [--json FILE] [--folder DIR] [--repeats N]

Writes about four times the weights (checkpoint, base, output, copy) into a temporary folder and removes it.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from convert.safetensors_io import SafetensorsReader
from jobs.bench.claims import Claim, at_most, report
from jobs.bench.moe_checkpoint import Size, write_base, write_megatron

FULL = Size(layers=3, experts=128, hidden=2048, moe=768, vocab=151936)  # three layers of a 30B-A3B
QUICK = Size(layers=2, experts=16, hidden=1024, moe=384, vocab=32768)
FIXED_MB = 600
# what a child runs: a module's command line; at its end the high water of its own memory and the time since its imports
CHILD = """
import json, sys, time
from pathlib import Path
import {module} as module
began = time.perf_counter()
module.main({arguments})
status = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024
Path(sys.argv[1]).write_text(json.dumps({{"peak": peak, "seconds": time.perf_counter() - began}}))
"""


@dataclass(frozen=True)
class Run:
    """wall_s: of the whole process; seconds: behind its imports; peak: bytes of resident memory."""

    wall_s: float
    seconds: float
    peak: int
    said: str


def run_child(module: str, arguments: str, notes: Path) -> Run:
    """Runs a module's main in a process of its own."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(module=module, arguments=arguments), str(notes)],
        check=True,
        capture_output=True,
        text=True,
    )
    wall_s = time.perf_counter() - began
    measured = json.loads(notes.read_text())
    return Run(wall_s, measured["seconds"], measured["peak"], done.stdout)


def convert(checkpoint: Path, base: Path, output: Path, verify: bool, notes: Path) -> Run:
    words = [str(checkpoint), str(base), str(output)]
    run = run_child("jobs.bench.convert_once", f"*{[*words, verify]!r}", notes)
    return run


def copy(files: Sequence[Path], folder: Path) -> float:
    """Seconds of cp and sync."""
    folder.mkdir()
    began = time.perf_counter()
    targets = [str(folder / file.name) for file in files]
    subprocess.run(["cp", "--reflink=never", "--sparse=never", *map(str, files), str(folder)], check=True)
    subprocess.run(["sync", *targets, str(folder)], check=True)
    return time.perf_counter() - began


def evict(*folders: Path) -> None:
    """Drops the files of these folders from the page cache, so that every run reads from the disk."""
    for folder in folders:
        for path in folder.iterdir():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(here: Path, size: Size, repeats: int, bounded: bool) -> list[Claim]:
    """All claims. bounded: whether times have goals; in a small run the start of the interpreter is most of them."""
    checkpoint, base = write_megatron(here / "megatron", size), write_base(here / "base", size)
    notes, output, other = here / "notes.json", here / "output", here / "copy"
    weights, apparent = size.weight_bytes, sum(path.stat().st_size for path in checkpoint.iterdir())
    times: dict[str, list[float]] = {"cp": [], "stream": [], "verified": [], "load all": []}
    peaks: dict[str, list[int]] = {"stream": [], "verified": [], "load all": []}
    read = 0.0
    for _ in range(repeats):
        evict(checkpoint, base)
        times["cp"].append(copy([checkpoint / "__0_0.distcp"], other))
        shutil.rmtree(other)
        for name, verify in (("stream", False), ("verified", True)):
            shutil.rmtree(output, ignore_errors=True)
            evict(checkpoint, base)
            done = convert(checkpoint, base, output, verify, notes)
            times[name].append(done.wall_s)
            peaks[name].append(done.peak)
            read = max(read, float(done.said.split()[-1]))
        evict(checkpoint, base)
        everything = run_child(
            "jobs.bench.load_all", f"*map(Path, {[str(checkpoint), str(base), str(other)]!r})", notes
        )
        times["load all"].append(everything.wall_s)
        peaks["load all"].append(everything.peak)
        same = filecmp.cmp(output / "config.json", base / "config.json", shallow=False) and equal_weights(output, other)
        shutil.rmtree(other)
    assert same, "the two converters disagree"
    wall = {name: min(values) for name, values in times.items()}  # other work on the machine only adds
    largest = 2 * size.vocab * size.hidden
    sizes = (
        f"{weights / 1e9:.2f} GB of bf16 weights in a checkpoint of {apparent / 1e9:.1f} GB, "
        f"largest tensor {largest / 1e6:.0f} MB"
    )
    how = f"{sizes}; page cache dropped before each run, fastest of {repeats}; cp + sync {wall['cp']:.1f} s"
    claims = [
        at_most("bytes read of the source / bytes of its weights", read / weights, 1.05, "x", sizes),
    ]
    for name, bound in (("stream", 1.5), ("verified", 3.0)):
        what = "not verified" if name == "stream" else "verified against the base"
        limit = FIXED_MB + largest / 1e6
        claims.append(at_most(f"peak memory, {what}", max(peaks[name]) / 1e6, limit, "MB", sizes))
        ratio = wall[name] / wall["cp"]
        claim = at_most(f"wall time, {what} / cp + sync of the same bytes", ratio, bound, "x", how)
        claims.append(claim if bounded else Claim(claim.claim, claim.value, "x", "", None, how))
    claims.append(Claim("peak memory, load all", round(max(peaks["load all"]) / 1e6, 1), "MB", "", None, sizes))
    claims.append(Claim("wall time, load all / cp + sync", round(wall["load all"] / wall["cp"], 2), "x", "", None, how))
    return claims


def equal_weights(one: Path, other: Path) -> bool:
    """True when two model files hold the same tensors, byte for byte."""
    readers = SafetensorsReader(one), SafetensorsReader(other)
    return readers[0].tensors == readers[1].tensors and all(
        torch.equal(readers[0].read(name), readers[1].read(name)) for name in readers[0].tensors
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, under 45 s on 2 cores")
    parser.add_argument("--json", type=Path, help="write the claims there")
    parser.add_argument("--folder", type=Path, help="where to make the temporary folder (20 GB)")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    size, repeats = (QUICK, 1) if arguments.quick else (FULL, arguments.repeats)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        claims = measure(Path(folder), size, repeats, bounded=not arguments.quick)
    return 0 if report("convert", claims, arguments.json) else 1


if __name__ == "__main__":
    sys.exit(main())
