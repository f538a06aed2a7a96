"""The checks of `omniloom doctor`.

Packages are looked up by name, never imported by a statement: any of them may be missing, and that is the finding.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

Status = Literal["ok", "warn", "fail"]

STREAMING = "mosaicml-streaming"
STREAMING_INSTALL = "pip install --no-deps mosaicml-streaming==0.13.0"
NEEDED_DECODERS = (
    "h264",
    "hevc",
    "vp8",
    "vp9",
    "av1",
    "mpeg4",
    "mjpeg",
    "aac",
    "mp3",
    "opus",
    "vorbis",
    "flac",
    "pcm_s16le",
)
VITAL_DECODERS = ("h264", "aac")
FILTERS = {"bwdif": "interlaced clips"}
STORE_PACKAGES = {"s3fs": "s3://", "gcsfs": "gs://"}
GIB = 2**30
MEMORY_PER_WORKER = 3 * GIB  # pack.rows.max_memory_gb
SHM_FOR_RAY = 1 * GIB
LOW_DISK = 5 * GIB
NO_GPU = "none; packing needs none"


@dataclass(frozen=True)
class Check:
    """One finding. fail: packing does not work without it; advice: what to do, empty when there is nothing to do."""

    name: str
    status: Status
    found: str
    advice: str = ""


def check_python() -> Check:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Check("Python", "ok", found)
    return Check("Python", "fail", found, "install Python 3.11, 3.12 or 3.13")


def check_packages() -> Check:
    """What the base and the extra `pack` ask for, against what is installed."""
    count, unmet = unmet_requirements("pack")
    if unmet:
        advice = "pip install --no-deps -r requirements.lock, or pip install 'omniloom[pack]'"
        return Check("Packages", "fail", "; ".join(unmet), advice)
    named = ", ".join(f"{name} {_version(name)}" for name in ("av", "ray", "pyarrow", "torch", "transformers"))
    return Check("Packages", "ok", f"all {count}: {named}, ...")


def unmet_requirements(extra: str) -> tuple[int, list[str]]:
    """(how many packages the base and an extra ask for, what is wrong with those that do not fit)."""
    requirement_class = import_module("packaging.requirements").Requirement
    missing, wrong, count = [], [], 0
    for text in _requirements(extra):
        requirement = requirement_class(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        count += 1
        installed = _version(requirement.name)
        if installed is None:
            missing.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(installed, prereleases=True):
            wrong.append(f"{requirement.name} {installed} (needs {requirement.specifier})")
    return count, [*missing, *wrong]


def check_streaming() -> Check:
    """mosaicml-streaming declares transformers<5 and works with 5; what counts is that it imports."""
    installed = _version(STREAMING)
    if installed is None:
        return Check("Streaming", "fail", f"{STREAMING} is missing", STREAMING_INSTALL)
    found = f"{STREAMING} {installed}, transformers {_version('transformers')}"
    run = subprocess.run(
        [sys.executable, "-c", "import streaming"], capture_output=True, text=True, timeout=300, check=False
    )
    if run.returncode:
        reason = (run.stderr.strip().splitlines() or ["no message"])[-1]
        return Check("Streaming", "fail", f"{found}: does not import: {reason}", STREAMING_INSTALL)
    return Check("Streaming", "ok", f"{found}: imports (pip's complaint about transformers<5 can be ignored)")


def check_decoders() -> Check:
    try:
        codec_class = import_module("av.codec").Codec
    except ImportError as error:
        return Check("Decoders", "fail", f"av does not import: {error}", "pip install av")
    missing = _unknown(codec_class, NEEDED_DECODERS, "r")
    found = f"{len(NEEDED_DECODERS) - len(missing)} of {len(NEEDED_DECODERS)}: "
    found += " ".join(name for name in NEEDED_DECODERS if name not in missing)
    if not missing:
        return Check("Decoders", "ok", found)
    vital = set(missing) & set(VITAL_DECODERS)
    advice = (
        f"clips in {', '.join(missing)} will be rejected; PyAV's wheels decode them: pip install --force-reinstall av"
    )
    return Check("Decoders", "fail" if vital else "warn", found, advice)


def check_filters() -> Check:
    try:
        filter_class = import_module("av.filter").Filter
    except ImportError as error:
        return Check("Filters", "fail", f"av does not import: {error}", "pip install av")
    missing = _unknown(filter_class, tuple(FILTERS))
    if missing:
        needed = ", ".join(f"{name} ({FILTERS[name]})" for name in missing)
        return Check(
            "Filters", "warn", f"missing: {needed}", "PyAV's wheels have them: pip install --force-reinstall av"
        )
    return Check("Filters", "ok", ", ".join(f"{name} for {use}" for name, use in FILTERS.items()))


def check_cpus() -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Check("CPU", "ok", f"{usable} usable of {os.cpu_count()} cores; one packing worker per core")


def check_memory() -> Check:
    try:
        memory = import_module("psutil").virtual_memory()
    except ImportError:
        return Check("Memory", "fail", "psutil is missing", "pip install psutil")
    limit = _cgroup_limit()
    total = min(memory.total, limit) if limit else memory.total
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = f"{memory.available / GIB:.1f} GiB free of {total / GIB:.1f} GiB"
    if total < workers * MEMORY_PER_WORKER:
        fit = max(1, int(total // MEMORY_PER_WORKER))
        advice = (
            f"{workers} workers may take up to {workers * 3} GiB: set pack.executor.workers to {fit} for long clips"
        )
        return Check("Memory", "warn", found, advice)
    return Check("Memory", "ok", found)


def check_disk(path: Path) -> Check:
    place = path.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    found = f"{free / GIB:.1f} GiB free at {place}"
    if not os.access(place, os.W_OK):
        return Check(
            "Disk", "fail", f"{place} may not be written", "choose another folder with --path, or as pack.output"
        )
    if free < LOW_DISK:
        return Check("Disk", "warn", found, "an hour of 2 fps video with sound takes 0.5 to 1 GB of shards")
    return Check("Disk", "ok", found)


def check_shm() -> Check:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return Check("/dev/shm", "warn", "does not exist", "Ray and StreamingDataset keep their shared memory there")
    usage = shutil.disk_usage(shm)
    found = f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} GiB"
    if usage.total < SHM_FOR_RAY:
        return Check(
            "/dev/shm", "warn", found, "Ray is slow with less than 1 GiB: docker run --shm-size=2g, or kind: local"
        )
    return Check("/dev/shm", "ok", found)


def check_open_files() -> Check:
    try:
        limits = import_module("resource")
    except ImportError:
        return Check("Open files", "ok", "no limit known on this system")
    soft, hard = limits.getrlimit(limits.RLIMIT_NOFILE)
    if 0 <= soft < 1024:
        return Check("Open files", "warn", f"limit {soft} (hard {hard})", "ulimit -n 4096: Ray opens many files")
    return Check("Open files", "ok", f"limit {soft}")


def check_ray() -> Check:
    """A started cluster is only looked for where RAY_ADDRESS says that there is one."""
    installed, address = _version("ray"), os.environ.get("RAY_ADDRESS", "")
    if installed is None:
        return Check("Ray", "warn", "not installed", "pip install 'ray[data]', or pack with executor: {kind: local}")
    if not address:
        return Check("Ray", "ok", f"{installed}; RAY_ADDRESS is not set, so a job starts Ray on this machine")
    if address in ("auto", "local"):
        return Check("Ray", "ok", f"{installed}; RAY_ADDRESS={address}")
    parts = urlsplit(address if "://" in address else f"ray://{address}")
    try:
        port = parts.port or {"ray": 10001, "http": 80, "https": 443}.get(parts.scheme, 6379)
        with socket.create_connection((parts.hostname or "", port), timeout=5):
            return Check("Ray", "ok", f"{installed}; {address} answers")
    except (OSError, ValueError) as error:
        advice = "start the cluster (`ray start --head`), or unset RAY_ADDRESS to use this machine"
        return Check("Ray", "fail", f"{installed}; {address} does not answer: {error}", advice)


def check_object_stores() -> Check:
    have = [f"{name} {_version(name)} ({use})" for name, use in STORE_PACKAGES.items() if _version(name)]
    lack = [f"{name}, for {use}," for name, use in STORE_PACKAGES.items() if not _version(name)]
    found = "; ".join([*have, *(f"{name} is not installed" for name in lack)])
    advice = "pip install 'omniloom[cloud]' for manifests, media or outputs there" if not have else ""
    return Check("Object stores", "ok" if have else "warn", found, advice)


def check_gpu() -> Check:
    program = shutil.which("nvidia-smi")
    if program is None:
        return Check("GPU", "ok", NO_GPU)
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        run = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("GPU", "warn", f"nvidia-smi does not answer: {error}", "packing needs no GPU")
    if run.returncode or not run.stdout.strip():
        return Check("GPU", "warn", f"nvidia-smi: {(run.stdout + run.stderr).strip()}", "packing needs no GPU")
    return Check("GPU", "ok", "; ".join(run.stdout.strip().splitlines()))


def _requirements(extra: str) -> list[str]:
    """Requirement strings of the installed distribution, or of the source tree that this file lies in."""
    try:
        return distribution("omniloom").requires or []
    except PackageNotFoundError:
        project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
        return [*project["dependencies"], *project["optional-dependencies"][extra]]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _unknown(kind: Callable[..., object], names: tuple[str, ...], *arguments: str) -> list[str]:
    """The names that PyAV does not know; its errors for that derive from ValueError."""
    unknown = []
    for name in names:
        try:
            kind(name, *arguments)
        except ValueError:
            unknown.append(name)
    return unknown


def _cgroup_limit() -> int | None:
    """Bytes that the container may use, where there is such a limit."""
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 2**60:
            return int(text)
    return None
