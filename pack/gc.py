"""`omniloom pack gc`: removes what no plan and no commit needs: dead attempts, partitions of other plans, losers'
uploads."""

from __future__ import annotations

import time
from dataclasses import dataclass

from pack.guard import read_crumbs
from pack.plan_file import load_plan
from pack.storage import Storage, remove_tree


@dataclass(frozen=True)
class Removed:
    """One thing that was (or would be) removed, and why. bytes: what it held."""

    name: str
    why: str
    bytes: int


def collect_garbage(storage: Storage, older_than_h: float, dry_run: bool) -> list[Removed]:
    """Removes garbage. older_than_h: age in hours from which an attempt without a living worker on this machine
    counts as dead, too; dry_run: only tells."""
    plan = load_plan(storage)
    planned = {partition.name for partition in plan.partitions}
    oldest = time.time() - older_than_h * 3600
    garbage = _attempts(storage, oldest, dry_run)
    committed = {found.partition: found.folder for found in storage.read_commits(sorted(storage.committed_names()))}
    for partition, folder in storage.part_folders():
        if partition not in planned:
            why = "partition of another plan"
        elif committed.get(partition) != folder:
            why = "attempt that was not committed"
        else:
            continue
        files = storage.files(folder)
        if why.startswith("attempt") and any(file.modified > oldest for file in files):
            continue  # it may be uploading now
        garbage.append(Removed(folder, why, sum(file.size for file in files)))
        if not dry_run:
            if partition not in planned:
                storage.remove(f"commits/{partition}.json")
            storage.remove(folder)
    return garbage


def _attempts(storage: Storage, oldest: float, dry_run: bool) -> list[Removed]:
    """Attempt folders whose worker is dead, or that nobody has touched since `oldest`."""
    root = storage.staging_root
    if not root.is_dir():
        return []
    dead = {folder for folder, crumb, _ in read_crumbs(root) if crumb.owner_is_dead}
    garbage = []
    for folder in sorted(root.iterdir()):
        files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else [folder]
        newest = max((path.stat().st_mtime for path in files), default=folder.stat().st_mtime)
        if folder in dead or newest < oldest:
            why = "its worker is dead" if folder in dead else "untouched for long"
            garbage.append(Removed(str(folder), why, sum(path.stat().st_size for path in files)))
            if not dry_run:
                remove_tree(folder)
    return garbage
