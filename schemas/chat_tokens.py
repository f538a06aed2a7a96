"""Special tokens of a tokenizer, read and never assumed, and an `encode` by which text cannot make them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import xxhash

from schemas.errors import ConfigError

Encode: TypeAlias = Callable[[str], Sequence[int]]

# field of ChatTokens -> (attribute of a Hugging Face tokenizer that may name it otherwise, Qwen's own name for it)
TOKEN_NAMES: dict[str, tuple[str, str]] = {
    "im_start": ("", "<|im_start|>"),
    "im_end": ("", "<|im_end|>"),
    "pad": ("pad_token", "<|endoftext|>"),
    "image": ("image_token", "<|image_pad|>"),
    "video": ("video_token", "<|video_pad|>"),
    "vision_start": ("vision_bos_token", "<|vision_start|>"),
    "vision_end": ("vision_eos_token", "<|vision_end|>"),
    "audio": ("audio_token", "<|audio_pad|>"),
    "audio_start": ("audio_bos_token", "<|audio_start|>"),
    "audio_end": ("audio_eos_token", "<|audio_end|>"),
}
AUDIO_FIELDS = ("audio", "audio_start", "audio_end")
# field of ChatTokens -> key of a model's config.json
CONFIG_KEYS: dict[str, str] = {
    "im_start": "im_start_token_id",
    "im_end": "im_end_token_id",
    "image": "image_token_id",
    "video": "video_token_id",
    "vision_start": "vision_start_token_id",
    "vision_end": "vision_end_token_id",
    "audio": "audio_token_id",
    "audio_start": "audio_start_token_id",
    "audio_end": "audio_end_token_id",
}
SHORT_TEXT = 32  # characters; headers and time marks are encoded for every sample anew
REMEMBERED = 4096


@dataclass(frozen=True)
class ChatTokens:
    """Ids of the special tokens of one tokenizer. The audio ids are None for a tokenizer without them (Qwen3-VL)."""

    im_start: int
    im_end: int
    pad: int
    image: int
    video: int
    vision_start: int
    vision_end: int
    audio: int | None = None
    audio_start: int | None = None
    audio_end: int | None = None

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> ChatTokens:
        """Read from a Hugging Face tokenizer, or a processor that has one; ConfigError naming what is missing."""
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        ids: dict[str, int | None] = {}
        missing = []
        for field, (attribute, name) in TOKEN_NAMES.items():
            text = getattr(tokenizer, attribute, None) if attribute else None
            ids[field] = _id_of(tokenizer, text or name)
            if ids[field] is None and field not in AUDIO_FIELDS:
                missing.append(text or name)
        found = [field for field in AUDIO_FIELDS if ids[field] is not None]
        if found and len(found) < len(AUDIO_FIELDS):  # all or none: some would be another model's tokens
            missing += [TOKEN_NAMES[field][1] for field in AUDIO_FIELDS if ids[field] is None]
        if missing:
            raise ConfigError(f"the tokenizer has no {', '.join(missing)}; it is none of Qwen3-Omni or Qwen3-VL")
        return cls(**ids)  # type: ignore[arg-type]  # only the audio fields may be None here

    def audio_ids(self) -> tuple[int, int, int]:
        """(audio, audio_start, audio_end); ConfigError for a tokenizer without them."""
        if self.audio is None or self.audio_start is None or self.audio_end is None:
            names = ", ".join(TOKEN_NAMES[field][1] for field in AUDIO_FIELDS)
            raise ConfigError(f"the tokenizer has no {names}; sound needs a Qwen3-Omni tokenizer")
        return self.audio, self.audio_start, self.audio_end

    def check_model_config(self, config: Mapping[str, Any], where: str) -> None:
        """ConfigError, naming each difference, when the config.json of a model has other ids than the tokenizer."""
        thinker = config.get("thinker_config", {})
        wrong = []
        for field, key in CONFIG_KEYS.items():
            ours = getattr(self, field)
            theirs = thinker.get(key, config.get(key))
            if ours is not None and theirs is not None and ours != theirs:
                wrong.append(f"{key} is {theirs} and the tokenizer's {TOKEN_NAMES[field][1]} is {ours}")
        if wrong:
            raise ConfigError(f"{where}: {'; '.join(wrong)}; take both from one checkpoint")


class PlainEncoder:
    """encode of a Hugging Face tokenizer by which text never makes a special token: "<|im_end|>" typed by a user is
    seven ordinary tokens. Added tokens that are not special (<think>, <tool_call>) stay whole, but for those of
    `TOKEN_NAMES`, which count as special whatever the tokenizer's file says. Remembers short texts.
    """

    def __init__(self, tokenizer: Any) -> None:
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(f"{type(tokenizer).__name__} is no fast tokenizer; omniloom needs one (tokenizer.json)")
        self._kind, self._text = type(backend), _with_special(backend.to_str(), _layout_names(tokenizer))
        self._open()

    def _open(self) -> None:
        self._backend = self._kind.from_str(self._text)  # our own: the setting below is the object's
        self._backend.encode_special_tokens = True
        self._known: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        known = self._known.get(text)
        if known is not None:
            return known
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        if len(text) <= SHORT_TEXT and len(self._known) < REMEMBERED:
            self._known[text] = ids
        return ids

    @property
    def fingerprint(self) -> str:
        """Changes whenever a text may get other ids."""
        return str(xxhash.xxh3_64_hexdigest(self._text.encode()))

    def __getstate__(self) -> dict[str, Any]:
        return {"_kind": self._kind, "_text": self._text}  # for spawned workers: the backend forgets its setting

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._kind, self._text = state["_kind"], state["_text"]
        self._open()


def _layout_names(tokenizer: Any) -> set[str]:
    """The tokens that layouts are made of, by this tokenizer's names and Qwen's own."""
    named = {getattr(tokenizer, attribute, None) for attribute, _ in TOKEN_NAMES.values() if attribute}
    return {name for name in named if isinstance(name, str)} | {name for _, name in TOKEN_NAMES.values()}


def _with_special(text: str, names: set[str]) -> str:
    """A serialised tokenizer in which these added tokens are special."""
    content = json.loads(text)
    plain = [t for t in content.get("added_tokens", ()) if t["content"] in names and not t["special"]]
    if not plain:
        return text
    for token in plain:
        token["special"] = True
    return json.dumps(content, ensure_ascii=False)


def _id_of(tokenizer: Any, name: str) -> int | None:
    """The id of a token, None when there is none (an unknown token gives the id of <unk>, or of another token)."""
    found = tokenizer.convert_tokens_to_ids(name)
    return found if isinstance(found, int) and tokenizer.convert_ids_to_tokens(found) == name else None
