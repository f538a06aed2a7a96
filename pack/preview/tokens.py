"""The token layout of a sample under one tokenizer, as the page shows it: what each stretch is, which tokens train."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from schemas.chat import ChatLayout, ChatPart, ChatStyle, Form, MediaSlot, build_layout
from schemas.chat_tokens import ChatTokens, PlainEncoder
from schemas.errors import ConfigError, OmniloomError
from schemas.media_counts import media_counts
from schemas.sample import SampleMeta

MOST_TOKENS = 600  # of one stretch of text that are shown
MOST_RUNS = 400  # of one clip whose order of picture and sound is drawn
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Token:
    """text: as shown, line breaks as an arrow; special: made by the layout, not by text."""

    id: int
    text: str
    trained: bool
    special: bool


@dataclass(frozen=True)
class TokenPart:
    """A stretch of the ids. kind: as in `ChatPart`; tokens: the first ones, none for media; hidden: how many more;
    runs: of a medium, in order: (video, audio, image or mark, number of tokens); note: in words."""

    kind: str
    role: str
    count: int
    tokens: list[Token] = field(default_factory=list)
    hidden: int = 0
    runs: list[tuple[str, int]] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True)
class TokenLayout:
    """facts: the sums in words; error: why there is no layout, then without parts."""

    facts: str
    parts: list[TokenPart] = field(default_factory=list)
    error: str = ""


class TokenPainter:
    """Lays out samples with the tokenizer of a checkpoint directory."""

    def __init__(self, tokenizer: Any, form: Form | None = None) -> None:
        self.tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        self.tokens = ChatTokens.from_tokenizer(tokenizer)
        self.encode = PlainEncoder(tokenizer)
        self.style = ChatStyle(form=form or ("qwen3_omni" if self.tokens.audio is not None else "qwen3_vl"))
        self.special = {value for value in vars(self.tokens).values() if value is not None}

    @classmethod
    def open(cls, folder: Path) -> TokenPainter:
        """ConfigError for a directory without a tokenizer that has the chat and media tokens."""
        from transformers import AutoTokenizer  # noqa: PLC0415  # seconds to import, for those who ask for tokens

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # a damaged tokenizer.json is a plain Exception of tokenizers
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"--tokenizer {folder}: transformers finds no tokenizer there: {reason}") from error
        return cls(tokenizer, family(folder))

    def layout(self, meta: SampleMeta) -> TokenLayout:
        """The layout of one sample, or why this tokenizer's model cannot take it."""
        try:
            counts = media_counts(meta, self.style)
            layout = build_layout(meta.conversation, self.encode, self.tokens, counts, self.style)
        except (OmniloomError, ValueError) as error:
            return TokenLayout("no token layout", error=str(error))
        slots = {slot.start: slot for slot in layout.slots}
        parts = [self._part(layout, part, slots.get(part.start)) for part in layout.parts]
        return TokenLayout(_facts(layout), parts)

    def _part(self, layout: ChatLayout, part: ChatPart, slot: MediaSlot | None) -> TokenPart:
        count = part.stop - part.start
        if slot is not None:
            runs = _runs(layout.ids, slot)
            return TokenPart(part.kind, part.role, count, runs=runs[:MOST_RUNS], note=_media_note(slot, count))
        shown = range(part.start, min(part.stop, part.start + MOST_TOKENS))
        tokens = [self._token(int(layout.ids[i]), bool(layout.label_mask[i])) for i in shown]
        return TokenPart(part.kind, part.role, count, tokens, hidden=count - len(tokens))

    def _token(self, number: int, trained: bool) -> Token:
        text = self.tokenizer.decode([number]).replace("\r", "").replace("\n", "\u21b5")
        return Token(number, text, trained, number in self.special)


def family(folder: Path) -> Form | None:
    """The layout that a checkpoint's files name: by its processor, which makes the layout, else by its model."""
    names = [str(_read(folder / name).get("processor_class", "")) for name in PROCESSOR_FILES]
    names.append(str(_read(folder / "config.json").get("model_type", "")))
    for name in names:
        plain = name.lower().replace("_", "")
        if plain.startswith("qwen3omni"):
            return "qwen3_omni"
        if plain.startswith("qwen3vl"):
            return "qwen3_vl"
    return None


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def _facts(layout: ChatLayout) -> str:
    total = len(layout.ids)
    sums = {"picture": 0, "sound": 0, "image": 0}
    for slot in layout.slots:
        sums[{"video": "picture", "audio": "sound", "image": "image"}[slot.kind]] += len(slot.rows)
        sums["sound"] += len(slot.sound_rows)
    named = [f"{total - sum(sums.values()):,} text", *(f"{count:,} {name}" for name, count in sums.items() if count)]
    return f"{total:,} tokens ({', '.join(named)}), {int(layout.label_mask.sum()):,} trained"


def _media_note(slot: MediaSlot, count: int) -> str:
    taken = {"video": "picture", "audio": "sound", "image": "image"}[slot.kind]
    words = [f"{len(slot.rows):,} {taken} tokens"]
    if len(slot.sound_rows):
        words.append(f"{len(slot.sound_rows):,} sound tokens between them by time")
    marks = count - len(slot.rows) - len(slot.sound_rows)
    return ", ".join([*words, f"{marks:,} marks"])


def _runs(ids: np.ndarray, slot: MediaSlot) -> list[tuple[str, int]]:
    kinds = np.full(slot.stop - slot.start, "mark", dtype="<U5")
    kinds[slot.rows - slot.start] = slot.kind
    kinds[slot.sound_rows - slot.start] = "audio"
    return [(kind, sum(1 for _ in run)) for kind, run in groupby(kinds.tolist())]
