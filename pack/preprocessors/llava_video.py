"""llava_video: LLaVA-Video-178K, whose conversations call the video `<image>`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schemas.conversation import Part, Turn, turn_parts
from schemas.messages import to_turns
from schemas.registry import PREPROCESSOR_REGISTRY


@PREPROCESSOR_REGISTRY.register("LLaVA-Video-178K", arguments=())
@PREPROCESSOR_REGISTRY.register("llava_video", arguments=())
def llava_video(
    conversations: Any,
    *,
    row: Mapping[str, Any] | None = None,
    metadata: dict[str, Any] | None = None,
    num_images: int = 0,
    **kwargs: Any,
) -> list[Turn]:
    """Questions about a video: `<image>` means the video where the row has no image; one line break after it goes.

    The row's `data_source` is kept as metadata where it has one.
    """
    fields = row or {}
    turns = to_turns(conversations, fields.get("system"))
    if metadata is not None and isinstance(fields.get("data_source"), str):
        metadata["data_source"] = fields["data_source"]
    return [[turn[0], *_parts(turn, num_images == 0)] for turn in turns]


def _parts(turn: Turn, image_is_video: bool) -> list[Part]:
    parts: list[Part] = []
    for kind, payload in turn_parts(turn):
        if kind == "image" and image_is_video:
            kind = "video"
        if kind == "text" and parts and parts[-1][0] == "video":
            payload = (payload or "").removeprefix("\n")
        if kind != "text" or payload:
            parts.append((kind, payload))
    return parts
