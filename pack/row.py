"""One manifest row -> packed samples: preprocessor, media counts, media, meta. Everything wrong with it is a
RowError."""

from __future__ import annotations

import logging
import random
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from pack.config import PackConfig
from pack.storage import MACHINE_ERRNOS
from schemas.conversation import Turn, check_media_counts
from schemas.errors import ConfigError, RegistryError, RowError
from schemas.manifest import FileSource, ManifestRow, Source
from schemas.registry import PREPROCESSOR_REGISTRY, conv_preprocess
from schemas.sample import (
    AudioMeta,
    ImageMeta,
    PackedSample,
    PackedVideo,
    Provenance,
    SampleMeta,
    VideoMeta,
    frame_blobs,
    media_blobs,
)

PACKER_KWARGS = ("rng", "metadata", "row", "num_videos", "num_audios", "num_images")
MEDIA_MODULES = ["pack.media.load"]  # what default_media imports
SPLIT_ID = re.compile(r"#\d+$")
log = logging.getLogger("omniloom.pack")


@dataclass(frozen=True)
class MediaLoader:
    """How media become bytes: the functions of `pack.media.load`, as a value so that it can be another one.

    Picklable when the functions are module-level ones. versions: what goes into provenance and fingerprint.
    """

    load_video: Callable[[Source, PackConfig], tuple[PackedVideo, VideoMeta]]
    load_audio: Callable[[Any, PackConfig], tuple[bytes, AudioMeta]]
    load_image: Callable[[Any, PackConfig], tuple[bytes, ImageMeta]]
    split_spans: Callable[[Source, PackConfig], list[Source]]
    versions: Mapping[str, str]


def default_media() -> MediaLoader:
    """The loader that opens real files."""
    from pack.media import load  # noqa: PLC0415  # codecs and torch: seconds to import, and only workers need them

    if "torch" in sys.modules:  # one partition, one thread
        sys.modules["torch"].set_num_threads(1)
    return MediaLoader(load.load_video, load.load_audio, load.load_image, load.split_spans, dict(load.VERSIONS))


def check_preprocessor_args(config: PackConfig) -> None:
    """ConfigError when `pack.preprocessor_args` has a name that the packer itself passes or that the preprocessor does
    not know; RegistryError when there is no such preprocessor. Call after `load_preprocessors`."""
    taken = sorted(set(config.preprocessor_args) & {*PACKER_KWARGS, "conversations", "source_name"})
    if taken:
        raise ConfigError(
            f"pack.preprocessor_args: {', '.join(taken)} is passed by the packer itself; choose another name"
        )
    PREPROCESSOR_REGISTRY.check_arguments(config.source_name, config.preprocessor_args)


def pack_row(row: ManifestRow, config: PackConfig, media: MediaLoader) -> Iterator[PackedSample]:
    """The samples of a row: one, or one per span under `video.split_s` (ids `<id>#000`, ...). RowError rejects the
    row."""
    metadata: dict[str, Any] = {}
    turns = conv_preprocess(
        config.source_name,
        row.conversations,
        rng=random.Random(f"{config.seed}:{row.id}"),
        metadata=metadata,
        row=row.fields,
        num_videos=len(row.videos),
        num_audios=len(row.audios),
        num_images=len(row.images),
        **config.preprocessor_args,
    )
    check_media_counts(turns, len(row.videos), len(row.audios), len(row.images))
    if config.video.split_s is not None and SPLIT_ID.search(row.id):
        text = f"id {row.id!r} ends like the id of a span (#000), which video.split_s gives out; choose another id"
        raise RowError("bad_row", text, "row")
    spans = _spans(row, config, media)
    if len(spans) == 1:
        yield _pack(replace(row, videos=spans[0]), turns, metadata, config, media)
        return
    for i, videos in enumerate(spans):
        yield _pack(replace(row, id=f"{row.id}#{i:03d}", videos=videos), turns, metadata, config, media)


def _spans(row: ManifestRow, config: PackConfig, media: MediaLoader) -> list[tuple[Source, ...]]:
    """The videos of every sample that the row becomes."""
    if config.video.split_s is None or len(row.videos) != 1 or not isinstance(row.videos[0], FileSource):
        return [row.videos]
    return [(span,) for span in media.split_spans(row.videos[0], config)]


def _pack(
    row: ManifestRow, turns: list[Turn], metadata: dict[str, Any], config: PackConfig, media: MediaLoader
) -> PackedSample:
    videos = [media.load_video(source, config) for source in row.videos]
    audios = [media.load_audio(source, config) for source in row.audios]
    images = [media.load_image(source, config) for source in row.images]
    packed, sounds, pictures = [v for v, _ in videos], [a for a, _ in audios], [i for i, _ in images]
    framed = frame_blobs(media_blobs(packed, sounds, pictures))
    manifest, number = row.location
    try:
        meta = SampleMeta(
            id=row.id,
            source=row.source or config.source_name,
            conversation=turns,
            videos=[meta for _, meta in videos],
            audios=[meta for _, meta in audios],
            images=[meta for _, meta in images],
            extra=metadata,
            provenance=Provenance(
                manifest=manifest, row=number, preprocessor=config.source_name, versions=dict(media.versions)
            ),
            media_bytes=len(framed),
            media_crc32=zlib.crc32(framed),
        )
    except ValidationError as error:
        if any(fault["loc"][:1] == ("extra",) for fault in error.errors()):
            fault = error.errors()[0]
            where = ".".join(str(place) for place in fault["loc"][1:])
            detail = f"preprocessor {config.source_name!r} put no JSON into metadata: {where}: {fault['msg']}"
            raise RowError("preprocessor_failed", detail, "preprocess") from None
        raise
    return PackedSample(meta, packed, sounds, pictures)


def as_row_error(error: BaseException) -> RowError:
    """What a row that raised is rejected with. Faults of the machine or the job are raised again: no row is to
    blame."""
    if isinstance(error, RowError):
        return error
    if isinstance(error, RegistryError):
        raise error
    if isinstance(error, OSError) and error.errno in MACHINE_ERRNOS:
        raise error
    said = " ".join(str(error).split())[:500]
    if isinstance(error, MemoryError):
        return RowError("oom", f"memory could not be allocated: {said or 'MemoryError'}", "isolate")
    if isinstance(error, SystemExit):
        return RowError("preprocessor_failed", f"the row's code called sys.exit({error.code!r})", "preprocess")
    if isinstance(error, KeyboardInterrupt):
        raise error
    if not isinstance(error, Exception):  # asyncio.CancelledError, GeneratorExit, the panic of a native library
        return RowError("preprocessor_failed", f"the row's code raised {type(error).__name__}: {said}", "preprocess")
    log.error("a row met a fault of omniloom itself", exc_info=error)
    return RowError("unexpected", f"{type(error).__name__}: {said}", "row")
