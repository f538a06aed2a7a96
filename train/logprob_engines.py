"""Answers of serving engines -> lines of a dump that `omniloom train compare-logprobs` reads.

An engine counts the tokens of a sample as it was sent, media filled in. `start` is the place in the sample of the first
token that the answer tells of: 0 for a whole prompt, the length of the prompt for what was generated behind it. Tokens
without a log-probability, as the first of a prompt, make no line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import ConfigError, SchemaError
from schemas.wording import short
from train.logprob_files import SCHEMA

TOKEN_ID = re.compile(r"token_id:(\d+)")  # how vLLM writes a token under return_tokens_as_token_ids
COLUMNS = ("id", "index", "token", "logprob")


@dataclass(frozen=True)
class TokenLine:
    """One token. index: place in its sample; token: None where the engine gives its text alone."""

    id: str
    index: int
    token: int | None
    logprob: float


def sglang_lines(sample_id: str, pairs: Sequence[Sequence[Any]], start: int = 0) -> list[TokenLine]:
    """pairs: `meta_info.input_token_logprobs` (start: the request's logprob_start_len) or `output_token_logprobs`
    (start: `meta_info.prompt_tokens`) of SGLang's native `/generate`: [log-probability or null, id, text or null]."""
    lines = []
    for number, pair in enumerate(pairs):
        if len(pair) < 2 or not isinstance(pair[1], int):
            raise SchemaError(f"{sample_id}: entry {number} is {short(list(pair))}; SGLang gives [logprob, id, text]")
        if pair[0] is not None:
            lines.append(TokenLine(sample_id, start + number, pair[1], float(pair[0])))
    return lines


def vllm_lines(
    sample_id: str, prompt_logprobs: Sequence[Mapping[Any, Any] | None], prompt_token_ids: Sequence[int]
) -> list[TokenLine]:
    """prompt_logprobs: of a request with prompt_logprobs=0 or more, from Python (id -> object with `logprob`) or from
    JSON (id as text -> object with "logprob"); prompt_token_ids: of the same answer, as many."""
    if len(prompt_logprobs) != len(prompt_token_ids):
        raise SchemaError(f"{sample_id}: {len(prompt_logprobs)} prompt_logprobs for {len(prompt_token_ids)} token ids")
    lines = []
    for number, (found, token) in enumerate(zip(prompt_logprobs, prompt_token_ids, strict=True)):
        if found is None:
            continue
        entry = found.get(token, found.get(str(token)))
        if entry is None:
            raise SchemaError(
                f"{sample_id}: entry {number} has no log-probability of token {token}, only {list(found)}"
            )
        value = entry["logprob"] if isinstance(entry, Mapping) else entry.logprob
        lines.append(TokenLine(sample_id, number, int(token), float(value)))
    return lines


def openai_lines(sample_id: str, logprobs: Mapping[str, Any], start: int = 0) -> list[TokenLine]:
    """logprobs: `choices[0].logprobs` of `/v1/completions` (`tokens`, `token_logprobs`; with echo the prompt, too) or
    of `/v1/chat/completions` (`content`). Ids are known where the server writes tokens as `token_id:N`."""
    if "content" in logprobs:
        pairs = [(entry["token"], entry["logprob"]) for entry in logprobs["content"] or ()]
    elif "tokens" in logprobs and "token_logprobs" in logprobs:
        pairs = list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))
    else:
        raise SchemaError(
            f"{sample_id}: logprobs has {sorted(logprobs)}; it needs content, or tokens and token_logprobs"
        )
    lines = []
    for number, (text, value) in enumerate(pairs):
        if value is not None:
            found = TOKEN_ID.fullmatch(text)
            lines.append(TokenLine(sample_id, start + number, int(found[1]) if found else None, float(value)))
    return lines


def write_lines(path: Path, lines: Iterable[TokenLine]) -> None:
    """A Parquet file that is a dump. ConfigError: another suffix."""
    if path.suffix != ".parquet":
        raise ConfigError(f"{path}: lines are written as Parquet; end the name in .parquet")
    rows = [asdict(line) for line in lines]
    schema = pa.schema([SCHEMA.field(name) for name in COLUMNS])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
