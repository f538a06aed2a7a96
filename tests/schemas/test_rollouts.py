"""Rollouts: strict both ways, every fault names the sample."""

import dataclasses
import json

import numpy as np
import pytest
import xxhash

from schemas.dataset import FileEntry
from schemas.errors import SchemaError
from schemas.rollouts import (
    RESPONSE_COLUMNS,
    ROLLOUT_COLUMNS,
    Response,
    RolloutAbout,
    RolloutCard,
    RolloutPart,
    RolloutRow,
    check,
    part_name,
    prompt_digest,
    row_from_record,
    row_record,
)

STOP = Response(ids=[5, 6, 7], logprobs=[-0.5, -0.25, 0.0], reward=1.0, text="red", finish="stop")
LENGTH = Response(ids=np.array([8]), logprobs=np.array([-2.0], np.float32), reward=0, text="", finish="length")
ROW = RolloutRow("clip-1", "colours", 12, "0123456789abcdef", [STOP, LENGTH])


def change(row=ROW, number=0, **changes):
    responses = list(row.responses)
    responses[number] = dataclasses.replace(responses[number], **changes)
    return dataclasses.replace(row, responses=responses)


def test_records_both_ways():
    record = row_record(ROW)
    assert list(record) == list(ROLLOUT_COLUMNS) and list(record["responses"][0]) == list(RESPONSE_COLUMNS)
    assert record["responses"][1] == {
        "ids": [8], "logprobs": [-2.0], "ref_logprobs": None, "reward": 0.0, "text": "", "finish": "length"
    }  # fmt: skip
    back = row_from_record(json.loads(json.dumps(record)))
    assert back == dataclasses.replace(
        ROW, responses=[STOP, Response(ids=[8], logprobs=[-2.0], reward=0.0, text="", finish="length")]
    )
    assert (back.rewards, back.response_tokens) == ([1.0, 0.0], 4)
    both = change(change(ref_logprobs=[-1.0, -1.0, -1.0]), 1, ref_logprobs=[-3.5])
    assert row_from_record(row_record(both)).responses[0].ref_logprobs == [-1.0, -1.0, -1.0]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (dataclasses.replace(ROW, source=None), "source is text, not None"),
        (dataclasses.replace(ROW, prompt_tokens=0), "prompt_tokens is a number of at least 1, not 0"),
        (dataclasses.replace(ROW, prompt_tokens=True), "prompt_tokens is a number of at least 1, not True"),
        (dataclasses.replace(ROW, prompt_digest="0123"), "prompt_digest is 16 hex digits, not '0123'"),
        (dataclasses.replace(ROW, responses=[]), "has no response"),
        (change(ids=[]), "response 0: ids are a list of at least one token id"),
        (change(ids=[1.0, 2.0, 3.0]), "response 0: ids are a list of at least one token id"),
        (change(ids=[1, -2, 3]), "response 0: ids are a list of at least one token id"),
        (change(ids=[1, 2, 2**31]), "response 0: ids are a list of at least one token id"),
        (change(logprobs=[-0.5, -0.25]), "response 0: 3 ids, but 2 logprobs"),
        (change(logprobs=[-0.5, float("nan"), 0.0]), r"response 0: logprobs\[1\] is nan"),
        (change(logprobs=[-0.5, 0.0, -float("inf")]), r"response 0: logprobs\[2\] is -inf"),
        (change(logprobs=[0.5, 0.0, 0.0]), r"response 0: logprobs\[0\] is 0.5; a log-probability is .* at most 0"),
        (change(logprobs=["a", "b", "c"]), "response 0: logprobs are a list of numbers"),
        (change(logprobs=None), "response 0: logprobs are a list of numbers"),
        (change(ref_logprobs=[-1.0]), "response 0: 3 ids, but 1 ref_logprobs"),
        (change(ref_logprobs=[-1.0, -1.0, -1.0]), "some of its responses have ref_logprobs and others have none"),
        (change(number=1, reward=float("nan")), "response 1: reward is nan; it has to be finite"),
        (change(number=1, reward=1e39), "response 1: reward is 1e\\+39; it has to be finite"),
        (change(number=1, reward="1"), "response 1: reward is a number, not '1'"),
        (change(number=1, text=b""), "response 1: text is a string, not bytes"),
        (change(number=1, finish="eos"), "response 1: finish is 'eos'; known: stop, length"),
    ],
)
def test_a_fault_names_the_sample(row, text):
    for call in (check, row_record):
        with pytest.raises(SchemaError, match=f"^rollout clip-1: {text}"):
            call(row)


def test_ids_are_text():
    with pytest.raises(SchemaError, match="a rollout's id is text that is not empty, not ''"):
        check(dataclasses.replace(ROW, id=""))


def test_unknown_and_missing_fields_are_refused():
    record = row_record(ROW)
    with pytest.raises(SchemaError, match=r"^f: a rollout has the fields \['colour', .*\]; it has exactly"):
        row_from_record(record | {"colour": 1}, "f")
    with pytest.raises(SchemaError, match="a rollout has the fields"):
        row_from_record({name: value for name, value in record.items() if name != "source"})
    short = [{name: value for name, value in record["responses"][0].items() if name != "reward"}]
    with pytest.raises(SchemaError, match="f: rollout clip-1: a response has the fields"):
        row_from_record(record | {"responses": short}, "f")
    with pytest.raises(SchemaError, match="rollout clip-1: responses are a list, not NoneType"):
        row_from_record(record | {"responses": None})
    with pytest.raises(SchemaError, match=r"^f: rollout clip-1: has no response"):
        row_from_record(record | {"responses": []}, "f")


def test_the_digest_is_of_int64_bytes():
    assert prompt_digest([1, 2, 151_936]) == xxhash.xxh3_64_hexdigest(
        b"".join(number.to_bytes(8, "little") for number in (1, 2, 151_936))
    )
    assert prompt_digest(np.array([1, 2], np.int32)) == prompt_digest([1, 2]) != prompt_digest([2, 1])


def test_the_card_adds_up():
    part = RolloutPart(
        rows=2, responses=8, response_tokens=40, reward_sum=4.0, file=FileEntry(bytes=9, xxh3_64="0" * 16)
    )
    about = RolloutAbout(dataset="d", dataset_fingerprint="f", model="m", engine="sglang", scorer="exact", sampling={})
    counts = {"rows": 4, "responses": 16, "response_tokens": 80, "mean_reward": 0.5}
    card = RolloutCard(
        created="now", about=about, references=False, parts={part_name(0): part, part_name(1): part}, **counts
    )
    assert RolloutCard.from_json(card.to_json()) == card
    wrong = json.loads(card.to_json()) | {"responses": 15}
    with pytest.raises(SchemaError, match="responses is 15, but its parts add up to 16"):
        RolloutCard.from_json(json.dumps(wrong), "rollouts.json")
    for name in ("../part-00000.parquet", "/tmp/part-00000.parquet", "part-00000.json"):
        wrong = json.loads(card.to_json())
        wrong["parts"] = {name: wrong["parts"].pop(part_name(0)), **wrong["parts"]}
        with pytest.raises(SchemaError, match="should match pattern"):
            RolloutCard.from_json(json.dumps(wrong), "rollouts.json")
