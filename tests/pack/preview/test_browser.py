"""The page in a real browser: it must show and play what is in it, complain of nothing and ask nobody for anything."""

from pathlib import Path

import pytest

from pack.config import PreviewConfig
from pack.preview.page import render
from tests.browser import Page, find_chromium
from tests.pack.preview import samples as made

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        find_chromium() is None,
        reason="no Chromium; CI installs Debian's package chromium, elsewhere whoever has one runs `pytest -m browser`",
    ),
]
EVIL = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


@pytest.fixture(scope="module")
def preview(tmp_path_factory: pytest.TempPathFactory) -> Path:
    late = made.video(6.0, audio_s=5.0, size=(320, 180), audio={"start_s": 1.2}, flags=["vfr"])
    flac = made.video(2.0, audio_s=3.0, size=(90, 160), audio={"codec": "flac"})
    samples = [
        made.sample("late", [late], source="film", conversation=[["user", ("video", None), ("text", EVIL)]]),
        made.sample("flac", [flac], source="phone"),
        made.sample("silent", [made.video(40.0)], source="pattern"),
        made.sample("sound", audios=[(made.sine(1.5), made.audio_meta(1.5))], images=[made.image()]),
        made.sample("text"),
    ]
    rejects = [made.reject("broken", "unreadable_container", f"{EVIL}: no demuxer can read the file")]
    out = tmp_path_factory.mktemp("preview") / "preview.html"
    out.write_text(render(made.card(samples, rejects), rejects, samples, PreviewConfig()), encoding="utf-8")
    return out


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory, preview: Path) -> Page:
    with Page(tmp_path_factory.mktemp("profile")) as opened:
        opened.open(preview)
        loaded = "[...document.querySelectorAll('audio')].every((a) => a.readyState >= 1 || a.error)"
        opened.wait_for(lambda: opened.evaluate(loaded))
        yield opened


def test_every_picture_is_shown(browser: Page) -> None:
    sizes = browser.evaluate("[...document.images].map((i) => [i.naturalWidth, i.naturalHeight, i.clientWidth])")
    # 12 + 4 + 16 thumbnails of frames, one chosen frame per clip, one image
    assert len(sizes) == 12 + 4 + 16 + 3 + 1
    assert all(width > 0 and height > 0 and shown > 0 for width, height, shown in sizes)


def test_every_sound_loads_with_its_duration(browser: Page) -> None:
    found = browser.evaluate(
        "[...document.querySelectorAll('audio')].map((a) => [a.duration, a.error && a.error.code])"
    )
    assert [error for _, error in found] == [None, None, None]
    assert [duration for duration, _ in found] == pytest.approx([5.0, 3.0, 1.5], abs=0.001)


def test_no_complaint_no_request_and_nothing_injected(browser: Page) -> None:
    assert browser.complaints() == []
    assert browser.requests() == []
    assert browser.evaluate("document.title") == "made - omniloom preview"
    assert browser.evaluate("document.querySelector('.turn .text').textContent") == EVIL


def test_frames_lie_over_their_time_on_the_axis(browser: Page) -> None:
    measure = """(() => {
        const axis = document.querySelector('#s0-video0 .axis'), box = axis.getBoundingClientRect();
        const span = Number(axis.dataset.span);
        return [...axis.querySelectorAll('.frame')].map((f) =>
            [Number(f.dataset.time), (f.getBoundingClientRect().left - box.left) / box.width * span]);
    })()"""
    placed = browser.evaluate(measure)
    assert len(placed) == 12
    assert [at for _, at in placed] == pytest.approx([time for time, _ in placed], abs=0.02)
    wave = browser.evaluate(
        "(() => { const box = (name) => document.querySelector(`#s0-video0 ${name}`).getBoundingClientRect();"
        " const w = box('.wave svg'), a = box('.axis'); return [w.left - a.left, w.width - a.width]; })()"
    )
    assert wave == pytest.approx([0, 0], abs=0.5)


def test_a_click_on_a_frame_seeks_the_sound_and_moves_the_playhead(browser: Page) -> None:
    browser.evaluate("document.querySelectorAll('#s0-video0 .frame')[6].click()")
    browser.wait_for(lambda: not browser.evaluate("document.querySelector('#s0-video0 audio').seeking"))
    assert browser.evaluate("document.querySelector('#s0-video0 audio').currentTime") == pytest.approx(3.0, abs=0.01)
    where = browser.evaluate("parseFloat(document.querySelector('#s0-video0 .playhead').style.left)")
    assert where == pytest.approx(50.0, abs=0.2)
    current = browser.evaluate("document.querySelector('#s0-video0 .frame[aria-current]').dataset.time")
    assert float(current) == 3.0
    assert (
        browser.evaluate("document.querySelector('#s0-video0 .stage figcaption').textContent") == "frame 7 at 3.000 s"
    )


def test_playing_moves_on_and_stops_the_other_player(browser: Page) -> None:
    first, second = "document.querySelector('#s0-video0 audio')", "document.querySelector('#s1-video0 audio')"
    browser.evaluate(f"{first}.currentTime = 0, {first}.play()")
    browser.wait_for(lambda: browser.evaluate(f"{first}.currentTime") > 0.1)
    browser.evaluate(f"{second}.play()")
    browser.wait_for(lambda: browser.evaluate(f"{first}.paused && {second}.currentTime > 0.05"))
    assert not browser.evaluate(f"{first}.ended")
    browser.evaluate(f"{second}.pause()")


def test_the_filter_narrows_by_id_source_and_flag(browser: Page) -> None:
    def shown_for(text: str) -> list[str]:
        browser.evaluate(
            f"(() => {{ const f = document.getElementById('filter'); f.value = {text!r};"
            " f.dispatchEvent(new Event('input')); })()"
        )
        return browser.evaluate("[...document.querySelectorAll('article')].filter((a) => !a.hidden).map((a) => a.id)")

    assert shown_for("vfr") == ["s0"]
    assert shown_for("PHONE flac") == ["s1"]
    assert shown_for("nowhere") == []
    assert browser.evaluate("!document.getElementById('none').hidden")
    assert len(shown_for("")) == 5
    browser.evaluate("document.querySelector('[data-filter=vfr]').click()")
    assert browser.evaluate("document.getElementById('shown').textContent") == "1 of 5 samples on this page"
    browser.evaluate("document.querySelector('[data-filter=vfr]').click()")


@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1280, True)])
def test_no_sideways_scrolling_and_readable_colours(tmp_path: Path, preview: Path, width: int, dark: bool) -> None:
    with Page(tmp_path, width=width, dark=dark) as page:
        page.open(preview)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        colours = page.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        )
        ink, paper = (sum(map(int, c.removeprefix("rgb(").removesuffix(")").split(","))) for c in colours)
        assert (ink > paper) == dark and abs(ink - paper) > 450


def test_everything_that_is_clicked_can_be_reached_by_keyboard(browser: Page) -> None:
    unreachable = browser.evaluate(
        "[...document.querySelectorAll('.frame, .badge, .slot, audio, summary, .axis-scroll, .table-scroll')]"
        ".filter((e) => e.tabIndex < 0).map((e) => e.outerHTML.slice(0, 80))"
    )
    assert unreachable == []
    unnamed = browser.evaluate(
        "[...document.querySelectorAll('img, audio, [role=img], [role=region], section')]"
        ".filter((e) => !(e.alt || e.getAttribute('aria-label') || e.getAttribute('aria-labelledby')))"
        ".map((e) => e.outerHTML.slice(0, 80))"
    )
    assert unnamed == []
