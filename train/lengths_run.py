"""What `omniloom train lengths` does: counts of packed datasets, of texts, and of all sources of a configuration."""

from __future__ import annotations

import json
from typing import Any

from schemas.strict import load_config
from train.config import OmniConfig
from train.data.lengths import Lengths, load_lengths, load_text_lengths
from train.data.lengths_report import lengths_report, report_lines
from train.data.packed_files import PackedIndex
from train.data.processor import ProcessorAssets, load_assets
from train.data.sources import open_sources
from train.data.text_files import scan_text
from train.data.text_rows import TextRows
from train.model_assets import training_assets
from train.progress import progress


def count_dataset(
    data: str,
    processor: str,
    rows: dict[str, Any] | None,
    *,
    workers: int | None,
    cache: str | None,
    max_seq_len: int | None,
    as_json: bool,
    **choices: Any,
) -> str:
    """What is said of a packed dataset, or of texts when `rows` are the fields of their `TextRows`. choices: as of
    `load_assets`."""
    assets = load_assets(processor, **choices)
    found = _packed(data, assets, workers, cache) if rows is None else _text(data, rows, assets, workers, cache)
    report = lengths_report(found, max_seq_len)
    return json.dumps(report) if as_json else "\n".join(report_lines(report, max_seq_len))


def count_configured(path: str, overrides: list[str], *, as_json: bool) -> str:
    """What is said of all sources of a configuration, as training opens them."""
    config = load_config(path, overrides, OmniConfig)
    assets = training_assets(config)
    with progress("counting tokens", None, "rows") as advance:
        sources = open_sources(config.data, assets, config.train.seed, lambda _, count: advance(count))
    limit = config.data.max_seq_len
    reports = {source.rows.name: lengths_report(source.lengths, limit) for source in sources}
    if as_json:
        return json.dumps(reports)
    said = [[f"source    {name}", *report_lines(report, limit)] for name, report in reports.items()]
    return "\n".join(line for lines in said for line in lines)


def _packed(data: str, assets: ProcessorAssets, workers: int | None, cache: str | None) -> Lengths:
    with progress("counting tokens", PackedIndex.read(data).num_rows, "rows") as advance:
        return load_lengths(data, assets, workers=workers, cache=cache, advance=advance)


def _text(data: str, rows: dict[str, Any], assets: ProcessorAssets, workers: int | None, cache: str | None) -> Lengths:
    with progress("finding rows", None, "bytes") as advance:
        files = scan_text(data, advance)
    with progress("counting tokens", files.num_rows, "rows") as advance:
        return load_text_lengths(files, TextRows(**rows), assets, workers=workers, cache=cache, advance=advance)
