"""The conversation forms that users bring -> canonical turns.

* from/value (ShareGPT) and role/content (OpenAI) lists; text holds `<video>`, `<audio>`, `<image>` markers;
* content parts: {"type": "text" | "video" | "image" | "audio", ...}, and of the OpenAI API "image_url", "video_url",
  "audio_url", "input_audio"; text parts are text, a marker in them is not one;
* rows: query/response, prompt/completion, question/answer (+ system, history), instruction/input/output;
* canonical turns, as lists or tuples.

`to_turns` knows the form by its keys. Everything here raises RowError `bad_row` that says which message and key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from schemas.conversation import Part, PartType, Turn, canonical_turns, split_markers
from schemas.errors import RowError
from schemas.wording import is_unicode, short

ROLE_NAMES: dict[str, str] = {
    **{name: "user" for name in ("user", "human", "prompter")},
    **{name: "assistant" for name in ("assistant", "gpt", "chatgpt", "model", "bot", "ai", "bard", "bing")},
    **{name: "system" for name in ("system", "developer")},
}
CONVERSATION_KEYS = ("conversations", "messages", "conversation")
ROLE_KEYS, CONTENT_KEYS = ("from", "role"), ("value", "content")
PAIR_KEYS = (("query", "response"), ("prompt", "completion"), ("prompt", "response"), ("question", "answer"))

# type of a content part -> (media type, keys that may hold the medium, in this order)
PART_FORMS: dict[str, tuple[PartType, tuple[str, ...]]] = {
    "video": ("video", ("video", "path", "url", "video_url", "data", "bytes")),
    "audio": ("audio", ("audio", "path", "url", "audio_url", "data", "bytes", "base64")),
    "image": ("image", ("image", "path", "url", "image_url", "data", "bytes", "base64")),
    "video_url": ("video", ("video_url",)),
    "audio_url": ("audio", ("audio_url",)),
    "image_url": ("image", ("image_url",)),
    "input_audio": ("audio", ("input_audio",)),
    "input_image": ("image", ("image_url",)),
    "input_video": ("video", ("video_url", "input_video")),
}
TEXT_PARTS = ("text", "input_text", "output_text")
AUDIO_FORMATS = {"mp3": "mpeg"}  # `format` of an input_audio part -> subtype of its data URL


def to_turns(conversations: Any, system: Any = None, *, markers: bool = True) -> list[Turn]:
    """Canonical turns of any form above.

    system: a system prompt that stands beside the conversation; markers: False takes "<video>" as text.
    """
    if isinstance(conversations, Mapping):
        turns = _from_mapping(conversations, markers)
    elif isinstance(conversations, str | bytes) or not isinstance(conversations, Sequence):
        raise _bad(f"a conversation is a list of messages or a row, not {type(conversations).__name__}")
    elif not conversations:
        raise _empty()
    elif all(isinstance(turn, list | tuple) for turn in conversations):
        turns = _from_canonical(conversations)
    else:
        turns = [_message(m, f"message {i}", ROLE_KEYS, CONTENT_KEYS, markers) for i, m in enumerate(conversations)]
    return _with_system(turns, system)


def turns_from_sharegpt(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """[{"from": "human", "value": "<video>\\nWho?"}, ...] -> turns; the same as `to_turns`, for one form alone."""
    return [_message(m, f"message {i}", ("from",), ("value",)) for i, m in enumerate(messages)]


def turns_from_messages(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """[{"role": "user", "content": text or parts}, ...] -> turns."""
    return [_message(m, f"message {i}", ("role",), ("content",)) for i, m in enumerate(messages)]


def turns_from_pair(row: Mapping[str, Any], query: str, response: str, *, markers: bool = True) -> list[Turn]:
    """row[query], row[response]; before them `system` and `history` ([[query, response], ...]), if the row has them."""
    turns: list[Turn] = []
    for i, pair in enumerate(_optional(row, "history", list | tuple) or ()):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise _bad(f"history[{i}] is a pair [{query}, {response}], not {short(pair)}")
        turns.append(["user", *content_parts(pair[0], f"history[{i}][0]", markers)])
        turns.append(["assistant", *content_parts(pair[1], f"history[{i}][1]", markers)])
    turns.append(["user", *content_parts(row.get(query), query, markers)])
    turns.append(["assistant", *content_parts(row.get(response), response, markers)])
    return _with_system(turns, row.get("system"))


def turns_from_alpaca(row: Mapping[str, Any], *, markers: bool = True) -> list[Turn]:
    """instruction, input (on lines of its own after it), output; history and system as in `turns_from_pair`."""
    texts = [_optional(row, key, str) for key in ("instruction", "input")]
    asked = "\n".join(text for text in texts if text)
    return turns_from_pair({**row, "instruction": asked}, "instruction", "output", markers=markers)


def content_parts(content: Any, where: str, markers: bool = True) -> list[Part]:
    """Text (with markers), one content part or a list of them -> canonical parts."""
    if content is None:
        raise _bad(f"{where} is missing or null; it is a text or a list of content parts")
    if isinstance(content, str):
        if not is_unicode(content):
            raise _bad(f"{where} has half a surrogate pair, which no shard can hold")
        return split_markers(content) if markers else [("text", content)] if content else []
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, list | tuple):
        raise _bad(f"{where} is a text or a list of content parts, not {type(content).__name__}")
    parts: list[Part] = []
    for i, part in enumerate(content):
        kind, _, text = _content_part(part, f"{where}[{i}]")
        if not is_unicode(text or ""):
            raise _bad(f"{where}[{i}] has half a surrogate pair, which no shard can hold")
        if kind != "text" or text:
            parts.append((kind, text))
    return parts


def media_in_parts(conversations: Any) -> Iterator[tuple[PartType, Any, str]]:
    """(media type, medium or None, where) of every medium that stands in a content part, in order.

    The medium is a path, URL, data URL, bytes, a list of frames, or a mapping in the form of a manifest's medium.
    """
    if isinstance(conversations, Mapping):
        conversations = next((conversations[key] for key in CONVERSATION_KEYS if conversations.get(key)), ())
    if not isinstance(conversations, list | tuple):
        return
    for i, message in enumerate(conversations):
        content = (
            next((message[k] for k in CONTENT_KEYS if k in message), None) if isinstance(message, Mapping) else None
        )
        for p, part in enumerate(content if isinstance(content, list | tuple) else ()):
            kind, medium, _ = _content_part(part, f"message {i} content[{p}]")
            if kind != "text":
                yield kind, medium, f"message {i} content[{p}]"


def _from_mapping(row: Mapping[str, Any], markers: bool) -> list[Turn]:
    for key in CONVERSATION_KEYS:
        if row.get(key):
            return to_turns(row[key], row.get("system"), markers=markers)
    if any(isinstance(row.get(key), list | tuple) for key in CONVERSATION_KEYS):
        raise _empty()
    if any(isinstance(row.get(key), list | tuple) for key in ROLE_KEYS):  # a table: {"from": [...], "value": [...]}
        return to_turns(_untable(row), markers=markers)
    for query, response in PAIR_KEYS:
        if query in row and response in row:
            return turns_from_pair(row, query, response, markers=markers)
    if "instruction" in row and "output" in row:
        return turns_from_alpaca(row, markers=markers)
    known = [*CONVERSATION_KEYS, *("/".join(pair) for pair in PAIR_KEYS), "instruction/input/output"]
    raise _bad(
        f"no conversation among the keys {', '.join(map(str, row)) or '(none)'}; known forms: {', '.join(known)}"
    )


def _untable(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    lengths = {key: len(column) for key, column in table.items() if isinstance(column, list | tuple)}
    if len(set(lengths.values())) > 1 or len(lengths) < len(table):
        raise _bad(f"the columns of a conversation are lists of one length, not {lengths}")
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]


def _from_canonical(turns: Sequence[Any]) -> list[Turn]:
    try:
        return canonical_turns(turns)
    except ValueError as error:
        raise _bad(str(error)) from None


def _message(
    message: Any, where: str, role_keys: Sequence[str], content_keys: Sequence[str], markers: bool = True
) -> Turn:
    if not isinstance(message, Mapping):
        raise _bad(
            f"{where} is a mapping with {'/'.join(role_keys)} and {'/'.join(content_keys)}, not {short(message)}"
        )
    role_key = next((key for key in role_keys if key in message), None)
    content_key = next((key for key in content_keys if key in message), None)
    if role_key is None or content_key is None:
        wanted = role_keys if role_key is None else content_keys
        raise _bad(f"{where} has no key {' or '.join(map(repr, wanted))}; it has {', '.join(map(repr, message))}")
    name = message[role_key]
    role = ROLE_NAMES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise _bad(f"{where}: unknown role {name!r}; known: {', '.join(ROLE_NAMES)}")
    return [role, *content_parts(message[content_key], f"{where} {content_key}", markers)]


def _content_part(part: Any, where: str) -> tuple[PartType, Any, str | None]:
    """(type, medium or None, text or None) of one content part."""
    if isinstance(part, str):
        return "text", None, part
    if not isinstance(part, Mapping):
        raise _bad(f"{where} is a content part (a mapping with a type), not {short(part)}")
    kind = part.get("type")
    if kind is None:  # {"image": "a.jpg"}, {"text": "..."}
        kind = next((key for key in ("text", *PART_FORMS) if part.get(key) is not None), None)
    if kind in TEXT_PARTS:
        text = part.get("text")
        if not isinstance(text, str):
            raise _bad(f"{where}: the text of a text part is a string, not {short(text)}")
        return "text", None, text
    if kind not in PART_FORMS:
        raise _bad(f"{where}: unknown type {kind!r} of a content part; known: {', '.join([*TEXT_PARTS, *PART_FORMS])}")
    media_type, keys = PART_FORMS[kind]
    medium = next((part[key] for key in keys if part.get(key) is not None), None)
    return media_type, _medium(medium, part, where), None


def _medium(medium: Any, part: Mapping[str, Any], where: str) -> Any:
    """The medium in a form that a manifest's list of media may hold, with the part's span."""
    if isinstance(medium, Mapping) and isinstance(medium.get("url"), str):  # {"image_url": {"url": ...}}
        medium = medium["url"]
    elif isinstance(medium, Mapping) and isinstance(medium.get("data"), str):  # {"input_audio": {"data", "format"}}
        form = str(medium.get("format") or "wav")
        data = medium["data"]
        medium = data if data.startswith("data:") else f"data:audio/{AUDIO_FORMATS.get(form, form)};base64,{data}"
    elif isinstance(medium, str) and part.get("base64") is medium:
        medium = f"data:;base64,{medium}"
    span = {key: part[key] for key in ("start", "end", "video_start", "video_end") if part.get(key) is not None}
    sound = {key: part[key] for key in ("use_audio_in_video",) if part.get(key) is not None}
    if isinstance(medium, list | tuple) and "video" in part:
        rate = part.get("sample_fps", part.get("raw_fps", part.get("fps", part.get("video_fps"))))
        return {"frames": list(medium)} | ({} if rate is None else {"video_fps": rate})
    if not span and not sound:
        return medium
    if not isinstance(medium, str):
        raise _bad(f"{where}: a span or use_audio_in_video needs a path or URL, not {short(medium)}")
    return {"path": medium, **span, **sound}


def _with_system(turns: list[Turn], system: Any) -> list[Turn]:
    if system is None or system == "":
        return turns
    if not isinstance(system, str):
        raise _bad(f"system is a text, not {short(system)}")
    if turns and turns[0] == ["system", ("text", system)]:
        return turns
    if turns and turns[0][0] == "system":
        raise _bad("the row has a system prompt beside a conversation that begins with a system message")
    return [["system", ("text", system)], *turns]


def _optional(row: Mapping[str, Any], key: str, kind: Any) -> Any:
    value = row.get(key)
    if value is not None and not isinstance(value, kind):
        raise _bad(f"{key} is {short(value)}; it is a {'text' if kind is str else 'list'} or null")
    return value


def _empty() -> RowError:
    return RowError("empty_conversation", "the conversation has no message", "preprocess")


def _bad(detail: str) -> RowError:
    return RowError("bad_row", detail, "preprocess")
