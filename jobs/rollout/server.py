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
from schemas.wording import short
from train.data.processor import ProcessorAssets

MAX_ID = 2**31  # rollouts store ids as int32


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

    def check_prompt(self, prompt: Prompt, ids: Any, count: Any) -> None:
        """RowError when the server's prompt is another one than the trainer's; EngineError when it says neither ids nor
        number."""
        ours = len(prompt.ids)
        if ids is not None:
            if not isinstance(ids, list) or not all(_is_id(i, MAX_ID) for i in ids):
                raise EngineError(f"the server's prompt_token_ids are {short(ids)}; they are a list of token ids")
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

    def answer(self, ids: Sequence[Any], logprobs: Sequence[Any], finish: Any) -> Answer:
        """EngineError for an answer that cannot be trained on; RowError for one that the server cuts off too early.

        An answer whose last token is an end token has stopped, also where it is as long as can be.
        """
        if finish not in ("stop", "length"):
            raise EngineError(f"the server ends an answer with {short(finish)}; known: stop, length")
        if len(ids) != len(logprobs) or not ids:
            raise EngineError(f"the server gives {len(ids)} token ids and {len(logprobs)} log-probabilities")
        self._check_tokens(ids, logprobs)
        most = self.sampling.max_new_tokens
        if finish == "length" and ids[-1] not in self.ends and len(ids) < most:
            raise RowError(
                "bad_row",
                f"the server cuts an answer off after {len(ids)} of {most} tokens; its own limit for prompt and answer "
                f"is lower than what this row needs ({most} are rollouts.sampling.max_new_tokens)",
            )
        if finish == "stop" and ids[-1] not in self.ends:
            raise EngineError(
                f"the server ends an answer without its end token ({self.ends[0]}), whose log-probability training "
                "needs; let it keep the stop token (no_stop_trim of SGLang, include_stop_str_in_output of vLLM, in "
                "rollouts.server.extra_body)"
            )
        kind: Finish = "stop" if ids[-1] in self.ends else "length"
        return Answer(list(ids), [float(value) for value in logprobs], kind)

    def _check_tokens(self, ids: Sequence[Any], logprobs: Sequence[Any]) -> None:
        known = self.assets.vocab_size or MAX_ID
        if wrong := [i for i in ids if not _is_id(i, known)]:
            raise EngineError(
                f"the server gives {short(wrong[0])} as a token id; the model of rollouts.model_path has {known}, from "
                "0: is it another model that it serves?"
            )
        if wrong := [value for value in logprobs if isinstance(value, bool) or not isinstance(value, int | float)]:
            raise EngineError(f"the server gives {short(wrong[0])} as a log-probability; it is a number")
        if len(ids) > self.sampling.max_new_tokens:
            raise EngineError(
                f"the server gives an answer of {len(ids)} tokens; it was asked for "
                f"{self.sampling.max_new_tokens} at most (rollouts.sampling.max_new_tokens)"
            )
        if inner := [i for i in ids[:-1] if i in self.ends]:
            raise EngineError(
                f"the server goes on behind the end token {inner[0]}; let it stop there (no ignore_eos in "
                "rollouts.server.extra_body)"
            )

    def check_number(self, found: Sequence[Any]) -> None:
        if len(found) != self.sampling.group_size:
            raise EngineError(f"the server gives {len(found)} answers, not {self.sampling.group_size}")


def _is_id(value: Any, known: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < known
