"""What a rank needs to serve its lanes: readers of its shards, the collator, and the caches of remote datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from schemas.errors import ConfigError
from train.config import BatchConfig, DataConfig
from train.data.collate import Collator, DataCollateInfo, ExtraArrays
from train.data.packed_files import is_remote
from train.data.processor import ProcessorAssets
from train.data.rank_plan import DataRank, RankPlan
from train.data.reader import BatchMaker, RowReader, SourceReader, position_dtype
from train.data.route import RouteSpec
from train.data.sample import TrainSample
from train.data.shard_cache import ShardCache
from train.data.sources import OpenSource, cache_folder
from train.data.store import CacheSpec, PackedPart, TextPart, cache_of, check_shards
from train.data.text_files import KEPT_BLOCKS, TextFiles
from train.data.transform import SampleTransform

GIGABYTE = 10**9


@dataclass(frozen=True)
class ModelInputs:
    """What the model adds to the data path. route_spec: where its towers let media be cut; extra_arrays, extra_info:
    its own collate entries; relabel: other labels than those of the chat layout."""

    route_spec: RouteSpec = field(default_factory=RouteSpec)
    extra_arrays: ExtraArrays | None = None
    extra_info: Mapping[str, DataCollateInfo] = field(default_factory=dict)
    relabel: Callable[[TrainSample], TrainSample] | None = None


@dataclass(frozen=True)
class Serving:
    """maker: goes to the workers; caches: of the remote sources, by their number, for fetching ahead."""

    maker: BatchMaker
    caches: dict[int, ShardCache]


def serve(
    sources: Sequence[OpenSource],
    mine: RankPlan,
    data: DataConfig,
    batch: BatchConfig,
    assets: ProcessorAssets,
    rank: DataRank,
    model: ModelInputs,
) -> Serving:
    """Opens the shards of this rank's lanes. VerificationError: one is missing or cut off. ConfigError: dead_samples is
    mask under sequence parallelism, where a row that one rank of the group cannot read, and another can, would be
    trained on by a part of them."""
    if data.dead_samples == "mask" and rank.sp_size > 1:
        raise ConfigError(
            f"data.dead_samples: mask needs train.accelerator.ulysses_size 1, and it is {rank.sp_size}: ranks of a "
            "sequence would not always agree on which rows are dead; use dead_samples: fail"
        )
    shards, table = mine.shards(), mine.table
    owner = np.searchsorted(table.shard_starts, shards, side="right") - 1
    readers: dict[int, SourceReader] = {}
    caches: dict[int, ShardCache] = {}
    for number, source in enumerate(sources):
        numbers = shards[owner == number] - table.shard_starts[number]
        if not len(numbers):
            continue
        part: PackedPart | TextPart
        if source.files is not None:
            part = TextPart(source.files, _blocks_in_use(source.files, len(mine.lanes), data.window_rows))
        else:
            spec = _cache_spec(source, data)
            if spec is not None:
                limit = data.cache.limit_gb
                caches[number] = cache_of(source.config.path, spec, None if limit is None else int(limit * GIGABYTE))
            views = cache_folder(data) / "views"
            part = PackedPart.make(source.config.path, source.shards, numbers, views, spec, metas=source.lengths.meta)
            if data.dead_samples == "fail":
                check_shards(part)
        readers[number] = SourceReader(source.rows.name, part, source.text, source.rollouts)
    collator = Collator(
        sp_rank=rank.sp_rank,
        sp_size=rank.sp_size,
        pad_multiple=batch.pad_multiple,
        temporal_patch=assets.video.temporal_patch,
        position_dtype=position_dtype(assets),
        route_spec=model.route_spec,
        extra_arrays=model.extra_arrays,
        extra_info=model.extra_info,
    )
    reader = RowReader(readers, SampleTransform(assets), data.dead_samples == "mask")
    return Serving(BatchMaker(reader, collator, model.relabel), caches)


def _blocks_in_use(files: TextFiles, lanes: int, window_rows: int) -> int:
    """Blocks of a text source that the windows of all lanes of a rank take their rows from, twice: rows that fill no
    sequence wait for the next window."""
    per_block = max(1, files.num_rows // len(files.block_rows))
    return max(KEPT_BLOCKS, 2 * lanes * (-(-window_rows // per_block) + 1))


def _cache_spec(source: OpenSource, data: DataConfig) -> CacheSpec | None:
    if not is_remote(source.config.path):
        return None
    return CacheSpec(str(cache_folder(data)), source.index, data.cache.retries)
