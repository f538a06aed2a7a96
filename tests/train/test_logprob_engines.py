"""What serving engines answer, as lines of a dump."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from schemas.errors import ConfigError, SchemaError
from train.logprob_engines import TokenLine, openai_lines, sglang_lines, vllm_lines, write_lines
from train.logprob_read import read_dump


def test_sglang() -> None:
    pairs = [[None, 5, None], [-0.25, 6, " a"], [-1.5, 7, None]]
    assert sglang_lines("x", pairs) == [TokenLine("x", 1, 6, -0.25), TokenLine("x", 2, 7, -1.5)]
    assert sglang_lines("x", pairs[1:], start=10) == [TokenLine("x", 10, 6, -0.25), TokenLine("x", 11, 7, -1.5)]
    with pytest.raises(SchemaError, match="x: entry 1 is"):
        sglang_lines("x", [[None, 5, None], [-0.25, " a"]])


@dataclass
class Logprob:
    """As vLLM's own."""

    logprob: float
    rank: int = 1


def test_vllm() -> None:
    ids = [5, 6, 7]
    served = [None, {"6": {"logprob": -0.25, "rank": 1}}, {"9": {"logprob": -0.1}, "7": {"logprob": -1.5, "rank": 3}}]
    local = [None, {6: Logprob(-0.25)}, {9: Logprob(-0.1), 7: Logprob(-1.5)}]
    expected = [TokenLine("x", 1, 6, -0.25), TokenLine("x", 2, 7, -1.5)]
    assert vllm_lines("x", served, ids) == vllm_lines("x", local, ids) == expected
    with pytest.raises(SchemaError, match="3 prompt_logprobs for 2 token ids"):
        vllm_lines("x", served, ids[:2])
    with pytest.raises(SchemaError, match=r"entry 2 has no log-probability of token 8, only \['9', '7'\]"):
        vllm_lines("x", served, [5, 6, 8])


def test_openai() -> None:
    completion = {"tokens": ["Hi", " you"], "token_logprobs": [None, -0.5], "top_logprobs": None, "text_offset": [0, 2]}
    assert openai_lines("x", completion) == [TokenLine("x", 1, None, -0.5)]
    chat = {"content": [{"token": "token_id:7", "logprob": -1.5, "bytes": None, "top_logprobs": []}]}
    assert openai_lines("x", chat, start=12) == [TokenLine("x", 12, 7, -1.5)]
    with pytest.raises(SchemaError, match=r"logprobs has \['tokens'\]"):
        openai_lines("x", {"tokens": []})


def test_lines_are_a_dump(tmp_path: Path) -> None:
    lines = [TokenLine("x", 1, 6, -0.25), TokenLine("y", 4, None, -1.5)]
    write_lines(tmp_path / "engine.parquet", lines)
    found = read_dump(tmp_path / "engine.parquet")
    assert found.ids == ["x", "y"] and found.token.tolist() == [6, -1] and found.logprob.tolist() == [-0.25, -1.5]
    with pytest.raises(ConfigError, match=r"end the name in \.parquet"):
        write_lines(tmp_path / "engine.json", lines)
