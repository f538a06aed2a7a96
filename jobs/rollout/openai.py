"""The engine `openai`: any server with OpenAI's API that gives token ids and log-probabilities, such as vLLM's."""

from __future__ import annotations

from typing import Any, Literal

from jobs.rollout.engine import Answer, EngineError
from jobs.rollout.media_urls import audio_url, image_url
from jobs.rollout.prompts import Prompt
from jobs.rollout.server import ServerEngine
from schemas.conversation import turn_parts
from schemas.errors import UnsupportedError
from schemas.wording import short

TOKEN_ID = "token_id:"  # vLLM writes "token_id:123" for a token with return_tokens_as_token_ids


class OpenAIEngine(ServerEngine):
    """/v1/completions with token ids for rows without media, /v1/chat/completions for the others."""

    def answers(self, prompt: Prompt, seed: int) -> list[Answer]:
        chat = self._api(prompt) == "chat"
        route = "/v1/chat/completions" if chat else "/v1/completions"
        found = self.http.post(route, self._body(prompt, seed, chat=chat))
        try:
            choices = found["choices"]
            self.check_number(choices)
            ids = found.get("prompt_token_ids") or choices[0].get("prompt_token_ids")
            if chat or ids is not None:
                self.check_prompt(prompt, ids, (found.get("usage") or {}).get("prompt_tokens"))
            return [self._read(choice, chat=chat) for choice in choices]
        except (KeyError, TypeError, ValueError, OverflowError, IndexError, AttributeError) as error:
            raise EngineError(f"{route}: the answer has another form: {type(error).__name__}: {error}") from error

    def _api(self, prompt: Prompt) -> Literal["completions", "chat"]:
        if self.server.api != "auto":
            if self.server.api == "completions" and prompt.layout.media:
                raise UnsupportedError("/v1/completions takes no media; set rollouts.server.api to auto or chat")
            return self.server.api
        return "chat" if prompt.layout.media else "completions"

    def _body(self, prompt: Prompt, seed: int, *, chat: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.server.model,
            "n": self.sampling.group_size,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "max_tokens": self.sampling.max_new_tokens,
            "seed": seed % 2**31,
            "stop_token_ids": self.ends,
            "skip_special_tokens": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if chat:
            body |= {"messages": self._messages(prompt), "logprobs": True, "top_logprobs": 0}
        else:
            body |= {"prompt": prompt.ids.tolist(), "logprobs": 1}  # some servers take 0 for none
        return body | self.server.extra_body

    def _messages(self, prompt: Prompt) -> list[dict[str, Any]]:
        """The turns as chat messages with the media in their places."""
        self.refuse_sound_of_clips(prompt)
        videos = self.video_urls(prompt)
        counts = {"video": 0, "image": 0, "audio": 0}
        messages: list[dict[str, Any]] = []
        if self.config.layout.system is not None and prompt.turns[0][0] != "system":
            messages.append({"role": "system", "content": self.config.layout.system})
        for turn in prompt.turns:
            parts: list[dict[str, Any]] = []
            for kind, payload in turn_parts(turn):
                if kind == "text":
                    parts.append({"type": "text", "text": payload})
                    continue
                number = counts[kind]
                counts[kind] += 1
                url = videos[number] if kind == "video" else None
                url = url or (image_url if kind == "image" else audio_url)(prompt.sample, number)
                parts.append({"type": f"{kind}_url", f"{kind}_url": {"url": url}})
            text_only = all(part["type"] == "text" for part in parts)
            content: Any = "".join(part["text"] for part in parts) if text_only else parts
            messages.append({"role": turn[0], "content": content})
        return messages

    def _read(self, choice: dict[str, Any], *, chat: bool) -> Answer:
        told = choice["logprobs"]
        if told is None:
            raise EngineError("the server gives no log-probabilities; start it so that it does")
        entries = told["content"] if chat else None
        names = [entry["token"] for entry in entries] if entries is not None else told["tokens"]
        values = [entry["logprob"] for entry in entries] if entries is not None else told["token_logprobs"]
        ids = choice.get("token_ids")
        if ids is None:
            ids = [_token_id(name) for name in names]
        elif any(_names_another(name, token) for name, token in zip(names, ids, strict=False)):
            raise EngineError(
                f"the server gives the token ids {short(ids)} and calls them {short(names)}; their log-probabilities "
                "would be those of other tokens"
            )
        return self.answer(ids, values, choice["finish_reason"])


def _names_another(name: Any, token: Any) -> bool:
    """Whether a name is the id of another token; names may be texts, which tell nothing."""
    return isinstance(name, str) and name.startswith(TOKEN_ID) and name != f"{TOKEN_ID}{token}"


def _token_id(name: str) -> int:
    """EngineError for a token that is given as text: texts of tokens are not unique."""
    if name.startswith(TOKEN_ID) and name.removeprefix(TOKEN_ID).isdigit():
        return int(name.removeprefix(TOKEN_ID))
    raise EngineError(
        f"the server gives tokens as text ({name!r}) and not as ids; take a vLLM that knows return_token_ids, or "
        "engine sglang"
    )
