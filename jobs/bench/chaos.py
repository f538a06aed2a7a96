"""A packing job that is killed again and again ends as if nothing had happened.

    python -m jobs.bench.chaos [--kills 20] [--rows 200] [--bad 10] [--seed 0] [--json FILE] [--quick]

Packs `rows` rows of one real clip in short spans, `bad` of them broken in different ways, once undisturbed and once
with SIGKILL to the whole job at random moments; then compares counts and bytes. Exit code 1 when they differ.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jobs.bench.claims import Claim, report
from pack.guard import read_crumbs
from pack.plan_file import load_plan
from pack.readme import plural
from pack.rejects import read_plan_commits
from pack.storage import LocalStorage
from schemas.dataset import Totals, add_totals

KEPT = (".mds", ".parquet", "index.json", "rejects.jsonl")
PLUGIN = '''"""A preprocessor that ends its process on some rows."""
import os
import time

from schemas.registry import PREPROCESSOR_REGISTRY, conv_preprocess


@PREPROCESSOR_REGISTRY.register("chaos")
def chaos(conversations, **kwargs):
    deed = kwargs["row"].get("deed")
    if deed == "exit":
        os._exit(7)
    if deed == "raise":
        raise ZeroDivisionError("on purpose")
    return conv_preprocess("qwen_omni_offline_av", conversations, **kwargs)
'''


def write_job(folder: Path, clip: Path, rows: int, bad: int, seed: int) -> Path:
    """Manifest, plugin and configuration; the configuration's path. Bad rows: a third each exits, raises, has no
    file."""
    chance = random.Random(seed)
    broken = dict.fromkeys(chance.sample(range(rows), bad), "")
    for k, place in enumerate(broken):
        broken[place] = ("exit", "raise", "missing")[k % 3]
    with open(folder / "m.jsonl", "w", encoding="utf-8") as out:
        for i in range(rows):
            start = i % 40 * 0.1
            medium = {"path": str(clip), "start": start, "end": start + 1.0}
            row = {"id": f"row{i:04d}", "videos": [medium], "conversations": [{"from": "human", "value": "<video>?"}]}
            if broken.get(i) == "missing":
                medium["path"] = "gone.mp4"
            elif i in broken:
                row["deed"] = broken[i]
            out.write(json.dumps(row) + "\n")
    (folder / "chaos_plugin.py").write_text(PLUGIN)
    config = folder / "c.yaml"
    config.write_text(
        f"pack:\n  manifest: {folder}/m.jsonl\n  output: {folder}/OUTPUT\n  source_name: chaos\n"
        "  imports: [chaos_plugin]\n  executor: {kind: local, workers: 2}\n  partition: {target_mb: 3}\n"
        "  rows: {max_bad_ratio: 1.0}\n"
    )
    return config


def start(config: Path, output: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "jobs.cli", "pack", "run", str(config), f"pack.output={config.parent}/{output}"]
    paths = os.pathsep.join([str(config.parent), os.getcwd(), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def outcome(folder: Path) -> tuple[Totals, dict[str, bytes]]:
    """Totals and the bytes that must not depend on how the job ran."""
    storage = LocalStorage(folder)
    commits = read_plan_commits(storage, load_plan(storage))
    found = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.name.endswith(KEPT)}
    return add_totals(commit.record.totals for commit in commits), found


def until_packing(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Waits for this run's first breadcrumb, or for its end."""
    began = time.time()
    while process.poll() is None and all(written < began for _, _, written in read_crumbs(folder / "_tmp")):
        time.sleep(0.02)


@dataclass
class Ending:
    """A run that was let to its end after some kills."""

    code: int
    totals: Totals
    files: dict[str, bytes]
    left: int


def kill_often(config: Path, kills: int, seed: int, table: Table) -> list[Ending]:
    """Runs the job and kills it, `kills` times in all. A run that ends before its kill is looked at, its output
    removed, and the job begun anew."""
    chance = random.Random(seed)
    folder = config.parent / "killed"
    endings = []
    number = 0
    while number < kills:
        process = start(config, "killed")
        # a quarter before the first row, the rest inside the packing
        if number % 4:
            until_packing(process, folder)
        wait = chance.uniform(0, 2.5)
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            # every other time only the job's own process, else its workers, too
            (os.killpg if number % 2 else os.kill)(process.pid, signal.SIGKILL)
            process.wait()
            number += 1
            done, attempts = len(LocalStorage(folder).committed_names()), len(list((folder / "_tmp").glob("*")))
            what = "SIGKILL to the " + ("group" if number % 2 == 0 else "process")
            table.add_row(str(number), what, str(done), str(attempts))
            continue
        endings.append(end_of(folder, process.returncode))
        table.add_row("", "ended by itself, begun anew", str(len(LocalStorage(folder).committed_names())), "")
        shutil.rmtree(folder)
    return [*endings, end_of(folder, start(config, "killed").wait())]


def end_of(folder: Path, code: int) -> Ending:
    return Ending(code, *outcome(folder), len(list((folder / "_tmp").glob("*"))))


def exactly(claim: str, found: set[int], wanted: int, unit: str, conditions: str) -> Claim:
    """A claim that holds when every ending has the wanted number; shows one that has not, if there is one."""
    wrong = sorted(found - {wanted})
    return Claim(claim, wrong[0] if wrong else wanted, unit, f"== {wanted}", not wrong, conditions)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--bad", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="2 kills and 24 rows")
    parser.add_argument("--clip", type=Path, default=None, help="a video of at least 5 s; default: one of the demo's")
    parser.add_argument("--json", type=Path, default=None)
    asked = parser.parse_args()
    kills, rows, bad = (2, 24, 3) if asked.quick else (asked.kills, asked.rows, asked.bad)
    clip = asked.clip or Path(str(files("jobs") / "assets" / "bunny.mp4"))
    table = Table("kill", "what", "partitions committed", "attempts left")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        config = write_job(Path(name), clip.resolve(), rows, bad, asked.seed)
        calm = end_of(config.parent / "calm", start(config, "calm").wait())
        endings = kill_often(config, kills, asked.seed + 1, table)
    Console().print(table)
    conditions = f"{kills} kills, {plural(len(endings), 'ending')}, {rows} rows, {bad} bad, {len(calm.files)} files"
    conditions += f", {time.monotonic() - began:.0f} s"
    differing = {n for e in endings for n in calm.files.keys() | e.files.keys() if calm.files.get(n) != e.files.get(n)}
    claims = [
        exactly("rows packed", {e.totals.rows_packed for e in endings}, rows - bad, "rows", conditions),
        exactly("rows rejected", {sum(e.totals.rejected.values()) for e in endings}, bad, "rows", conditions),
        exactly("files that differ", {len(differing)}, 0, "files", ", ".join(sorted(differing)[:3]) or conditions),
        exactly("attempts left over", {e.left for e in endings}, 0, "folders", conditions),
        exactly("exit codes", {e.code for e in endings}, 0, "", conditions),
    ]
    return 0 if report("Killed at random", claims, asked.json) else 1


if __name__ == "__main__":
    sys.exit(main())
