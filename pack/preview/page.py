"""The preview page: one HTML file that holds everything it shows and loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from pack.config import PreviewConfig
from pack.preview import plots, timeline, view
from pack.preview.facts import facts_of
from pack.preview.load import load_rejects, load_samples
from pack.preview.tokens import TokenPainter
from pack.reader import CARD_FILE, PackedDataset
from pack.storage import explain_io, write_atomic
from schemas.dataset import DatasetCard, Reject
from schemas.errors import REJECT_REASONS, IncompleteSourceError
from schemas.sample import PackedSample

MAX_SOUND_BYTES = 2 * 2**20  # one sound in the page; 65 s of 16-bit WAV at 16 kHz
PAGE_SOUND_BYTES = 32 * 2**20  # all sounds of the page


def write_preview(dataset: str, out: Path, config: PreviewConfig, painter: TokenPainter | None = None) -> None:
    """Writes the page of a merged dataset (a folder or URL), atomically. painter: also shows the tokens of each sample.

    IncompleteSourceError when there is no merged dataset, SchemaError when a chosen sample is damaged.
    """
    packed = PackedDataset(dataset)
    card = packed.card()
    if card is None:
        missing = packed.storage.url(CARD_FILE)
        raise IncompleteSourceError(f"{missing} does not exist; `omniloom pack merge` makes it")
    html = render(card, load_rejects(packed.storage), load_samples(packed, card, config.samples), config, painter)
    with explain_io("cannot write", str(out)):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, html.encode())


def render(
    card: DatasetCard,
    rejects: Sequence[Reject],
    samples: Sequence[PackedSample],
    config: PreviewConfig,
    painter: TokenPainter | None = None,
) -> str:
    """The HTML of the page for these samples, in this order."""
    sounds = sum(len(s.audios) + sum(v.audio is not None for v in s.videos) for s in samples)
    sound_bytes = min(MAX_SOUND_BYTES, PAGE_SOUND_BYTES // max(1, sounds))
    views = [view.view_sample(sample, i, config.max_frames, sound_bytes, painter) for i, sample in enumerate(samples)]
    loudness = [t.sound.rms_dbfs for v in views for t in v.timelines if t.sound]
    script, style = _resource("page.js"), _resource("page.css")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["pct"] = lambda value: f"{value:.4f}".rstrip("0").rstrip(".") + "%"
    return environment.from_string(_resource("page.html")).render(
        facts=facts_of(card, rejects, loudness),
        samples=views,
        draw=plots.draw,
        reject_reasons=REJECT_REASONS,
        wave_width=timeline.WAVE_WIDTH,
        wave_height=timeline.WAVE_HEIGHT,
        css=Markup(style),
        script=Markup(script),
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _resource(name: str) -> str:
    return files("pack.preview").joinpath(name).read_text(encoding="utf-8")
