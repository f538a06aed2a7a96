"""Text-only rows, which need no packing: one row of a JSONL or Parquet file -> canonical turns, by the registry."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from schemas.conversation import Turn, count_media
from schemas.errors import RowError
from schemas.manifest import parse_row
from schemas.registry import PREPROCESSOR_REGISTRY, conv_preprocess, load_preprocessors


@dataclass(frozen=True)
class TextRows:
    """How the rows of one text source are read. source_name: a registered preprocessor; arguments: passed to it;
    imports: modules that register preprocessors; seed: of the preprocessor's randomness, together with the row's id.
    Picklable."""

    source_name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
    seed: int = 0

    def turns(self, raw: Any, file: str, row: int) -> tuple[str, list[Turn]]:
        """(id, canonical turns) of row number `row` of `file`. RowError for a row with media or without content,
        RegistryError for an unknown source_name.

        The id of a row that brings none is made of its content and its number, so that it is the row's own whatever
        else the file holds.
        """
        self._load()
        try:
            return self._turns(raw, file, row)
        except RecursionError as error:
            raise RowError("bad_row", f"{file}, row {row}: is nested too deeply") from error
        except RowError as error:
            if file in error.detail:
                raise
            raise RowError(error.reason, f"{file}, row {row}: {error.detail}", error.stage) from error

    def _turns(self, raw: Any, file: str, row: int) -> tuple[str, list[Turn]]:
        parsed = parse_row(raw, base="", location=(file, row), occurrence=row)
        media = len(parsed.videos) + len(parsed.audios) + len(parsed.images)
        if media:
            raise RowError("bad_row", f"{file}, row {row} has {media} media; rows with media must be packed first")
        turns = conv_preprocess(
            self.source_name,
            parsed.conversations,
            rng=random.Random(f"{self.seed}:{parsed.id}"),
            metadata={},
            row=parsed.fields,
            num_videos=0,
            num_audios=0,
            num_images=0,
            **self.arguments,
        )
        if found := count_media(turns):
            raise RowError("marker_mismatch", f"{file}, row {row}: {dict(found)} markers in a row without media")
        return parsed.id, turns

    @property
    def fingerprint(self) -> str:
        """Changes when the preprocessor, its module's source, or what it is given does; with the seed only where the
        preprocessor may use chance."""
        self._load()
        function = PREPROCESSOR_REGISTRY[self.source_name]
        try:
            source = inspect.getsource(inspect.getmodule(function) or function)
        except (OSError, TypeError):  # made at run time: no file to read
            source = ""
        seed = self.seed if _may_use_chance(function) else None
        given = [self.source_name, dict(self.arguments), seed, source]
        return str(xxhash.xxh3_64_hexdigest(json.dumps(given, sort_keys=True, default=str).encode()))

    def _load(self) -> None:
        """A worker process that was just spawned has no preprocessors yet."""
        if self.source_name not in PREPROCESSOR_REGISTRY:
            load_preprocessors(self.imports)


def _may_use_chance(function: Callable[..., Any]) -> bool:
    """Whether a preprocessor names `rng`, or hands its keyword arguments on."""
    try:
        source = inspect.getsource(function)
        parameters = inspect.signature(function).parameters.values()
    except (OSError, TypeError, ValueError):
        return True
    handed_on = [p.name for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
    return "rng" in source or any(source.count(name) > 1 for name in handed_on)
