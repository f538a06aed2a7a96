"""One packed or text row -> `TrainSample`, and the decoding of its media. CPU only; the device part is `features`.

Ids, labels and positions follow from sizes, rates and durations, so a sample is laid out without opening a picture or a
sound; each rank then decodes the units (or the grids of a video) that it will encode.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import simplejpeg
import soundfile

from schemas.chat import ChatLayout, MediaCounts, MediaSlot, build_layout
from schemas.conversation import Turn
from schemas.errors import SchemaError
from schemas.media_counts import image_size, media_counts, video_size
from schemas.rollouts import RolloutRow
from schemas.sample import PackedSample
from train.data.processor import ProcessorAssets
from train.data.response_layout import check_prompt, prompt_layout, response_layout
from train.data.rope_index import position_ids
from train.data.sample import IGNORE, MediaUnit, SampledResponse, TrainSample

JPEG_START = b"\xff\xd8"


@dataclass(frozen=True)
class SampleTransform:
    """Lays out samples for one processor. Picklable."""

    assets: ProcessorAssets

    def packed(self, sample: PackedSample, source: str) -> TrainSample:
        """The layout of a packed row, its units still encoded. source: name of the data source that it came from.

        RowError or UnsupportedError for a row that this model cannot take; `lengths` names such rows beforehand.
        """
        counts = media_counts(sample.meta, self.assets.style)
        layout = self._layout(sample.meta.conversation, counts)
        units = [unit for slot in layout.slots for unit in self._units(slot, sample, counts)]
        return self._sample(layout, counts, units, source, sample.meta.id)

    def responses(self, sample: PackedSample, row: RolloutRow, source: str) -> list[TrainSample]:
        """A packed row with each of its recorded responses in the place of the last answer.

        SchemaError when the responses were drawn from another prompt; else as `packed`.
        """
        counts = media_counts(sample.meta, self.assets.style)
        prompt = prompt_layout(sample.meta.conversation, counts, self.assets)
        check_prompt(row, prompt)
        units = [unit for slot in prompt.slots for unit in self._units(slot, sample, counts)]
        rewards = np.array(row.rewards, np.float64)
        made = []
        for number, drawn in enumerate(row.responses):
            layout = response_layout(prompt, drawn.ids)
            laid_out = self._sample(layout, counts, units, source, f"{sample.meta.id}#{number}")
            reference = None if drawn.ref_logprobs is None else np.array(drawn.ref_logprobs, np.float32)
            logprobs = np.array(drawn.logprobs, np.float32)
            response = SampledResponse(len(prompt.ids), logprobs, reference, rewards, number)
            made.append(replace(laid_out, response=response))
        return made

    def text(self, turns: Sequence[Turn], source: str, key: str) -> TrainSample:
        """The layout of a row without media."""
        counts = MediaCounts()
        return self._sample(self._layout(turns, counts), counts, [], source, key)

    def _layout(self, turns: Sequence[Turn], counts: MediaCounts) -> ChatLayout:
        return build_layout(turns, self.assets.encode, self.assets.tokens, counts, self.assets.style)

    def _sample(
        self, layout: ChatLayout, counts: MediaCounts, units: list[MediaUnit], source: str, key: str
    ) -> TrainSample:
        taken = {kind: sum(len(u.rows) for u in units if u.kind == kind) for kind in ("video", "audio", "image")}
        return TrainSample(
            ids=layout.ids,
            labels=np.where(layout.label_mask, layout.ids, IGNORE),
            position_ids=position_ids(layout, counts, self.assets.style),
            media=sorted((unit for unit in units if len(unit.rows)), key=lambda unit: int(unit.rows[0])),
            source=source,
            key=key,
            num_label_tokens=int(layout.label_mask.sum()),
            num_text=len(layout.ids) - sum(taken.values()),
            num_video=taken["video"],
            num_audio=taken["audio"],
            num_image=taken["image"],
        )

    def _units(self, slot: MediaSlot, sample: PackedSample, counts: MediaCounts) -> list[MediaUnit]:
        """The encoded units of one slot: a video with sound has two."""
        meta, style, index = sample.meta, self.assets.style, slot.index
        if slot.kind == "audio":
            samples = meta.audios[index].num_samples
            return [self._sound(index, slot.rows, samples, sample.audios[index], of_video=False)]
        if slot.kind == "image":
            size = image_size(meta.images[index], style)
            blobs = (sample.images[index],)
            return [MediaUnit("image", index, slot.rows, grid=counts.images[index], size=size, blobs=blobs)]
        count, video = counts.videos[index], meta.videos[index]
        unit = MediaUnit(
            kind="video",
            index=index,
            rows=slot.rows,
            grid=count.grid,
            size=video_size(video, style),
            second_per_grid=count.second_per_grid,
            blobs=tuple(sample.videos[index].frames),
        )
        sound = sample.videos[index].audio
        if not len(slot.sound_rows) or video.audio is None or sound is None:
            return [unit]
        return [unit, self._sound(index, slot.sound_rows, video.audio.num_samples, sound, of_video=True)]

    def _sound(self, index: int, rows: np.ndarray, samples: int, blob: bytes, of_video: bool) -> MediaUnit:
        spec = self.assets.sound
        mel = samples // spec.hop_length if spec else 0
        return MediaUnit("audio", index, rows, of_video, num_samples=samples, num_mel=mel, blobs=(blob,))


def decode_unit(unit: MediaUnit, temporal_patch: int = 2, grids: tuple[int, int] | None = None) -> MediaUnit:
    """The unit with `values`, without `blobs`: uint8 [frames, height, width, 3] or int16 [num_samples].

    grids: (start, stop), only these grids of a video, and only their rows. A unit without blobs (of a dead sample)
    gives zeros of the same geometry. SchemaError for a picture or sound that is not what the layout counted on.
    """
    if unit.kind == "audio":
        values = _decode_sound(unit) if unit.blobs else np.zeros(unit.num_samples, np.int16)
        return replace(unit, blobs=(), values=values)
    if unit.grid is None or unit.size is None:
        raise ValueError(f"{unit.kind} {unit.index} has no grid or size")
    start, stop = (0, unit.grid[0]) if grids is None else grids
    if not 0 <= start < stop <= unit.grid[0]:
        raise ValueError(f"{unit.kind} {unit.index}: grids {start} to {stop} of {unit.grid[0]}")
    per_grid = len(unit.rows) // unit.grid[0]
    rows = unit.rows[start * per_grid : stop * per_grid]
    grid = (stop - start, *unit.grid[1:])
    blobs = unit.blobs[start * temporal_patch : stop * temporal_patch]
    frames = (stop - start) * temporal_patch if unit.kind == "video" else 1
    pictures = decode_pictures(blobs) if blobs else np.zeros((frames, *unit.size, 3), np.uint8)
    return replace(unit, rows=rows, grid=grid, blobs=(), values=pictures)


def decode_pictures(blobs: Sequence[bytes]) -> np.ndarray:
    """uint8 [n, height, width, 3] of JPEG or PNG pictures of one size. SchemaError for damaged ones."""
    first = _decode_picture(blobs[0])
    pictures = np.empty((len(blobs), *first.shape), np.uint8)
    pictures[0] = first
    for i, blob in enumerate(blobs[1:], start=1):
        _decode_picture(blob, pictures[i])
    return pictures


def _decode_picture(blob: bytes, into: np.ndarray | None = None) -> np.ndarray:
    """uint8 [height, width, 3]; into: where to put it, of the size that it must have."""
    try:
        if blob[:2] == JPEG_START:
            height, width, _, _ = simplejpeg.decode_jpeg_header(blob)
            _check_size((height, width), into)
            picture: np.ndarray = simplejpeg.decode_jpeg(blob, "RGB", fastdct=False, buffer=into)
            return picture
        picture = _decode_png(blob)
    except (ValueError, OSError) as error:
        raise SchemaError(f"a picture of {len(blob)} bytes cannot be decoded: {error}") from error
    _check_size(picture.shape[:2], into)
    if into is not None:
        into[:] = picture
    return picture


def _check_size(size: Sequence[int], into: np.ndarray | None) -> None:
    if into is not None and tuple(size) != into.shape[:2]:
        raise SchemaError(
            f"a picture of {size[1]}x{size[0]} pixels among pictures of {into.shape[1]}x{into.shape[0]} in one video"
        )


def _decode_png(blob: bytes) -> np.ndarray:
    from PIL import Image  # noqa: PLC0415  # only datasets packed with codec: png need it

    with Image.open(io.BytesIO(blob), formats=["PNG"]) as picture:
        return np.asarray(picture.convert("RGB"))


def _decode_sound(unit: MediaUnit) -> np.ndarray:
    try:
        samples, _ = soundfile.read(io.BytesIO(unit.blobs[0]), dtype="int16")
    except (soundfile.LibsndfileError, RuntimeError, ValueError) as error:
        raise SchemaError(f"a sound of {len(unit.blobs[0])} bytes cannot be decoded: {error}") from error
    if samples.shape != (unit.num_samples,):
        raise SchemaError(f"a sound has {samples.shape} samples; its meta says {unit.num_samples} of one channel")
    decoded: np.ndarray = samples
    return decoded
