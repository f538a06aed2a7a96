"""Which rows a dump is of, and the lines of one sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from schemas.errors import VerificationError
from train.data.collate import MODALITIES
from train.data.rows import scramble
from train.data.sample import IGNORE
from train.data.sources import OpenSource, row_table
from train.logprob_files import SampleLogprobs

CHOICE = 5  # tag of the scramble that picks rows


def choose_rows(
    sources: Sequence[OpenSource], max_seq_len: int, max_samples: int | None, seed: int
) -> list[OpenSource]:
    """The sources with all usable rows, or `max_samples` of them; the others have 0 tokens. Which are chosen depends on
    the rows and the seed, not on how they are packed or divided among ranks."""
    table = row_table(sources)
    usable = np.flatnonzero(table.usable(slice(None), max_seq_len))
    if max_samples is not None and max_samples < len(usable):
        usable = usable[np.argsort(scramble(usable, seed, CHOICE), kind="stable")[:max_samples]]
    kept = np.zeros(table.num_rows, bool)
    kept[usable] = True
    ends = np.cumsum([len(source.rows.tokens) for source in sources])[:-1]
    return [
        replace(source, rows=replace(source.rows, tokens=np.where(mine, source.rows.tokens, 0).astype(np.int32)))
        for source, mine in zip(sources, np.split(kept, ends), strict=True)
    ]


def source_counts(source: OpenSource, max_seq_len: int) -> tuple[int, int]:
    """(rows that were chosen, rows that fit a sequence) of a source of `choose_rows`."""
    total = source.lengths.total
    return int((source.rows.tokens > 0).sum()), int(((total > 0) & (total <= max_seq_len)).sum())


def sample_logprobs(source: str, key: str, loss: np.ndarray, labels: np.ndarray, kinds: np.ndarray) -> SampleLogprobs:
    """Of the rows of one sample: the label of a row is the token after it. VerificationError: what is no number."""
    rows = np.flatnonzero(labels != IGNORE)
    logprob = -loss[rows].astype(np.float32)
    index = (rows + 1).astype(np.int32)
    if wrong := np.flatnonzero(~np.isfinite(logprob)).tolist():
        at = wrong[0]
        raise VerificationError(
            f"data source {source}: row {key}: the log-probability of token {labels[rows[at]]} at {index[at]} is "
            f"{logprob[at]}; look for the first module that gives no numbers with `omniloom train compare`"
        )
    token = labels[rows].astype(np.int32)
    return SampleLogprobs(key, source, media_of_sample(kinds), index, token, logprob, kinds[index])


def media_of_sample(kinds: np.ndarray) -> str:
    """`text`, or the kinds of media joined by `+` in alphabetical order, of the numbers of a sample's tokens."""
    return "+".join(sorted(MODALITIES[kind] for kind in np.unique(kinds).tolist() if kind)) or MODALITIES[0]
