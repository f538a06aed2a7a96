"""The token layout on the page: counts, label mask and order of picture and sound, against the processor's numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pack.config import PreviewConfig
from pack.preview import page
from pack.preview.tokens import TokenLayout, TokenPainter, family
from schemas.errors import ConfigError
from tests.pack.preview import samples as made
from tests.pack.preview.test_page import Reader
from tests.train.data.hub import TOKENIZER


@pytest.fixture(scope="module")
def painter() -> TokenPainter:
    return TokenPainter.open(TOKENIZER)


def _talk(*turns: tuple[str, str]) -> list[list[object]]:
    return [["user", ("video", None), ("text", turns[0][1])], *([role, ("text", text)] for role, text in turns[1:])]


def _layout(painter: TokenPainter, audio_s: float | None = 3.0) -> TokenLayout:
    talk = _talk(("user", "Who?"), ("assistant", "A dog."), ("user", "Sure?"), ("assistant", "Yes."))
    sample = made.sample("one", [made.video(3.0, audio_s=audio_s, size=(480, 320))], conversation=talk)
    return painter.layout(sample.meta)


def test_trained_tokens_are_the_replies_and_their_ends(painter: TokenPainter) -> None:
    layout = _layout(painter)
    trained = [t.text for part in layout.parts for t in part.tokens if t.trained]
    assert "".join(trained) == "A dog.<|im_end|>Yes.<|im_end|>"
    assert layout.facts.endswith(f"{len(trained)} trained")


def test_a_clip_shows_its_order_of_picture_and_sound(painter: TokenPainter) -> None:
    (clip,) = (part for part in _layout(painter).parts if part.kind == "video")
    assert clip.runs == [("mark", 2), *[("video", 150), ("audio", 13)] * 3, ("mark", 2)]
    assert clip.note == "450 picture tokens, 39 sound tokens between them by time, 4 marks"
    assert clip.count == 450 + 39 + 4


def test_all_text_tokens_can_be_read(painter: TokenPainter) -> None:
    layout = _layout(painter, audio_s=None)
    shown = "|".join("".join(t.text for t in part.tokens) for part in layout.parts)
    assert shown.startswith("<|im_start|>user\u21b5||Who?|<|im_end|>\u21b5|<|im_start|>assistant\u21b5|A dog.|")


def test_the_page_marks_the_trained_tokens(painter: TokenPainter) -> None:
    sample = made.sample("one", [made.video(3.0, audio_s=3.0, size=(480, 320))])
    html = page.render(made.card([sample]), [], [sample], PreviewConfig(), painter)
    found = Reader(html)
    trained = [a for a in found.all("span") if "trained" in a.get("class", "").split()]
    assert len(trained) == sum(t.trained for part in painter.layout(sample.meta).parts for t in part.tokens) > 1
    assert all(a["title"].endswith(", trained") for a in trained)
    assert len([a for a in found.all("i") if a.get("class") == "audio"]) == 3
    assert "trained" not in page.render(made.card([sample]), [], [sample], PreviewConfig()).partition("<body>")[2]


def test_a_sample_that_the_model_cannot_take_says_why() -> None:
    vision = TokenPainter(TokenPainter.open(TOKENIZER).tokenizer, "qwen3_vl")
    sample = made.sample(
        "one", audios=[(made.sine(1.0), made.audio_meta(1.0))], conversation=[["user", ("audio", None)]]
    )
    layout = vision.layout(sample.meta)
    assert layout.parts == [] and "Qwen3-VL takes no sound" in layout.error
    html = page.render(made.card([sample]), [], [sample], PreviewConfig(), vision)
    assert "Qwen3-VL takes no sound" in Reader(html).text


def test_the_family_is_read_from_the_files(tmp_path: Path) -> None:
    assert family(TOKENIZER) == "qwen3_omni"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl_moe"}))
    assert family(tmp_path) == "qwen3_vl"
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"processor_class": "Qwen3OmniMoeProcessor"}))
    assert family(tmp_path) == "qwen3_omni"  # the processor makes the layout, not the model


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--tokenizer {tmp_path}"):
        TokenPainter.open(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="transformers finds no tokenizer there"):
        TokenPainter.open(tmp_path)
