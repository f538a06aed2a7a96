"""A packed row with recorded responses: its prompt is laid out by the chat layout as ever, up to the end of the
assistant's header, and the ids of a response follow as they were drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from schemas.chat import ChatLayout, MediaCounts, build_layout
from schemas.conversation import Turn
from schemas.errors import SchemaError
from schemas.rollouts import RolloutRow, prompt_digest
from train.data.processor import ProcessorAssets


def prompt_layout(turns: Sequence[Turn], counts: MediaCounts, assets: ProcessorAssets) -> ChatLayout:
    """The conversation without the assistant's last turn when it ends with one, and the header of a reply; no labels.
    RowError, UnsupportedError: as `build_layout`."""
    asked = turns[:-1] if turns and turns[-1][0] == "assistant" else turns
    layout = build_layout([*asked, ["assistant"]], assets.encode, assets.tokens, counts, assets.style)
    end = layout.parts[-1]
    assert end.kind == "end" and end.turn == len(asked)
    return ChatLayout(layout.ids[: end.start], np.zeros(end.start, bool), layout.slots, layout.parts[:-1])


def check_prompt(row: RolloutRow, layout: ChatLayout) -> None:
    """SchemaError, naming the row, when its responses were drawn from another prompt."""
    tokens, digest = len(layout.ids), prompt_digest(layout.ids)
    if (tokens, digest) != (row.prompt_tokens, row.prompt_digest):
        raise SchemaError(
            f"rollout {row.id}: its prompt had {row.prompt_tokens} tokens, digest {row.prompt_digest}; here it has "
            f"{tokens}, digest {digest}: the tokenizer, the processor, data.mm_configs or the dataset differ from "
            "those that the rollouts were made with"
        )


def check_ids(row: RolloutRow, vocab_size: int | None) -> None:
    """SchemaError, naming the row, for a response with a token that the model does not have. vocab_size: None where
    that is not known."""
    if vocab_size is None:
        return
    for number, response in enumerate(row.responses):
        ids = np.asarray(response.ids)
        if ids.max() >= vocab_size:
            at = int(ids.argmax())
            raise SchemaError(
                f"rollout {row.id}: response {number}: token {at} is {ids[at]}, and the model has {vocab_size}, from "
                "0: the answers were drawn from a model with another vocabulary"
            )


def response_layout(prompt: ChatLayout, ids: Sequence[int]) -> ChatLayout:
    """The prompt with a response behind it, each of whose tokens is trained."""
    drawn = np.asarray(ids, np.int64)
    return replace(
        prompt,
        ids=np.concatenate([prompt.ids, drawn]),
        label_mask=np.concatenate([prompt.label_mask, np.ones(len(drawn), bool)]),
    )
