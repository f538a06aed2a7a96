"""What stands in the HTML, read back by a parser of its own."""

import base64
import hashlib
import io
import re
from html.parser import HTMLParser

import pytest
import soundfile
from PIL import Image

from pack.config import PreviewConfig
from pack.preview import page
from schemas.sample import FLAGS, PackedSample
from tests.pack.preview import samples as made


class Reader(HTMLParser):
    """Elements with their attributes, and the text of the page outside of script and style."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.raw: list[tuple[str, str]] = []
        self._inside = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in ("script", "style"):
            self.raw.append((self._inside, data))
        else:
            self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def render(*samples: PackedSample, **more: object) -> Reader:
    card = made.card(samples)
    return Reader(page.render(card, [], list(samples), PreviewConfig(**more)))


def test_frames_and_sound_in_the_page_are_those_of_the_sample() -> None:
    sample = made.sample("one", [made.video(3.0, audio_s=3.0, size=(480, 320))])
    found = render(sample)
    pictures = [i for i in found.all("img") if i.get("src")]
    assert len(pictures) == 6
    for k, attributes in enumerate(pictures):
        thumb = Image.open(io.BytesIO(base64.b64decode(attributes["src"].partition("base64,")[2])))
        assert thumb.size == (240, 160) == (int(attributes["width"]), int(attributes["height"]))
        assert thumb.convert("L").getpixel((100, 100)) == pytest.approx(20 + 13 * k, abs=3)
        assert attributes["alt"] == f"frame {k + 1} at {k / 2:.3f} s"
    (player,) = found.all("audio")
    assert base64.b64decode(player["src"].removeprefix("data:audio/wav;base64,")) == sample.videos[0].audio
    assert player["aria-label"] == "sound of video 1 of sample one"


def test_nothing_is_loaded_from_anywhere() -> None:
    sample = made.sample("one", [made.video(2.0, audio_s=2.0)], images=[made.image()])
    found = render(sample)
    addresses = [a[name] for _, a in found.elements for name in ("src", "href", "data", "poster") if a.get(name)]
    assert addresses and all(a.startswith(("data:", "#")) for a in addresses)
    raw = " ".join(text for _, text in found.raw)
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|https?:", raw)
    (policy,) = [m["content"] for m in found.all("meta") if m.get("http-equiv")]
    assert policy.startswith("default-src 'none'; ")
    (script,) = [text for name, text in found.raw if name == "script"]
    assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy


def test_whatever_people_write_stays_text() -> None:
    evil = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)> & \"quoted\""
    sample = made.sample(
        f"id-{evil}",
        [made.video(1.0, audio_s=1.0)],
        source=f"src-{evil}",
        conversation=[["user", ("video", None), ("text", evil)], ["assistant", ("text", "{{ 7 * 7 }}")]],
        extra={"note": evil},
    )
    reject = made.reject(f"bad-{evil}", "missing_file", f"{evil}: no such file")
    card = made.card([sample], [reject], name=evil)
    found = Reader(page.render(card, [reject], [sample], PreviewConfig()))
    assert len(found.all("script")) == 1
    assert not [i for i in found.all("img") if i.get("src") == "x" or "onerror" in i]
    assert found.text.count("document.title='owned'") >= 5
    assert "{{ 7 * 7 }}" in found.text


def test_flags_are_explained_and_can_be_searched() -> None:
    flags = ["vfr", "rotated"]
    sample = made.sample("one", [made.video(1.0, audio_s=1.0, flags=flags, audio={"flags": ["clipped"]})])
    found = render(sample)
    (article,) = found.all("article")
    assert {"one", "made", "vfr", "rotated", "clipped"} == set(article["data-search"].split())
    for flag in [*flags, "clipped"]:
        assert FLAGS[flag] in found.text
        assert flag in [b.get("data-filter") for b in found.all("button")]


def test_markers_stand_in_place_and_lead_to_their_media() -> None:
    turns = [["system", ("text", "Be brief.")], ["user", ("text", "First"), ("image", None), ("text", "then")]]
    turns[1] += [("video", None), ("text", "and"), ("video", None)]
    turns.append(["assistant", ("text", "Yes.")])
    clips = [made.video(1.0), made.video(1.0)]
    found = render(made.sample("one", clips, images=[made.image()], conversation=turns))
    assert "First image 1 then video 1 and video 2" in found.text
    targets = [a["href"].removeprefix("#") for a in found.all("a") if "slot" in a.get("class", "")]
    assert targets == ["s0-image0", "s0-video0", "s0-video1"]
    assert set(targets) <= {a["id"] for _, a in found.elements if a.get("id")}


def test_every_kind_of_sample_and_an_empty_dataset() -> None:
    text = made.sample("text")
    silent = made.sample("silent", [made.video(2.0)])
    sound = made.sample("sound", audios=[(made.sine(1.0), made.audio_meta(1.0))])
    one = made.sample("one-frame", [made.video(0.04, fps=25.0)])
    found = render(text, silent, sound, one)
    assert len(found.all("article")) == 4 and len(found.all("audio")) == 1
    assert "text only" in found.text
    empty = Reader(page.render(made.card([]), [], [], PreviewConfig()))
    assert "This dataset has no packed sample." in empty.text
    assert not empty.all("article") and not empty.all("input")


def test_rejected_rows_with_their_reasons() -> None:
    rejects = [made.reject(f"r{i:03d}", "missing_file", f"clip{i}.mp4 does not exist") for i in range(250)]
    rejects.append(made.reject("torn", "truncated", "torn.mp4 ends at 1.2 of 5.0 s"))
    found = Reader(page.render(made.card([], rejects), rejects, [], PreviewConfig()))
    assert "250 missing_file the file does not exist" in found.text
    assert "1 truncated the file ends before its header says" in found.text
    assert "The first 200 of 251" in found.text
    assert "clip199.mp4 does not exist" in found.text and "clip200.mp4" not in found.text


def test_a_frame_that_does_not_decode_is_shown_as_such() -> None:
    packed, meta = made.video(1.0)
    packed.frames[1] = b"no jpeg"
    found = render(made.sample("one", [(packed, meta)]))
    assert "these 7 bytes do not decode" in found.text


def test_many_sounds_share_the_room_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PAGE_SOUND_BYTES", 4 * 20_000)
    sounds = [made.sample(str(i), audios=[(made.sine(2.0), made.audio_meta(2.0))]) for i in range(4)]
    found = render(*sounds)
    stored = [base64.b64decode(a["src"].partition("base64,")[2]) for a in found.all("audio")]
    assert all(len(s) <= 20_044 and soundfile.info(io.BytesIO(s)).duration > 0.6 for s in stored)
    assert found.text.count("to keep this page small") >= 4


def test_the_same_samples_give_the_same_page() -> None:
    def once() -> str:
        samples = [made.sample("one", [made.video(2.0, audio_s=2.0)])]
        return page.render(made.card(samples), [], samples, PreviewConfig())

    assert once() == once()
