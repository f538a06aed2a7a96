"""The server engines against a server that computes: the same answers as in this process, and what is refused."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from jobs.rollout.config import SamplingConfig
from jobs.rollout.engine import EngineError
from jobs.rollout.http import JsonServer
from jobs.rollout.hub import HubEngine
from jobs.rollout.job import open_engine
from jobs.rollout.prompts import make_prompt, prompt_assets
from schemas.errors import ConfigError, RowError, UnsupportedError
from tests.jobs.rollout.server import Server, serving
from tests.jobs.rollout.world import rollouts_config
from train.data.transform import SampleTransform

MEDIA = ("clip0", "clip3", "image", "sound")
TEXT = ("text0", "text2")


@pytest.fixture
def server(model, assets, prompts):
    with serving(Server(model, assets, {prompt.digest: prompt for prompt in prompts.values()})) as running:
        yield running


def engine_of(server, world, assets, kind, group_size=3, **keys):
    keys = {"url": server.url, "model": "tiny", "retries": 2} | keys
    sampling = {"group_size": group_size, "max_new_tokens": 5}
    config = rollouts_config(world, engine=kind, server=keys, sampling=sampling)
    engine = open_engine(config, assets)
    engine.http = JsonServer(**{**engine.http.__dict__, "first_wait_s": 0.01})
    return engine


def local(model, assets, prompt, seed, **keys):
    sampling = SamplingConfig(**{"group_size": 3, "max_new_tokens": 5} | keys)
    return HubEngine(model, assets, sampling).answers(prompt, seed)


def same(found, expected, tolerance=1e-4):
    for answer, wanted in zip(found, expected, strict=True):
        assert (answer.ids, answer.finish) == (wanted.ids, wanted.finish)
        np.testing.assert_allclose(answer.logprobs, wanted.logprobs, atol=tolerance)


@pytest.mark.parametrize("key", [*MEDIA, *TEXT])
def test_sglang_gives_what_the_model_gives(key, server, world, assets, prompts, model):
    """Ids with one placeholder per medium and the stored pixels go out; the server's seed is its own."""
    engine = engine_of(server, world, assets, "sglang")
    same(engine.answers(prompts[key], 17), local(model, assets, prompts[key], 0))
    path, body, _ = server.requests[-1]
    assert (path, body["return_logprob"]) == ("/generate", True)
    assert len(body["input_ids"]) < len(prompts[key].ids) or key in TEXT


@pytest.mark.parametrize("key", [*MEDIA, *TEXT])
def test_openai_gives_what_the_model_gives(key, server, world, assets, prompts, model):
    """Text as ids to /v1/completions; media as data URLs to the chat route, whose layout the server makes itself."""
    engine = engine_of(server, world, assets, "openai")
    same(engine.answers(prompts[key], 17), local(model, assets, prompts[key], 17))
    path, body, _ = server.requests[-1]
    assert path == ("/v1/completions" if key in TEXT else "/v1/chat/completions")
    assert body["model"] == "tiny"


def test_frames_one_by_one_as_vllm_takes_them(server, world, assets, prompts, model):
    engine = engine_of(server, world, assets, "openai", video_format="jpeg")
    same(engine.answers(prompts["clip0"], 3), local(model, assets, prompts["clip0"], 3))


def test_text_by_chat_and_ids_by_their_names(server, world, assets, prompts, model):
    server.without = {"token_ids", "prompt_token_ids"}
    engine = engine_of(server, world, assets, "openai", api="chat")
    same(engine.answers(prompts["text1"], 5), local(model, assets, prompts["text1"], 5))


def test_a_busy_server_is_asked_again_and_a_dead_one_is_an_error(server, world, assets, prompts):
    engine = engine_of(server, world, assets, "sglang")
    server.statuses = [503, 429]
    assert len(engine.answers(prompts["text0"], 1)) == 3
    assert len(server.requests) == 3
    server.statuses = [500] * 3
    with pytest.raises(EngineError, match=r"did not answer in 3 tries: .*made to say 500"):
        engine.answers(prompts["text0"], 1)
    away = JsonServer("http://127.0.0.1:9", 1.0, 1, first_wait_s=0.01)
    with pytest.raises(EngineError, match="did not answer in 2 tries: ConnectionRefusedError"):
        away.post("/generate", {})


def test_a_refused_request_is_the_fault_of_its_row_and_any_other_no_of_the_server(server, world, assets, prompts):
    engine = engine_of(server, world, assets, "sglang")
    server.statuses = [400]
    with pytest.raises(RowError, match=r"refuses the request \(400\): .*made to say 400"):
        engine.answers(prompts["text0"], 1)
    server.statuses = [401]
    with pytest.raises(EngineError, match="answers 401"):
        engine.answers(prompts["text0"], 1)


@pytest.mark.parametrize(
    ("kind", "without", "key", "says"),
    [
        ("openai", {"token_ids", "names"}, "text0", "gives tokens as text .'the'. and not as ids"),
        ("openai", {"logprobs"}, "image", "gives no log-probabilities"),
        ("openai", {"usage", "prompt_token_ids"}, "image", "says neither prompt_token_ids nor the number"),
        ("openai", {"choices"}, "text0", "the answer has another form: KeyError: 'choices'"),
        ("sglang", {"output_token_logprobs"}, "text0", "the answer has another form"),
        ("sglang", {"prompt_tokens"}, "text0", "says neither prompt_token_ids"),
    ],
)
def test_answers_that_cannot_be_trained_on(kind, without, key, says, server, world, assets, prompts):
    server.without = without
    with pytest.raises(EngineError, match=says):
        engine_of(server, world, assets, kind).answers(prompts[key], 1)


@pytest.mark.parametrize("kind", ["openai", "sglang"])
def test_a_prompt_that_the_server_lays_out_otherwise_is_refused(kind, server, world, assets, prompts):
    server.spoil, server.without = 4, {"prompt_token_ids"}
    ours = len(prompts["clip0"].ids)
    with pytest.raises(RowError, match=f"has {ours + 4} tokens, the trainer's {ours}"):
        engine_of(server, world, assets, kind).answers(prompts["clip0"], 1)


def test_other_ids_of_the_same_number_are_refused_too(server, world, assets, prompts):
    engine = engine_of(server, world, assets, "openai")
    ids = prompts["text0"].ids.tolist()
    with pytest.raises(RowError, match="is not the trainer's"):
        engine.check_prompt(prompts["text0"], [*ids[:-1], ids[-1] + 1], None)


def said_by_openai(ids, values, finish="stop", **more):
    """What a server answers to three requests of one prompt; more: other parts of each choice."""

    def post(path, body):
        told = {"tokens": [f"token_id:{i}" for i in ids], "token_logprobs": values}
        choice = {"finish_reason": finish, "token_ids": ids, "logprobs": told, "prompt_token_ids": body["prompt"]}
        return {"choices": [choice | more] * 3}

    return post


def said_by_sglang(ids, values, finish="stop"):
    def post(path, body):
        told = [[value, token, None] for value, token in zip(values, ids, strict=True)]
        info = {
            "finish_reason": {"type": finish},
            "prompt_tokens": len(body["input_ids"]),
            "output_token_logprobs": told,
        }
        return [{"meta_info": info}] * 3

    return post


class Told:
    """An engine's server that says what it is told to."""

    def __init__(self, post):
        self.post = post


END = "the end token"
WRONG = [
    (["x", END], [-1.0, -1.0], "stop", "gives 'x' as a token id"),
    ([5.7, END], [-1.0, -1.0], "stop", r"gives 5\.7 as a token id"),
    ([True, END], [-1.0, -1.0], "stop", "gives True as a token id"),
    ([None, END], [-1.0, -1.0], "stop", "gives None as a token id"),
    ([-5, END], [-1.0, -1.0], "stop", "gives -5 as a token id"),
    ([2**40, END], [-1.0, -1.0], "stop", "gives 1099511627776 as a token id"),
    (["vocabulary", END], [-1.0, -1.0], "stop", r"as a token id; the model of rollouts\.model_path has \d+, from 0"),
    ([5, END], ["x", -1.0], "stop", "gives 'x' as a log-probability"),
    ([5, END], [None, -1.0], "stop", "gives None as a log-probability"),
    ([5, END], [True, -1.0], "stop", "gives True as a log-probability"),
    ([5, END], [-(10**400), -1.0], "stop", "the answer has another form: OverflowError"),
    ([5] * 5 + [END], [-1.0] * 6, "stop", "an answer of 6 tokens; it was asked for 5 at most"),
    ([5, END, 5, END], [-1.0] * 4, "stop", "goes on behind the end token"),
    ([5, END], [-1.0, -1.0], "abort", "ends an answer with 'abort'"),
]


@pytest.mark.parametrize("kind", ["openai", "sglang"])
@pytest.mark.parametrize(("ids", "values", "finish", "says"), WRONG)
def test_tokens_that_are_none(kind, ids, values, finish, says, server, world, assets, prompts):
    known = {END: assets.tokens.im_end, "vocabulary": assets.vocab_size}
    ids = [known.get(i, i) for i in ids]
    engine = engine_of(server, world, assets, kind)
    engine.http = Told((said_by_openai if kind == "openai" else said_by_sglang)(ids, values, finish))
    with pytest.raises(EngineError, match=says):
        engine.answers(prompts["text0"], 1)


@pytest.mark.parametrize("kind", ["openai", "sglang"])
def test_tokens_at_the_edge(kind, server, world, assets, prompts):
    """The last id of the vocabulary; an end token where the longest answer ends, which SGLang calls length."""
    end, last = assets.tokens.im_end, assets.vocab_size - 1
    said = said_by_openai if kind == "openai" else said_by_sglang
    engine = engine_of(server, world, assets, kind)
    for ids, finish, found in [
        ([last, end], "stop", "stop"),
        ([5, 5, 5, 5, end], "length", "stop"),
        ([5] * 5, "length", "length"),
    ]:
        engine.http = Told(said(ids, [-1] * len(ids), finish))
        answers = engine.answers(prompts["text0"], 1)
        assert [(answer.ids, answer.finish) for answer in answers] == [(ids, found)] * 3
    engine.http = Told(said([5], [-1.0], "length"))
    with pytest.raises(RowError, match="cuts an answer off after 1 of 5 tokens"):
        engine.answers(prompts["text0"], 1)


def test_names_of_other_tokens_are_refused(server, world, assets, prompts):
    engine, end = engine_of(server, world, assets, "openai"), assets.tokens.im_end
    told = {"tokens": ["token_id:6", f"token_id:{end}"], "token_logprobs": [-1.0, -1.0]}
    engine.http = Told(said_by_openai([5, end], [-1.0, -1.0], logprobs=told))
    with pytest.raises(EngineError, match=r"gives the token ids \[5, \d+\] and calls them \['token_id:6'"):
        engine.answers(prompts["text0"], 1)
    engine.http = Told(said_by_openai([5, end], [-1.0, -1.0], logprobs=told | {"tokens": ["a", "<end>"]}))
    assert engine.answers(prompts["text0"], 1)[0].ids == [5, end]  # texts say nothing


@pytest.mark.parametrize("change", [lambda i: i + 0.5, str, bool, lambda i: [i], lambda i: -i - 1, lambda i: 2**70])
def test_a_prompt_of_no_token_ids_is_refused(change, server, world, assets, prompts):
    ids = [change(i) for i in prompts["text0"].ids.tolist()]
    engine = engine_of(server, world, assets, "openai")
    for said in (ids, 5, {"a": 1}, "text"):
        engine.http = Told(said_by_openai([assets.tokens.im_end], [-1.0], prompt_token_ids=said))
        with pytest.raises(EngineError, match=r"the server's prompt_token_ids are .* a list of token ids"):
            engine.answers(prompts["text0"], 1)


@contextmanager
def dripping(declared):
    """The address of a server that says 200 and then a byte now and then, for 20 s at most. declared: it tells how many
    bytes there will be; else the answer ends with the connection."""
    done = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(200)
            if declared:
                self.send_header("Content-Length", "1000")
            self.end_headers()
            with suppress(OSError):  # nobody listens any more
                self.wfile.write(b"{}")
                for _ in range(400):
                    self.wfile.write(b" ")
                    if done.wait(0.05):
                        return

        def log_message(self, format, *args):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
    finally:
        done.set()
        httpd.shutdown()
        httpd.server_close()
        thread.join()


@pytest.mark.parametrize("declared", [True, False])
def test_the_timeout_is_that_of_the_whole_request(declared):
    with dripping(declared) as url:
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"in 1 tries: TimeoutError: no whole answer in 0\.4 s"):
            JsonServer(url, 0.4, 0).post("/generate", {})
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("said", [b"", b"<html>", b"[" * 200_000, b"\xff\xfe\xfa", b"9" * 6000])
def test_what_is_no_json(said):
    with pytest.raises(EngineError, match="answers with no JSON"):
        JsonServer("http://a", 1.0, 0)._parsed("/generate", said)


def test_a_stop_without_its_token_is_refused(server, world, assets, prompts):
    engine = engine_of(server, world, assets, "sglang")
    whole = engine.answers(prompts["text0"], 1)
    engine.ends = [whole[0].ids[2]]
    assert engine.answers(prompts["text0"], 1)[0].finish == "stop"
    server.without = {"end"}
    with pytest.raises(EngineError, match="without its end token"):
        engine.answers(prompts["text0"], 1)


def test_one_answer_is_a_group_too(server, world, assets, prompts):
    """SGLang gives an object then, and no list."""
    assert len(engine_of(server, world, assets, "sglang", group_size=1).answers(prompts["text0"], 1)) == 1


def test_sound_inside_clips_is_refused_unless_it_is_left_out(server, world, prompts, assets):
    for kind in ("openai", "sglang"):
        with pytest.raises(UnsupportedError, match="a clip brings its own sound"):
            engine_of(server, world, assets, kind).answers(prompts["heard"], 1)
    config = rollouts_config(world, layout={"use_audio_in_video": False})
    silent = make_prompt(prompts["heard"].sample, SampleTransform(prompt_assets(config)))
    assert not any(unit.of_video for unit in silent.layout.media)
    assert len(engine_of(server, world, assets, "openai").answers(silent, 1)) == 3


def test_completions_take_no_media(server, world, assets, prompts):
    with pytest.raises(UnsupportedError, match="takes no media"):
        engine_of(server, world, assets, "openai", api="completions").answers(prompts["image"], 1)


def test_the_key_comes_from_the_environment(server, world, assets, prompts, monkeypatch):
    monkeypatch.setenv("ROLLOUT_KEY", "secret")
    engine_of(server, world, assets, "sglang", api_key_variable="ROLLOUT_KEY").answers(prompts["text0"], 1)
    assert server.requests[-1][2]["Authorization"] == "Bearer secret"
    monkeypatch.delenv("ROLLOUT_KEY")
    with pytest.raises(ConfigError, match="ROLLOUT_KEY is not set"):
        engine_of(server, world, assets, "sglang", api_key_variable="ROLLOUT_KEY")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"engine": "sglang"}, "engine sglang needs one like http"),
        ({"engine": "openai", "server": {"url": "http://a"}}, "needs the name that the server knows"),
        ({"engine": "sglang", "server": {"url": "a:1"}}, "server.url is 'a:1'"),
        (
            {"engine": "sglang", "server": {"url": "http://a"}, "sampling": {"temperature": 0.7}},
            "log-probabilities of another distribution than the trainer's",
        ),
    ],
)
def test_configurations_that_do_not_fit_their_engine(keys, says, world):
    with pytest.raises(ConfigError, match=says):
        rollouts_config(world, **keys)


def test_other_temperatures_where_the_server_tells_raw_logprobs(server, world, assets, prompts, model):
    sampling = {"group_size": 3, "max_new_tokens": 5, "temperature": 0.7}
    keys = {"url": server.url, "raw_logprobs": True}
    engine = open_engine(rollouts_config(world, engine="sglang", server=keys, sampling=sampling), assets)
    same(engine.answers(prompts["text0"], 1), local(model, assets, prompts["text0"], 0, temperature=0.7))
