"""voice_assistant: VoiceAssistant-400K, a spoken question and a written answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schemas.conversation import Turn, count_media, turn_parts
from schemas.errors import RowError
from schemas.messages import CONVERSATION_KEYS, to_turns
from schemas.registry import PREPROCESSOR_REGISTRY

KEPT = ("split_name", "index", "round", "question")


@PREPROCESSOR_REGISTRY.register("VoiceAssistant", arguments=())
@PREPROCESSOR_REGISTRY.register("voice_assistant", arguments=())
def voice_assistant(
    conversations: Any,
    *,
    row: Mapping[str, Any] | None = None,
    metadata: dict[str, Any] | None = None,
    num_audios: int = 1,
    **kwargs: Any,
) -> list[Turn]:
    """question_audio -> answer; the question's text, split_name, index and round are kept as metadata.

    With a conversation (from/value) every turn of the user is spoken when the row has a sound for each, else the first
    ones are.
    """
    fields = dict(row or {})
    if isinstance(conversations, Mapping):
        fields = {**conversations, **fields}
    if metadata is not None:
        metadata.update({key: fields[key] for key in KEPT if isinstance(fields.get(key), str | int)})
    if isinstance(conversations, Mapping) and not any(conversations.get(key) for key in CONVERSATION_KEYS):
        answer = conversations.get("answer")
        if not isinstance(answer, str) or not answer.strip():
            raise RowError("bad_row", "answer is missing or empty", "preprocess")
        return [["user", ("audio", None)], ["assistant", ("text", answer)]]
    turns = to_turns(conversations)
    return turns if count_media(turns)["audio"] else _spoken(turns, num_audios, metadata)


def _spoken(turns: list[Turn], num_audios: int, metadata: dict[str, Any] | None) -> list[Turn]:
    """The first `num_audios` turns of the user as sounds; what they said is kept as metadata."""
    spoken: list[Turn] = []
    said: list[str] = []
    for turn in turns:
        if turn[0] == "user" and len(said) < num_audios:
            said.append("".join(part[1] or "" for part in turn_parts(turn)))
            turn = ["user", ("audio", None)]
        spoken.append(turn)
    if metadata is not None:
        metadata["transcripts"] = said
    return spoken
