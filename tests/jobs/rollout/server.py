"""A small inference server: OpenAI's and SGLang's routes over a tiny model. It reads what it is sent as a server does
(JSON, data URLs, a video file), lays the prompt out by itself and computes its answers."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import av
import numpy as np
import soundfile
from PIL import Image

from jobs.rollout.config import SamplingConfig
from jobs.rollout.hub import HubEngine
from jobs.rollout.prompts import Prompt, make_prompt
from schemas.rollouts import prompt_digest
from tests.train.data.packed import Clip, packed_sample
from train.data.processor import ProcessorAssets
from train.data.transform import SampleTransform


@dataclass
class Server:
    """prompts: layouts that /generate knows, by the digest of their ids; statuses: answered before anything else, first
    to last; without: parts of an answer that are left out; spoil: tokens added to the prompt's number."""

    model: Any
    assets: ProcessorAssets
    prompts: dict[str, Prompt] = field(default_factory=dict)
    statuses: list[int] = field(default_factory=list)
    without: set[str] = field(default_factory=set)
    spoil: int = 0
    requests: list[tuple[str, dict[str, Any], Any]] = field(default_factory=list)
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, path: str, body: dict[str, Any], headers: Any) -> tuple[int, Any]:
        with self.lock:
            self.requests.append((path, body, headers))
            if self.statuses and (status := self.statuses.pop(0)) != 200:
                return status, {"error": {"message": f"made to say {status}"}}
            routes = {
                "/generate": self._generate,
                "/v1/completions": self._completions,
                "/v1/chat/completions": self._chat,
            }
            return 200, routes[path](body)

    def _engine(self, body: dict[str, Any], longest: str) -> HubEngine:
        sampling = SamplingConfig(
            group_size=body["n"], temperature=body["temperature"], top_p=body["top_p"], max_new_tokens=body[longest]
        )
        engine = HubEngine(self.model, self.assets, sampling)
        engine.ends = body["stop_token_ids"]
        return engine

    def _completions(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = self.prompts[prompt_digest(body["prompt"])]
        answers = self._engine(body, "max_tokens").answers(prompt, body["seed"])
        choices = []
        for answer in answers:
            told = {"tokens": [self._name(i) for i in answer.ids], "token_logprobs": list(answer.logprobs)}
            choices.append(self._choice(answer, told) | {"prompt_token_ids": body["prompt"]})
        return self._openai(choices, len(body["prompt"]))

    def _chat(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = make_prompt(sample_of(body["messages"]), SampleTransform(self.assets))
        answers = self._engine(body, "max_tokens").answers(prompt, body["seed"])
        choices = []
        for answer in answers:
            pairs = zip(answer.ids, answer.logprobs, strict=True)
            content = [{"token": self._name(i), "logprob": value, "top_logprobs": []} for i, value in pairs]
            choices.append(self._choice(answer, {"content": content}))
        found = self._openai(choices, len(prompt.ids) + self.spoil)
        return found if "prompt_token_ids" in self.without else found | {"prompt_token_ids": prompt.ids.tolist()}

    def _generate(self, body: dict[str, Any]) -> Any:
        videos, images, sounds = (body.get(f"{kind}_data", []) for kind in ("video", "image", "audio"))
        prompt = self._expanded(body["input_ids"], videos, images, sounds)
        answers = self._engine(body["sampling_params"], "max_new_tokens").answers(prompt, 0)
        found = []
        for answer in answers:
            pairs = list(zip(answer.ids, answer.logprobs, strict=True))
            if "end" in self.without and answer.finish == "stop":
                pairs = pairs[:-1]
            info = {
                "finish_reason": {"type": answer.finish},
                "prompt_tokens": len(prompt.ids) + self.spoil,
                "output_token_logprobs": [[value, token, None] for token, value in pairs],
            }
            found.append({"text": "", "meta_info": {k: v for k, v in info.items() if k not in self.without}})
        return found if len(found) > 1 else found[0]

    def _expanded(self, ids: list[int], videos: list[str], images: list[str], sounds: list[str]) -> Prompt:
        """The known layout that these ids become when each placeholder is as long as its medium, with the pixels and
        samples of the request in it."""
        clips = [read_video(url) for url in videos]
        pictures, tones = [data_of(url) for url in images], [data_of(url) for url in sounds]
        for prompt in self.prompts.values():
            units = prompt.layout.media
            lengths = [len(unit.rows) for unit in units]
            if [len(unit.blobs) for unit in units if unit.kind == "video"] != [len(clip.jpegs) for clip in clips]:
                continue
            long: list[int] = []
            left = list(lengths)
            media = {self.assets.tokens.video, self.assets.tokens.image, self.assets.tokens.audio}
            for token in ids:
                long += [token] * (left.pop(0) if token in media and left else 1)
            if not left and prompt_digest(long) == prompt.digest:
                blobs = {"video": iter([c.jpegs for c in clips]), "image": iter([(p,) for p in pictures])}
                blobs["audio"] = iter([(t,) for t in tones])
                filled = [replace(unit, blobs=tuple(next(blobs[unit.kind]))) for unit in units]
                return replace(prompt, layout=replace(prompt.layout, media=filled))
        raise AssertionError("the ids are those of no prompt")

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if "names" not in self.without else "the"

    def _choice(self, answer: Any, told: dict[str, Any]) -> dict[str, Any]:
        choice = {"finish_reason": answer.finish, "logprobs": None if "logprobs" in self.without else told}
        return choice if "token_ids" in self.without else choice | {"token_ids": list(answer.ids)}

    def _openai(self, choices: list[dict[str, Any]], count: int) -> dict[str, Any]:
        found = {"choices": choices, "usage": {"prompt_tokens": count}}
        return {key: value for key, value in found.items() if key not in self.without}


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """On a free port of this machine, until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the name that http.server calls
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, found = server.answer(self.path, body, self.headers)
            data = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{httpd.server_address[1]}"
    try:
        yield server
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


@dataclass(frozen=True)
class Video:
    """jpegs: the stored pictures; fps: of the file."""

    jpegs: list[bytes]
    fps: float


def read_video(url: str) -> Video:
    """The packets of a Motion-JPEG file, or of a video/jpeg URL, which has no rate."""
    head, _, text = url.partition(",")
    if head == "data:video/jpeg;base64":
        return Video([base64.b64decode(part) for part in text.split(",")], 2.0)
    with av.open(io.BytesIO(data_of(url))) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == "mjpeg"
        packets = [bytes(packet) for packet in container.demux(stream) if packet.size]
        return Video(packets, float(stream.average_rate))


def data_of(url: str) -> bytes:
    head, _, text = url.partition(",")
    assert head.startswith("data:") and head.endswith(";base64")
    return base64.b64decode(text)


def sample_of(messages: list[dict[str, Any]]) -> Any:
    """A packed sample of chat messages."""
    turns: list[Any] = []
    clips, sounds, images = [], [], []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        turn: list[Any] = [message["role"]]
        for part in parts:
            kind = part["type"].removesuffix("_url")
            turn.append((kind, part.get("text")))
            if kind == "text":
                continue
            url = part[f"{kind}_url"]["url"]
            if kind == "video":
                video = read_video(url)
                clips.append(Clip(np.stack([pixels(jpeg) for jpeg in video.jpegs]), video.fps))
            elif kind == "image":
                images.append(pixels(data_of(url)))
            else:
                sounds.append(soundfile.read(io.BytesIO(data_of(url)), dtype="int16")[0])
        turns.append(turn)
    return packed_sample(turns, clips, sounds, images)


def pixels(jpeg: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(jpeg)) as picture:
        return np.asarray(picture.convert("RGB"))
