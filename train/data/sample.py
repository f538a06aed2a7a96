"""What the store gives, laid out for one model: a transformed sample. `batch` has many of them, packed.

A `TrainSample` is made from a packed row without touching its pictures and sounds: ids, labels and positions follow
from sizes and durations alone. Media are decoded later, unit by unit, by the rank that will encode them
(`transform.decode_unit`), to uint8 pictures and int16 sound; normalising, patches and log-mel run on the device
(`features`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

UnitKind = Literal["video", "image", "audio"]
IGNORE = -100  # label of a token without loss


@dataclass(frozen=True)
class MediaUnit:
    """One picture sequence, picture or sound of a sample, and the rows of the ids that its embeddings fill.

    kind, index: n-th medium of its kind in the sample; of_video: kind is audio, and it is the own sound of video
    `index`;
    rows: int64 [n], rows of TrainSample.ids, in the order of the encoder's output: of a video or image one per merged
    patch, row-major over grid (t, h / 2, w / 2); of a sound one per audio token;
    grid: (t, h, w) in patches, of a video or image; size: (height, width) in pixels that the device part brings the
    pictures to;
    second_per_grid: s between the grids of a video;
    num_samples: 16 kHz sound samples; num_mel: log-mel frames, num_samples // 160;
    blobs: encoded: one JPEG or PNG per frame (an odd number of frames is padded by repeating the last), one WAV or
    FLAC per sound; () once decoded or dead;
    values: decoded: uint8 [frames, H, W, 3], or int16 or float32 [num_samples]; None before.
    """

    kind: UnitKind
    index: int
    rows: np.ndarray
    of_video: bool = False
    grid: tuple[int, int, int] | None = None
    size: tuple[int, int] | None = None
    second_per_grid: float = 0.0
    num_samples: int = 0
    num_mel: int = 0
    blobs: tuple[bytes, ...] = ()
    values: np.ndarray | None = None


@dataclass(frozen=True)
class SampledResponse:
    """How the last tokens of a sample came about, which a policy drew.

    start: row of the first of them; logprobs: float32 [R], of each when it was drawn; ref_logprobs: float32 [R] of a
    reference, or None; rewards: float64 [G], of all responses to the same row; number: which of them this is.
    """

    start: int
    logprobs: np.ndarray
    ref_logprobs: np.ndarray | None
    rewards: np.ndarray
    number: int


@dataclass(frozen=True)
class TrainSample:
    """One conversation, ready to be packed beside others.

    ids: int64 [L]; labels: int64 [L], the token itself where it is trained, else -100; NOT yet shifted;
    position_ids: [3, L] (time, height, width): float32 of Qwen3-Omni, int64 of Qwen3-VL; both start at 0;
    media: in the order of their first row; source: name of the data source; key: id of the row;
    num_label_tokens: labels that are not -100, before the shift; num_text, num_video, num_audio, num_image: tokens by
    modality, adding up to L; response: of a sample that ends with a recorded rollout, whose key is <id>#<number>.
    """

    ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    media: list[MediaUnit]
    source: str
    key: str
    num_label_tokens: int
    num_text: int
    num_video: int = 0
    num_audio: int = 0
    num_image: int = 0
    response: SampledResponse | None = None

    def __len__(self) -> int:
        return len(self.ids)


def dead_copy(sample: TrainSample) -> TrainSample:
    """The same geometry with no label and no media bytes: what stands in for a sample that cannot be read. Its units
    have neither blobs nor values and count as zeros (`transform.decode_unit`)."""
    labels = np.full_like(sample.labels, IGNORE)
    media = [replace(unit, blobs=(), values=None) for unit in sample.media]
    return replace(sample, labels=labels, media=media, num_label_tokens=0, response=None)
