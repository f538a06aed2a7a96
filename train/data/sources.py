"""The configured sources, opened: which rows there are, how long they are, and where they lie."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from schemas.errors import ConfigError, RegistryError, SchemaError
from schemas.registry import PREPROCESSOR_REGISTRY, load_preprocessors
from train.config import DataConfig, DataSourceConfig
from train.data.lengths import NO_ROLLOUT, Lengths, load_lengths, load_text_lengths
from train.data.packed_files import INDEX_FILE, PackedIndex, is_remote, local_path, read_file
from train.data.processor import ProcessorAssets
from train.data.rollout_files import Rollouts, read_rollouts
from train.data.rows import RowTable, SourceRows
from train.data.shard_cache import check_cache_folder
from train.data.shard_index import Shard, read_shards
from train.data.text_files import TextFiles, is_text_path, scan_text
from train.data.text_rows import TextRows

Advance = Callable[[str, int], None]  # name of a source, rows done since the last call


@dataclass(frozen=True)
class OpenSource:
    """One source. rows: what the plan takes; lengths: of every row; shards: of a packed one; files, text: of a text
    source; index: fingerprint of its index or files; rollouts: the recorded responses to its rows."""

    config: DataSourceConfig
    rows: SourceRows
    lengths: Lengths
    index: str
    shards: Sequence[Shard] = ()
    files: TextFiles | None = None
    text: TextRows | None = None
    rollouts: Rollouts | None = None


def open_sources(
    config: DataConfig, assets: ProcessorAssets, seed: int, advance: Advance | None = None
) -> list[OpenSource]:
    """All sources of the configuration; makes lengths that are not cached yet. ConfigError, IncompleteSourceError,
    SchemaError: one line about the source at fault."""
    check_cache_folder(cache_folder(config), [source.path for source in config.sources])
    opener = _Opener(config, assets, seed, advance)
    return [opener.text(source) if is_text(source) else opener.packed(source) for source in config.sources]


def check_source(source: DataSourceConfig, config: DataConfig) -> None:
    """What can be told of a source without a processor: that it is there and of its kind, its preprocessor, its
    rollouts. Raises what `open_sources` raises."""
    if not is_text(source):
        PackedIndex.read(source.path)
        if source.rollouts is not None:
            _rollouts(source, source.rollouts)
        return
    _check_preprocessor(source, config)
    scan_text(source.path, cache=cache_folder(config) / "text")


def _check_preprocessor(source: DataSourceConfig, config: DataConfig) -> None:
    """RegistryError: no such preprocessor, or one without such arguments."""
    load_preprocessors(config.imports)
    try:
        PREPROCESSOR_REGISTRY.check_arguments(source.source_name or "", source.source_args)
    except RegistryError as error:
        raise RegistryError(f"data source {source.label}: {error}") from None


def row_table(sources: Sequence[OpenSource]) -> RowTable:
    return RowTable(tuple(source.rows for source in sources))


def cache_folder(config: DataConfig) -> Path:
    """data.cache.dir, or the user's cache folder."""
    if config.cache.dir is not None:
        return Path(config.cache.dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omniloom"


def is_text(source: DataSourceConfig) -> bool:
    """Whether a source is text. ConfigError when the keys of the source contradict what lies there."""
    if source.rollouts is not None and (source.source_name is not None or is_text_path(source.path)):
        raise ConfigError(
            f"data source {source.label}: rollouts are responses to the rows of a packed dataset, and {source.path} is "
            "text; pack it first"
        )
    if source.source_name is None:
        if is_text_path(source.path):
            raise ConfigError(
                f"data source {source.label}: {source.path} is text, which needs source_name, the preprocessor that "
                "reads its rows (see `omniloom preprocessors list`)"
            )
        return False
    if not is_text_path(source.path) and read_file(source.path, INDEX_FILE) is not None:
        raise ConfigError(
            f"data source {source.label}: {source.path} is packed; its rows went through a preprocessor already, so "
            "source_name has no meaning here"
        )
    return True


@dataclass(frozen=True)
class _Opener:
    config: DataConfig
    assets: ProcessorAssets
    seed: int
    advance: Advance | None

    def packed(self, source: DataSourceConfig) -> OpenSource:
        rollouts = None if source.rollouts is None else _rollouts(source, source.rollouts)
        lengths = load_lengths(
            source.path, self.assets, cache=self._lengths_cache(), advance=self._told(source), rollouts=rollouts
        )
        if rollouts is not None:
            _check_all_found(source, rollouts, lengths)
        shards = read_shards(source.path)
        index = PackedIndex.read(source.path).fingerprint
        counts = np.array([shard.rows for shard in shards], np.int64)
        joint = _joint(index, self.assets.fingerprint, *([] if rollouts is None else [rollouts.fingerprint]))
        rows = self._rows(source, lengths, counts, joint)
        return OpenSource(source, rows, lengths, index, shards=shards, rollouts=rollouts)

    def text(self, source: DataSourceConfig) -> OpenSource:
        _check_preprocessor(source, self.config)
        files = scan_text(source.path, cache=cache_folder(self.config) / "text")
        text = TextRows(source.source_name or "", source.source_args, tuple(self.config.imports), self.seed)
        lengths = load_text_lengths(files, text, self.assets, cache=self._lengths_cache(), advance=self._told(source))
        joint = _joint(files.fingerprint, text.fingerprint, self.assets.fingerprint)
        rows = self._rows(source, lengths, files.block_rows, joint)
        return OpenSource(source, rows, lengths, files.fingerprint, files=files, text=text)

    def _rows(self, source: DataSourceConfig, lengths: Lengths, counts: np.ndarray, joint: str) -> SourceRows:
        return SourceRows(source.label, lengths.total, counts, source.weight, joint)

    def _lengths_cache(self) -> str | None:
        return None if self.config.cache.dir is None else str(cache_folder(self.config) / "lengths")

    def _told(self, source: DataSourceConfig) -> Callable[[int], None]:
        def told(count: int) -> None:
            if self.advance is not None:
                self.advance(source.label, count)

        return told


def _rollouts(source: DataSourceConfig, folder: str) -> Rollouts:
    if is_remote(folder):
        raise ConfigError(
            f"data source {source.label}: rollouts is {folder}; copy them to a folder that all nodes see: they are "
            "small, media stay where they are"
        )
    return read_rollouts(local_path(folder))


def _check_all_found(source: DataSourceConfig, rollouts: Rollouts, lengths: Lengths) -> None:
    """SchemaError when some rollouts are of no row."""
    without = sum(why.endswith(NO_ROLLOUT) for _, why in lengths.faults)
    if len(lengths) - without < len(rollouts):
        raise SchemaError(
            f"data source {source.label}: {len(rollouts) - (len(lengths) - without)} of {len(rollouts)} rollouts of "
            f"{source.rollouts} are of no row of {source.path}; they were made from {rollouts.card.about.dataset}"
        )


def _joint(*parts: str) -> str:
    return xxhash.xxh3_64_hexdigest("\n".join(parts).encode())
