"""Rollouts: the responses that a model gave to packed samples, with their log-probabilities and rewards.

    ROLLOUTS/part-00000.parquet ...   one row per packed sample, columns of `ROLLOUT_COLUMNS`
    ROLLOUTS/rollouts.json            the `RolloutCard`, written last: it is there when, and only when, all parts are

Media are not written again: a row is joined with its packed sample by id, and `prompt_digest` proves that whoever reads
the row lays the same prompt out. The files are written and read by `train.data.rollout_files`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import numpy as np
import xxhash
from pydantic import Field, model_validator

from schemas.dataset import Count, FileEntry, JsonRecord
from schemas.errors import SchemaError
from schemas.sample import Json

ROLLOUTS_VERSION: Literal[1] = 1
ROLLOUTS_CARD = "rollouts.json"

Finish = Literal["stop", "length"]

# name -> type, in pyarrow's names. A response's fields are those of `Response`.
RESPONSE_COLUMNS: dict[str, str] = {
    "ids": "list<int32>",
    "logprobs": "list<float32>",
    "ref_logprobs": "list<float32>",
    "reward": "float32",
    "text": "string",
    "finish": "string",
}
ROLLOUT_COLUMNS: dict[str, str] = {
    "id": "string",
    "source": "string",
    "prompt_tokens": "int32",
    "prompt_digest": "string",
    "responses": "list<struct>",
}

_DIGEST = re.compile(r"[0-9a-f]{16}")
_ABOVE_ZERO = 1e-3  # rounding of an engine's own softmax; more is not the logarithm of a probability


@dataclass(frozen=True)
class Response:
    """One sampled answer.

    ids: token ids, the end token included when finish is "stop"; logprobs: natural logarithm of the probability that
    the sampling policy gave to each of them, at temperature 1; ref_logprobs: the same of a reference model, or None;
    reward: any finite number; text: the answer without special tokens; finish: "length" = cut at the limit of tokens.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    reward: float
    text: str
    finish: Finish
    ref_logprobs: Sequence[float] | None = None


@dataclass(frozen=True)
class RolloutRow:
    """All responses to one packed sample. prompt_tokens, prompt_digest: of the token ids before the response, media
    placeholders expanded, up to the end of the assistant's header (see `prompt_digest`)."""

    id: str
    source: str
    prompt_tokens: int
    prompt_digest: str
    responses: Sequence[Response]

    @property
    def rewards(self) -> list[float]:
        return [response.reward for response in self.responses]

    @property
    def response_tokens(self) -> int:
        return sum(len(response.ids) for response in self.responses)


def prompt_digest(ids: Sequence[int] | np.ndarray) -> str:
    """16 hex digits: xxh3_64 of the ids as little-endian int64."""
    return str(xxhash.xxh3_64_hexdigest(np.ascontiguousarray(ids, dtype="<i8").tobytes()))


def check(row: RolloutRow) -> None:
    """SchemaError, naming the row's id, for anything that is not a rollout."""
    if not isinstance(row.id, str) or not row.id:
        raise SchemaError(f"a rollout's id is text that is not empty, not {row.id!r}")
    if not isinstance(row.source, str):
        raise _fault(row, f"source is text, not {row.source!r}")
    if not _whole(row.prompt_tokens) or row.prompt_tokens < 1:
        raise _fault(row, f"prompt_tokens is a number of at least 1, not {row.prompt_tokens!r}")
    if not isinstance(row.prompt_digest, str) or not _DIGEST.fullmatch(row.prompt_digest):
        raise _fault(row, f"prompt_digest is 16 hex digits, not {row.prompt_digest!r}")
    if not row.responses:
        raise _fault(row, "has no response")
    for number, response in enumerate(row.responses):
        _check_response(row, number, response)
    if len({response.ref_logprobs is None for response in row.responses}) > 1:
        raise _fault(row, "some of its responses have ref_logprobs and others have none")


def _check_response(row: RolloutRow, number: int, response: Response) -> None:
    where = f"response {number}"
    ids = np.asarray(response.ids)
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= 2**31:
        raise _fault(row, f"{where}: ids are a list of at least one token id from 0 to 2^31 - 1")
    for name, values in (("logprobs", response.logprobs), ("ref_logprobs", response.ref_logprobs)):
        if values is None and name == "ref_logprobs":
            continue
        found = np.asarray(values)
        if found.ndim != 1 or found.dtype.kind not in "fiu":
            raise _fault(row, f"{where}: {name} are a list of numbers")
        if len(found) != len(ids):
            raise _fault(row, f"{where}: {len(ids)} ids, but {len(found)} {name}")
        bad = ~(np.isfinite(found) & (found <= _ABOVE_ZERO))
        if bad.any():
            at = int(bad.argmax())
            raise _fault(row, f"{where}: {name}[{at}] is {float(found[at])}; a log-probability is finite and at most 0")
    if isinstance(response.reward, bool) or not isinstance(response.reward, int | float | np.number):
        raise _fault(row, f"{where}: reward is a number, not {response.reward!r}")
    if not abs(float(response.reward)) <= float(np.finfo(np.float32).max):
        raise _fault(row, f"{where}: reward is {response.reward}; it has to be finite in float32")
    if not isinstance(response.text, str):
        raise _fault(row, f"{where}: text is a string, not {type(response.text).__name__}")
    if response.finish not in get_args(Finish):
        raise _fault(row, f"{where}: finish is {response.finish!r}; known: {', '.join(get_args(Finish))}")


def row_record(row: RolloutRow) -> dict[str, Any]:
    """The row of a part's table: a value for each of `ROLLOUT_COLUMNS`. SchemaError as `check`."""
    check(row)
    responses = [
        {name: _plain(getattr(response, name)) for name in RESPONSE_COLUMNS}
        | {"reward": float(response.reward), "text": response.text}
        for response in row.responses
    ]
    return {name: getattr(row, name) for name in ROLLOUT_COLUMNS} | {"responses": responses}


def row_from_record(record: dict[str, Any], name: str = "") -> RolloutRow:
    """The inverse of `row_record`. SchemaError, with `name` (the file), for unknown, missing or wrong fields."""
    where = f"{name}: " if name else ""
    _same_keys(record, ROLLOUT_COLUMNS, f"{where}a rollout")
    responses = record["responses"]
    if not isinstance(responses, list):
        raise SchemaError(f"{where}rollout {record['id']}: responses are a list, not {type(responses).__name__}")
    for found in responses:
        _same_keys(found, RESPONSE_COLUMNS, f"{where}rollout {record['id']}: a response")
    row = RolloutRow(**{**record, "responses": [Response(**found) for found in responses]})
    try:
        check(row)
    except SchemaError as error:
        raise SchemaError(f"{where}{error}") from None
    return row


class RolloutPart(JsonRecord):
    """What one part holds. reward_sum: over its responses, in float64."""

    rows: Count
    responses: Count
    response_tokens: Count
    reward_sum: Annotated[float, Field(allow_inf_nan=False)]
    file: FileEntry


class RolloutAbout(JsonRecord):
    """How rollouts were made. dataset: the packed folder; dataset_fingerprint: of its card; model: path or name;
    engine: transformers, openai, sglang...; scorer: what gave the rewards; sampling: temperature, top_p, group size and
    the like."""

    dataset: str
    dataset_fingerprint: str
    model: str
    engine: str
    scorer: str
    sampling: dict[str, Json]


class RolloutCard(JsonRecord):
    """rollouts.json. parts: file name -> what it holds; the counts are their sums; mean_reward: over all responses;
    references: whether every response has ref_logprobs."""

    version: Literal[1] = ROLLOUTS_VERSION
    created: str
    about: RolloutAbout
    rows: Count
    responses: Count
    response_tokens: Count
    mean_reward: Annotated[float, Field(allow_inf_nan=False)]
    references: bool
    parts: dict[Annotated[str, Field(pattern=r"^part-[0-9]{5,}\.parquet$")], RolloutPart]

    @model_validator(mode="after")
    def _adds_up(self) -> RolloutCard:
        for name in ("rows", "responses", "response_tokens"):
            total = sum(getattr(part, name) for part in self.parts.values())
            if getattr(self, name) != total:
                raise ValueError(f"{name} is {getattr(self, name)}, but its parts add up to {total}")
        return self


def part_name(number: int) -> str:
    return f"part-{number:05d}.parquet"


def _same_keys(found: Any, columns: dict[str, str], what: str) -> None:
    if not isinstance(found, dict) or found.keys() != columns.keys():
        keys = sorted(found) if isinstance(found, dict) else type(found).__name__
        raise SchemaError(f"{what} has the fields {keys}; it has exactly {sorted(columns)}")


def _plain(values: Any) -> Any:
    return np.asarray(values).tolist() if isinstance(values, Sequence | np.ndarray) else values


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _fault(row: RolloutRow, text: str) -> SchemaError:
    return SchemaError(f"rollout {row.id}: {text}")
