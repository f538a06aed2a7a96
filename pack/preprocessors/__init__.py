"""The built-in preprocessors: importing this package registers every one of them.

A preprocessor is `fn(conversations, **kwargs) -> turns`. conversations: what the row has under `conversations` or
`messages`, else the whole row; kwargs: `rng` (random.Random seeded by the row's id, the only source of randomness),
`metadata` (a dict to fill; it is stored with the sample), `row` (the other keys of the row), `num_videos`,
`num_audios`, `num_images`, and `pack.preprocessor_args`.
"""

from pack.preprocessors import (
    avqa,
    llava_image,
    llava_video,
    offline_av,
    openai_messages,
    plain_sft,
    video_r1,
    voice_assistant,
)

__all__ = [
    "avqa",
    "llava_image",
    "llava_video",
    "offline_av",
    "openai_messages",
    "plain_sft",
    "video_r1",
    "voice_assistant",
]
