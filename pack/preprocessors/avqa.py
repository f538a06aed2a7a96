"""avqa: multiple choice about what is seen and heard (AVQA and data in its form)."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from pack.preprocessors.choices import bad, check_answer_form, media_parts, parse_choices, text_of
from schemas.conversation import Turn
from schemas.registry import PREPROCESSOR_REGISTRY

QUESTION_KEYS = ("question_text", "question", "problem")
CHOICE_KEYS = ("multi_choice", "choices", "options")
ANSWER_KEYS = ("answer", "solution")
KEPT = ("question_relation", "question_type", "video_name", "video_id", "data_source")
INSTRUCTION = "Answer with the letter of the right choice."


@PREPROCESSOR_REGISTRY.register("avqa", arguments=("answer_form", "instruction", "shuffle_choices"))
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
    **kwargs: Any,
) -> list[Turn]:
    """Media, question, lettered choices -> the right letter; choices, answer and scoring kind are kept as metadata.

    answer_form: label | text | label_text; instruction: the line after the choices ("" for none); shuffle_choices:
    another order for every row, by `rng`.
    """
    fields = conversations if isinstance(conversations, Mapping) else row or {}
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
