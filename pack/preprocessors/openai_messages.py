"""openai_messages: chat messages of the OpenAI API and of the libraries that followed it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schemas.conversation import Turn
from schemas.errors import RowError
from schemas.messages import CONVERSATION_KEYS, turns_from_messages
from schemas.registry import PREPROCESSOR_REGISTRY


@PREPROCESSOR_REGISTRY.register("openai_messages", arguments=())
def openai_messages(conversations: Any, **kwargs: Any) -> list[Turn]:
    """role/content messages; content is a text with markers or parts (text, image_url, video_url, input_audio, ...).

    Media named in the parts (paths, URLs, data URLs, base64) are the row's media, in order, unless the row lists them.
    """
    if isinstance(conversations, Mapping):
        conversations = next((conversations[key] for key in CONVERSATION_KEYS if conversations.get(key)), None)
    if not isinstance(conversations, list | tuple):
        raise RowError("bad_row", "the row has no list of messages with role and content", "preprocess")
    for i, message in enumerate(conversations):
        if isinstance(message, Mapping) and message.get("tool_calls"):
            raise RowError("bad_row", f"message {i} has tool_calls, which a sample cannot hold", "preprocess")
    return turns_from_messages(conversations)
