"""video_r1: verifiable questions of five kinds about a video or image (Video-R1 and data in its form)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pack.preprocessors.choices import bad, media_parts, parse_choices, text_of, untag
from pack.preprocessors.filters import MEDIA, check_media, check_source, check_type, names_of
from schemas.conversation import Turn
from schemas.registry import PREPROCESSOR_REGISTRY

# problem_type of the data -> (scoring kind, what the answer is to be)
PROBLEM_TYPES: dict[str, tuple[str, str]] = {
    "multiple choice": ("multiple_choice", "the letter of the right choice"),
    "numerical": ("numerical", "a number"),
    "ocr": ("ocr", "the text as it is written"),
    "free-form": ("free_form", "a short text"),
    "open-ended": ("free_form", "a short text"),
    "regression": ("regression", "a number"),
}
KEPT = ("problem_id", "problem_type", "data_type", "data_source")
REASONING = "Think first, inside <think> </think>."
ANSWER = "Give {kind} inside <answer> </answer>."

# the minus of typeset text, small and full-width forms
_SIGNS = str.maketrans({"\u2212": "-", "\ufe63": "-", "\uff0d": "-", "\uff05": "%"})

ARGUMENTS = ("reasoning", "types", "source_prefixes", "require_media")


@PREPROCESSOR_REGISTRY.register("Video-R1", arguments=ARGUMENTS)
@PREPROCESSOR_REGISTRY.register("video_r1", arguments=ARGUMENTS)
def video_r1(
    conversations: Any,
    *,
    row: Mapping[str, Any] | None = None,
    metadata: dict[str, Any] | None = None,
    num_videos: int = 1,
    num_audios: int = 0,
    num_images: int = 0,
    reasoning: bool = True,
    types: str | list[str] | None = None,
    source_prefixes: str | list[str] | None = None,
    require_media: str | list[str] | None = None,
    **kwargs: Any,
) -> list[Turn]:
    """Media, problem (and choices) -> <think> and <answer>; choices, answer and scoring kind are kept as metadata.

    The assistant says `process` (where the row has it, and `reasoning` is true) and the answer in its tags. The file of
    the row stands under `path` with `data_type`, or in the usual lists of media.
    Filters, each null for none: types: of problem_type (the keys of `PROBLEM_TYPES`); source_prefixes: of data_source
    or source; require_media: at least one of each of video, audio, image.
    """
    fields = conversations if isinstance(conversations, Mapping) else row or {}
    kind = fields.get("problem_type")
    check_type(kind, names_of(types, "types", tuple(PROBLEM_TYPES)), "problem_type")
    check_source(fields, names_of(source_prefixes, "source_prefixes"))
    counts = {"video": num_videos, "audio": num_audios, "image": num_images}
    check_media(counts, names_of(require_media, "require_media", MEDIA))
    if not isinstance(kind, str) or kind.lower() not in PROBLEM_TYPES:
        raise bad(f"unknown problem_type {kind!r}; known: {', '.join(PROBLEM_TYPES)}")
    scoring, wanted = PROBLEM_TYPES[kind.lower()]
    problem, solution = text_of(fields, "problem", "question"), untag(text_of(fields, "solution", "answer"))
    if not solution:
        raise bad("the solution is empty")
    lines: list[str] = [problem]
    facts: dict[str, Any] = {"answer": solution, "scoring": scoring}
    if scoring == "multiple_choice":
        choices = parse_choices(fields.get("options"), solution, "options")
        lines += [] if choices.lines() in problem else [choices.lines()]
        facts = choices.metadata()
    if scoring in ("numerical", "regression"):
        facts["answer_value"] = parse_number(solution)
    process = fields.get("process") if reasoning else None
    lines += [REASONING] if process else []
    lines.append(ANSWER.format(kind=wanted))
    if metadata is not None:
        metadata.update(facts, question=problem)
        metadata.update({key: fields[key] for key in KEPT if isinstance(fields.get(key), str | int)})
    media = media_parts(num_videos, num_audios, num_images)
    said = f"<answer>{facts['answer']}</answer>"
    answer = f"{str(process).strip()}\n{said}" if process else said
    return [["user", *media, ("text", "\n".join(lines))], ["assistant", ("text", answer)]]


def parse_number(text: str) -> float | None:
    """The value of '12', '1,200.5', '35%' (0.35), '3/4', '1/2%' (0.005), with any of Unicode's minus signs; None for
    anything else, which a scorer compares as text."""
    plain = text.translate(_SIGNS).replace(",", "").replace(" ", "").rstrip(".")
    scale = 0.01 if plain.endswith("%") else 1.0
    top, slash, bottom = plain.removesuffix("%").partition("/")
    try:
        value = float(top) / float(bottom) if slash else float(top)
    except (ValueError, ZeroDivisionError):
        return None
    return value * scale if abs(value) < float("inf") else None
