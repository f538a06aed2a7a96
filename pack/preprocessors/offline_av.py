"""qwen_omni_offline_av: the offline audio/video form of Qwen-Omni data, and the general one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schemas.conversation import Turn
from schemas.messages import to_turns
from schemas.registry import PREPROCESSOR_REGISTRY


@PREPROCESSOR_REGISTRY.register("qwen_omni_offline_av", arguments=())
def qwen_omni_offline_av(conversations: Any, *, row: Mapping[str, Any] | None = None, **kwargs: Any) -> list[Turn]:
    """Any known conversation form; markers bind media in order, one <video> takes picture and sound.

    Text between markers is kept as it is, line breaks included. Videos may be files or `frames`/`audio` that are
    extracted already (`schemas.media_items` has their rules for video_fps and audio_fps).
    """
    return to_turns(conversations, (row or {}).get("system"))
