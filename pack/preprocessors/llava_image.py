"""Images with captions or questions: ShareGPT4V and LLaVA, in their pretraining and instruction forms."""

from __future__ import annotations

from typing import Any

from schemas.conversation import Turn, turn_parts
from schemas.errors import RowError
from schemas.messages import to_turns
from schemas.registry import PREPROCESSOR_REGISTRY


@PREPROCESSOR_REGISTRY.register("llava_pretrain", arguments=())
@PREPROCESSOR_REGISTRY.register("sharegpt4v_captioner", arguments=())
@PREPROCESSOR_REGISTRY.register("sharegpt4v_pretrain", arguments=())
def sharegpt4v_pretrain(conversations: Any, **kwargs: Any) -> list[Turn]:
    """Image -> caption: the user's words beside an image are left out, as are the turns before the user's first."""
    turns: list[Turn] = []
    for turn in _from_user(conversations):
        images = [part for part in turn_parts(turn) if part[0] == "image"]
        turns.append([turn[0], *images] if turn[0] == "user" and images else turn)
    _check(turns)
    return turns


@PREPROCESSOR_REGISTRY.register("llava_instruct", arguments=())
@PREPROCESSOR_REGISTRY.register("sharegpt4v_captioner_sft", arguments=())
@PREPROCESSOR_REGISTRY.register("sharegpt4v_sft", arguments=())
def sharegpt4v_sft(conversations: Any, **kwargs: Any) -> list[Turn]:
    """Questions about images: the one image of a turn comes before its text, several stay where they are.

    A system turn is dropped, as the sources carry only the name of their captioner there.
    """
    turns = [_image_first(turn) for turn in _from_user(conversations)]
    _check(turns)
    return turns


def _from_user(conversations: Any) -> list[Turn]:
    """The turns from the first one of the user on."""
    turns = to_turns(conversations)
    start = next((i for i, turn in enumerate(turns) if turn[0] == "user"), len(turns))
    if start == len(turns):
        raise RowError("bad_row", f"none of the {len(turns)} turns is the user's", "preprocess")
    return turns[start:]


def _image_first(turn: Turn) -> Turn:
    parts = turn_parts(turn)
    images = [part for part in parts if part[0] == "image"]
    if len(images) != 1 or any(part[0] not in ("text", "image") for part in parts):
        return turn
    text = "".join(part[1] or "" for part in parts)
    return [turn[0], *images, ("text", text)] if text else [turn[0], *images]


def _check(turns: list[Turn]) -> None:
    if not any(turn[0] == "assistant" and len(turn) > 1 for turn in turns):
        raise RowError("empty_conversation", "no turn of the assistant has content", "preprocess")
