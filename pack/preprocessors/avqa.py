"""avqa: multiple choice about what is seen and heard (AVQA and data in its form)."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from pack.preprocessors.choices import bad, check_answer_form, media_parts, parse_choices, text_of
from pack.preprocessors.filters import MEDIA, check_media, check_source, check_type, names_of
from schemas.conversation import Turn
from schemas.registry import PREPROCESSOR_REGISTRY

QUESTION_KEYS = ("question_text", "question", "problem")
CHOICE_KEYS = ("multi_choice", "choices", "options")
ANSWER_KEYS = ("answer", "solution")
KEPT = ("question_relation", "question_type", "video_name", "video_id", "data_source")
INSTRUCTION = "Answer with the letter of the right choice."


ARGUMENTS = (
    "answer_form",
    "instruction",
    "shuffle_choices",
    "types",
    "relations",
    "source_prefixes",
    "require_media",
)


@PREPROCESSOR_REGISTRY.register("avqa", arguments=ARGUMENTS)
def avqa(
    conversations: Any,
    *,
    row: Mapping[str, Any] | None = None,
    metadata: dict[str, Any] | None = None,
    rng: random.Random | None = None,
    num_videos: int = 1,
    num_audios: int = 0,
    num_images: int = 0,
    answer_form: str = "label",
    instruction: str = INSTRUCTION,
    shuffle_choices: bool = False,
    types: str | list[str] | None = None,
    relations: str | list[str] | None = None,
    source_prefixes: str | list[str] | None = None,
    require_media: str | list[str] | None = None,
    **kwargs: Any,
) -> list[Turn]:
    """Media, question, lettered choices -> the right letter; choices, answer and scoring kind are kept as metadata.

    answer_form: label | text | label_text; instruction: the line after the choices ("" for none); shuffle_choices:
    another order for every row, by `rng`.
    Filters, each null for none: types: of question_type (Happening, Which, ...); relations: of question_relation
    (View, Sound, Both); source_prefixes: of data_source or source; require_media: at least one of each of video, audio,
    image.
    """
    fields = conversations if isinstance(conversations, Mapping) else row or {}
    check_type(fields.get("question_type"), names_of(types, "types"), "question_type")
    check_type(fields.get("question_relation"), names_of(relations, "relations"), "question_relation")
    check_source(fields, names_of(source_prefixes, "source_prefixes"))
    counts = {"video": num_videos, "audio": num_audios, "image": num_images}
    check_media(counts, names_of(require_media, "require_media", MEDIA))
    form = check_answer_form(answer_form)
    options = next((key for key in CHOICE_KEYS if fields.get(key)), None)
    answer = next((fields[key] for key in ANSWER_KEYS if fields.get(key) is not None), None)
    if options is None:
        raise bad(f"the row has no choices under {' or '.join(CHOICE_KEYS)}")
    question = text_of(fields, *QUESTION_KEYS)
    choices = parse_choices(fields[options], answer, options)
    if shuffle_choices:
        if rng is None:
            raise ValueError("shuffle_choices needs rng")
        choices = choices.shuffled(rng)
    prompt = "\n".join(line for line in (question, choices.lines(), instruction) if line)
    if metadata is not None:
        metadata.update(choices.metadata(), question=question)
        metadata.update({key: fields[key] for key in KEPT if isinstance(fields.get(key), str | int)})
    media = media_parts(num_videos, num_audios, num_images)
    return [["user", *media, ("text", prompt)], ["assistant", ("text", choices.answer(form))]]
