"""plain_sft: text only, in which a marker is text as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schemas.conversation import Turn
from schemas.errors import RowError
from schemas.messages import to_turns
from schemas.registry import PREPROCESSOR_REGISTRY


@PREPROCESSOR_REGISTRY.register("tulu-3-sft-mixture", arguments=())
@PREPROCESSOR_REGISTRY.register("plain_sft", arguments=())
def plain_sft(
    conversations: Any,
    *,
    row: Mapping[str, Any] | None = None,
    num_videos: int = 0,
    num_audios: int = 0,
    num_images: int = 0,
    **kwargs: Any,
) -> list[Turn]:
    """Text only: messages, from/value, query/response, instruction/input/output; "<image>" is text here."""
    if num_videos or num_audios or num_images:
        media = f"{num_videos} videos, {num_audios} audios, {num_images} images"
        raise RowError("marker_mismatch", f"plain_sft takes rows without media; this one has {media}", "preprocess")
    return to_turns(conversations, (row or {}).get("system"), markers=False)
