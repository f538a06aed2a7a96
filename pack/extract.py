"""`omniloom pack extract`: samples back to plain files, for people and other tools.

OUT/<id>/video<i>/<k>_<time in s>.jpg, OUT/<id>/video<i>.wav, audio<i>.wav, image<i>.jpg and sample.json. Characters
of an id that make trouble in file names become `_` and a hash keeps such ids apart; the true id stands in
sample.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from pack.reader import PackedDataset
from pack.storage import explain_io, write_atomic
from schemas.conversation import to_sharegpt
from schemas.errors import ConfigError
from schemas.sample import PackedSample

_UNSAFE = re.compile(r"[^\w.#@+=,-]")
_LONGEST = 150  # characters of an id in a file name; in UTF-8 that is within 255 bytes for most scripts
_PICTURE = {"jpeg": "jpg", "png": "png"}


def safe_name(sample_id: str) -> str:
    """The id as a file name."""
    name = _UNSAFE.sub("_", sample_id)
    if name.startswith((".", "-")):
        name = "_" + name
    while len(name.encode()) > _LONGEST:
        name = name[:-1]
    return name if name == sample_id else f"{name}-{xxhash.xxh3_64_hexdigest(sample_id.encode())[:8]}"


def extract(
    dataset: PackedDataset, out: Path, ids: Sequence[str] = (), advance: Callable[[int], None] | None = None
) -> int:
    """Writes the samples with these ids (all when there are none given); how many. An id of a row that was split
    takes all its spans. ConfigError for an id that is not in the dataset."""
    wanted, found, count = set(ids), set(), 0
    for index in range(len(dataset)):
        if advance is not None:
            advance(1)
        if wanted:
            name = dataset.sample_id(index)
            hit = {name, name.rpartition("#")[0]} & wanted
            if not hit:
                continue
            found |= hit
        with explain_io("cannot write below", str(out)):
            write_sample(dataset[index], out)
        count += 1
    if missing := sorted(wanted - found):
        raise ConfigError(f"{dataset.storage.location} has no sample with the id {missing[0]!r}; it may be rejected")
    return count


def write_sample(sample: PackedSample, out: Path) -> Path:
    """Writes one sample below `out`; its folder."""
    folder = out / safe_name(sample.meta.id)
    folder.mkdir(parents=True, exist_ok=True)
    for i, (video, meta) in enumerate(zip(sample.videos, sample.meta.videos, strict=True)):
        frames = folder / f"video{i}"
        frames.mkdir(exist_ok=True)
        for k, (frame, time_s) in enumerate(zip(video.frames, meta.frame_times_s, strict=True)):
            (frames / f"{k:05d}_{time_s:.3f}.{_PICTURE[meta.codec]}").write_bytes(frame)
        if video.audio is not None and meta.audio is not None:
            (folder / f"video{i}.{meta.audio.codec}").write_bytes(video.audio)
    for i, (sound, described) in enumerate(zip(sample.audios, sample.meta.audios, strict=True)):
        (folder / f"audio{i}.{described.codec}").write_bytes(sound)
    for i, (image, pictured) in enumerate(zip(sample.images, sample.meta.images, strict=True)):
        (folder / f"image{i}.{_PICTURE[pictured.codec]}").write_bytes(image)
    record = sample.meta.model_dump(mode="json")
    record["conversations"] = to_sharegpt(sample.meta.conversation)
    write_atomic(folder / "sample.json", (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
    return folder
