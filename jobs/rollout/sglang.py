"""The engine `sglang`: SGLang's native route, token ids in and token ids with log-probabilities out."""

from __future__ import annotations

from typing import Any

import numpy as np

from jobs.rollout.engine import Answer, EngineError
from jobs.rollout.media_urls import audio_url, image_url
from jobs.rollout.prompts import Prompt
from jobs.rollout.server import ServerEngine


class SglangEngine(ServerEngine):
    """SGLang's native /generate: token ids in, token ids with log-probabilities out."""

    def answers(self, prompt: Prompt, seed: int) -> list[Answer]:
        found = self.http.post("/generate", self._body(prompt))
        found = [found] if isinstance(found, dict) else found
        try:
            self.check_number(found)
            for each in found:
                self.check_prompt(prompt, None, each["meta_info"].get("prompt_tokens"))
            return [self._read(each["meta_info"]) for each in found]
        except (KeyError, TypeError, ValueError, OverflowError, IndexError, AttributeError) as error:
            raise EngineError(f"/generate: the answer has another form: {type(error).__name__}: {error}") from error

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        self.refuse_sound_of_clips(prompt)
        sampling = {
            "n": self.sampling.group_size,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "max_new_tokens": self.sampling.max_new_tokens,
            "stop_token_ids": self.ends,
            "skip_special_tokens": False,
        }
        media = {
            "image_data": [image_url(prompt.sample, i) for i in range(len(prompt.meta.images))],
            "video_data": self.video_urls(prompt),
            "audio_data": [audio_url(prompt.sample, i) for i in range(len(prompt.meta.audios))],
        }
        body = {"input_ids": self.short_ids(prompt), "sampling_params": sampling, "return_logprob": True}
        return body | {name: urls for name, urls in media.items() if urls} | self.server.extra_body

    def short_ids(self, prompt: Prompt) -> list[int]:
        """The prompt with one placeholder per medium, which the server makes as many as it needs."""
        ids = prompt.ids
        again = np.zeros(len(ids), bool)
        for token in (self.assets.tokens.image, self.assets.tokens.video, self.assets.tokens.audio):
            if token is not None:
                again[1:] |= (ids[1:] == token) & (ids[:-1] == token)
        short: list[int] = ids[~again].tolist()
        return short

    def _read(self, info: dict[str, Any]) -> Answer:
        told = info["output_token_logprobs"]
        finish = info["finish_reason"]
        kind = finish["type"] if isinstance(finish, dict) else finish
        return self.answer([entry[1] for entry in told], [entry[0] for entry in told], kind)
