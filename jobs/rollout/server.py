"""What both kinds of server have in common: how to reach them, and what is asked of their answers.

A server lays media out by itself, so nothing is taken on trust: it must say how many tokens (or which) its prompt had,
and that must be the trainer's prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jobs.rollout.config import RolloutsConfig
from jobs.rollout.engine import Answer, EngineError
from jobs.rollout.http import JsonServer
from jobs.rollout.media_urls import video_url
from jobs.rollout.prompts import Prompt
from schemas.errors import RowError, UnsupportedError
from schemas.rollouts import Finish, prompt_digest
from train.data.processor import ProcessorAssets


class ServerEngine:
    """Of one server."""

    def __init__(self, config: RolloutsConfig, assets: ProcessorAssets) -> None:
        self.config, self.sampling, self.server = config, config.sampling, config.server
        self.assets = assets
        self.ends = [assets.tokens.im_end, assets.tokens.pad]
        self.concurrency = config.server.concurrency
        self.http = JsonServer.of(config.server)

    def refuse_sound_of_clips(self, prompt: Prompt) -> None:
        """UnsupportedError: no server takes a clip with its sound woven in through these routes."""
        if any(unit.of_video for unit in prompt.layout.media):
            raise UnsupportedError(
                "a clip brings its own sound, which cannot be asked of a server; set "
                "rollouts.layout.use_audio_in_video to false, or take engine transformers"
            )

    def video_urls(self, prompt: Prompt) -> list[str]:
        form = self.server.video_format
        return [video_url(prompt.sample, i, form) for i in range(len(prompt.meta.videos))]

    def check_prompt(self, prompt: Prompt, ids: Sequence[int] | None, count: Any) -> None:
        """RowError when the server's prompt is another one than the trainer's; EngineError when it says neither ids nor
        number."""
        ours = len(prompt.ids)
        if ids is not None:
            if prompt_digest(np.asarray(ids)) != prompt.digest:
                raise RowError("bad_row", f"the server's prompt ({len(ids)} tokens) is not the trainer's ({ours})")
        elif not isinstance(count, int) or isinstance(count, bool):
            raise EngineError(
                "the server says neither prompt_token_ids nor the number of its prompt's tokens, so nobody knows what "
                "it was asked"
            )
        elif count != ours:
            raise RowError(
                "bad_row",
                f"the server's prompt has {count} tokens, the trainer's {ours}: it lays the media out otherwise",
            )

    def answer(self, ids: Sequence[int], logprobs: Sequence[float], finish: Any) -> Answer:
        """EngineError for an answer that cannot be trained on."""
        if finish not in ("stop", "length"):
            raise EngineError(f"the server ends an answer with {finish!r}; known: stop, length")
        if len(ids) != len(logprobs) or not ids:
            raise EngineError(f"the server gives {len(ids)} token ids and {len(logprobs)} log-probabilities")
        if finish == "stop" and ids[-1] not in self.ends:
            raise EngineError(
                f"the server ends an answer without its end token ({self.ends[0]}), whose log-probability training "
                "needs; let it keep the stop token (no_stop_trim of SGLang, include_stop_str_in_output of vLLM, in "
                "rollouts.server.extra_body)"
            )
        kind: Finish = "stop" if finish == "stop" else "length"
        return Answer([int(i) for i in ids], [float(value) for value in logprobs], kind)

    def check_number(self, found: Sequence[Any]) -> None:
        if len(found) != self.sampling.group_size:
            raise EngineError(f"the server gives {len(found)} answers, not {self.sampling.group_size}")
