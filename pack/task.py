"""What goes to a worker and what comes back: plain values, in a module that imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass

from pack.config import PackConfig
from pack.manifest_files import ManifestFile
from pack.plan import Partition


@dataclass(frozen=True)
class PartitionTask:
    """What a worker needs for one partition. files: of the partition's segments, in their order; job: id of the run;
    isolated: run rows in child processes at once; code: the preprocessor's, as it is part of the fingerprint."""

    partition: Partition
    files: tuple[ManifestFile, ...]
    config: PackConfig
    fingerprint: str
    output: str
    job: str
    isolated: bool = False
    code: str = ""


@dataclass(frozen=True)
class Receipt:
    """What became of a partition. won: this attempt committed it; media_s: seconds of picture or, without one,
    sound."""

    partition: str
    rows: int
    packed: int
    rejected: int
    media_s: float
    bytes: int
    seconds: float
    isolated: bool
    won: bool
