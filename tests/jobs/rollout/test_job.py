"""A whole job: every row once, resumed exactly, counted, and refused where it would mix."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jobs.cli import main
from jobs.rollout.config import RolloutsConfig
from jobs.rollout.engine import Answer, EngineError
from jobs.rollout.hub import HubEngine
from jobs.rollout.job import JOB_FILE, RowWorker, check_threshold, open_engine, run_job
from jobs.rollout.scorers import by_kind
from jobs.rollout.summary import summarise
from pack.reader import PackedDataset
from schemas.errors import ConfigError, DataThresholdError, IncompleteSourceError, RowError
from schemas.sample import PackedVideo
from schemas.strict import dump_config
from tests.jobs.rollout.server import Server, serving
from tests.jobs.rollout.test_hub import trainer_logprobs
from tests.jobs.rollout.world import rollouts_config, write_model
from train.data.rollout_files import read_rollouts
from train.models.spec import build_foundation_model
from train.ops.registry import eager_ops


class Breaking:
    """An engine that works for so many rows and then fails as a server that is gone, or refuses rows by id."""

    def __init__(self, engine, rows=None, refused=()):
        self.engine, self.left, self.refused, self.asked = engine, rows, refused, []
        self.concurrency = engine.concurrency

    def answers(self, prompt, seed):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise EngineError("the server is gone")
        self.asked.append(prompt.meta.id)
        if prompt.meta.id in self.refused:
            raise RowError("bad_row", "made to refuse")
        return self.engine.answers(prompt, seed)


@pytest.fixture(scope="module")
def engine(model, assets, world):
    return HubEngine(model, assets, rollouts_config(world).sampling)


@pytest.fixture(scope="module")
def whole(world, engine, tmp_path_factory):
    """A job that nothing stopped."""
    config = rollouts_config(world, out=str(tmp_path_factory.mktemp("whole") / "out"))
    return config, run_job(config, engine)


def rows_of(config):
    return list(read_rollouts(Path(config.out)))


def test_every_row_has_its_answers_scored(whole, world):
    config, done = whole
    rows = {row.id: row for row in rows_of(config)}
    metas = {meta.id: meta for meta in PackedDataset(config.dataset).metas()}
    assert rows.keys() == metas.keys()
    assert [part.name for part in sorted(Path(config.out).glob("part-*"))] == [
        f"part-0000{i}.parquet" for i in range(3)
    ]
    for key, row in rows.items():
        assert len(row.responses) == 3
        assert row.source == metas[key].source
        for response in row.responses:
            assert response.reward == by_kind(response.text, metas[key].extra)
            assert len(response.ids) == len(response.logprobs) == 5
    assert (done.card.rows, done.card.responses, done.card.response_tokens) == (12, 36, 180)
    assert done.card.about.engine == "transformers"
    assert done.card.about.sampling["group_size"] == 3
    assert not done.left_out


def test_a_finished_job_does_nothing_again(whole, engine):
    config, done = whole
    asked = Breaking(engine, rows=0)
    again = run_job(config, asked)
    assert (again.nothing_to_do, again.card, asked.asked) == (True, done.card, [])
    assert again.parts == (3, 3)


@pytest.mark.parametrize("stop_after", [0, 3, 6, 11])
def test_a_stopped_job_goes_on_to_the_same_end(stop_after, whole, world, engine, tmp_path):
    config = rollouts_config(world, out=str(tmp_path / "out"))
    with pytest.raises(EngineError, match="is gone"):
        run_job(config, Breaking(engine, rows=stop_after))
    with pytest.raises(IncompleteSourceError, match=r"has no rollouts\.json"):
        read_rollouts(tmp_path / "out")
    rest = Breaking(engine)
    run_job(config, rest)
    assert len(rest.asked) == 12 - stop_after // 4 * 4  # parts of four rows; those that are whole are kept
    assert rows_of(config) == rows_of(whole[0])


def test_rows_that_cannot_be_asked_are_counted_and_over_the_limit_an_error(world, engine, tmp_path):
    config = rollouts_config(world, out=str(tmp_path / "out"), max_bad_ratio=0.2)
    refused = ("clip1", "text2")
    with pytest.raises(EngineError):
        run_job(config, Breaking(engine, rows=9, refused=refused))
    done = run_job(config, Breaking(engine, refused=refused))
    assert [(row.id, row.reason, row.detail) for row in done.left_out] == [
        (key, "bad_row", "made to refuse") for key in refused
    ]
    assert done.card.rows == 10
    assert {row.id for row in rows_of(config)}.isdisjoint(refused)
    check_threshold(done, config)
    with pytest.raises(DataThresholdError, match=r"2 of 12 rows .* The first: clip1: made to refuse"):
        check_threshold(done, config.model_copy(update={"max_bad_ratio": 0.1}))
    assert run_job(config, Breaking(engine)).left_out == done.left_out


def test_a_row_that_cannot_be_scored_is_left_out(world, engine, tmp_path):
    config = rollouts_config(world, out=str(tmp_path / "out"), scorer="multiple_choice")
    done = run_job(config, engine)
    assert {row.id for row in done.left_out} == {"text0", "text1", "text2"}
    assert "has no choices to score by" in done.left_out[0].detail


class Spoiling:
    """An engine whose answers to one row have another log-probability."""

    def __init__(self, engine, key, logprob):
        self.engine, self.key, self.logprob, self.concurrency = engine, key, logprob, engine.concurrency

    def answers(self, prompt, seed):
        found = self.engine.answers(prompt, seed)
        if prompt.meta.id != self.key:
            return found
        return [replace(found[0], logprobs=[self.logprob, *found[0].logprobs[1:]]), *found[1:]]


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf"), 0.5])
def test_a_log_probability_that_is_none_leaves_its_row_out_alone(logprob, whole, world, engine, tmp_path):
    config = rollouts_config(world, out=str(tmp_path / "out"), limit=5)
    done = run_job(config, Spoiling(engine, "clip1", logprob))
    assert [(row.id, row.reason) for row in done.left_out] == [("clip1", "bad_answer")]
    assert f"logprobs[0] is {logprob}" in done.left_out[0].detail
    assert rows_of(config) == [row for row in rows_of(whole[0])[:5] if row.id != "clip1"]


class Wrong:
    """A scorer that does as told for the rows of one clip, by their answer's letter."""

    def __init__(self, value):
        self.value = value

    def __call__(self, text, facts):
        if facts.get("answer_text") != "green":
            return 1.0
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (KeyError("letter"), "the scorer raised KeyError: 'letter'"),
        (IndexError("of\nrange"), "the scorer raised IndexError: of range"),
        (ValueError("no"), "ValueError"),
        (TypeError("no"), "TypeError"),
        (ZeroDivisionError("no"), "ZeroDivisionError"),
        (float("nan"), "the scorer gives nan; a reward is a number, finite in float32"),
        (1e300, "the scorer gives 1e+300"),
        (None, "the scorer gives None"),
        ("1.0", "the scorer gives '1.0'"),
    ],
)
def test_a_scorer_that_fails_leaves_its_row_out(value, says, world, engine, assets, prompts):
    """green is right in clip1 and not in clip0."""
    worker = RowWorker(engine, assets, Wrong(value), rollouts_config(world))
    found = worker.row(prompts["clip1"].sample)
    assert (found.id, found.reason) == ("clip1", "scorer_failed")
    assert says in found.detail
    assert worker.row(prompts["clip0"].sample).rewards == [1.0] * 3


@pytest.mark.parametrize("value", [True, np.float32(0.5), np.array(0.5), 2])
def test_rewards_may_be_of_any_kind_of_number(value, world, engine, assets, prompts):
    found = RowWorker(engine, assets, Wrong(value), rollouts_config(world)).row(prompts["clip1"].sample)
    assert found.rewards == [float(value)] * 3


@pytest.mark.parametrize("error", [ConfigError("the judge has no key"), EngineError("gone"), KeyboardInterrupt()])
def test_what_no_other_row_would_mend_ends_the_job(error, world, engine, assets, prompts):
    with pytest.raises(type(error)):
        RowWorker(engine, assets, Wrong(error), rollouts_config(world)).row(prompts["clip1"].sample)


def test_several_workers_make_what_one_makes(whole, world, engine, tmp_path):
    def of(worker):
        return rollouts_config(world, out=str(tmp_path / "out"), workers=2, worker=worker)

    done = run_job(of(1), engine)
    assert (done.card, done.parts) == (None, (1, 3))
    with pytest.raises(IncompleteSourceError):
        read_rollouts(tmp_path / "out")
    check_threshold(done, of(1))
    assert run_job(of(0), engine).card is not None
    assert rows_of(of(0)) == rows_of(whole[0])
    with pytest.raises(ConfigError, match="worker is 2; 2 workers are numbered 0 to 1"):
        of(2)


def test_a_picture_that_cannot_be_decoded_is_the_fault_of_its_row(world, engine, assets, prompts):
    worker = RowWorker(engine, assets, by_kind, rollouts_config(world))
    sample = prompts["clip1"].sample
    broken = replace(sample, videos=[PackedVideo([b"\xff\xd8 no picture"] * len(sample.videos[0].frames))])
    found = worker.row(broken)
    assert (found.id, found.reason) == ("clip1", "undecodable")
    assert "cannot be decoded" in found.detail
    assert worker.row(sample).id == "clip1"


def test_limit_and_sources(world, engine, tmp_path):
    config = rollouts_config(world, out=str(tmp_path / "a"), limit=5)
    run_job(config, engine)
    assert [row.id for row in rows_of(config)] == [f"clip{i}" for i in range(5)]
    config = rollouts_config(world, out=str(tmp_path / "b"), sources=["text"], limit=2)
    run_job(config, engine)
    assert [row.id for row in rows_of(config)] == ["text0", "text1"]
    with pytest.raises(ConfigError, match="has no row of"):
        run_job(rollouts_config(world, out=str(tmp_path / "c"), sources=["nothing"]), engine)


def test_folders_of_something_else_are_left_alone(whole, world, engine, tmp_path):
    config, _ = whole
    other = config.model_copy(update={"sampling": config.sampling.model_copy(update={"seed": 1})})
    with pytest.raises(ConfigError, match=r"rollouts of another job .sampling: .*'seed': 0.*'seed': 1"):
        run_job(other, engine)
    with pytest.raises(ConfigError, match="part_rows: 4 then, 8 now"):
        run_job(config.model_copy(update={"part_rows": 8}), engine)
    before = write_model(tmp_path / "model", seed=1)
    moved = rollouts_config(world, model_path=str(before), out=str(tmp_path / "moved"), limit=1)
    run_job(moved, engine)
    write_model(before, seed=2)
    with pytest.raises(ConfigError, match=r"rollouts of another job \(model_digest: "):
        run_job(moved, engine)
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"is not empty and has no job\.json"):
        run_job(rollouts_config(world, out=str(tmp_path)), engine)
    assert json.loads((Path(config.out) / JOB_FILE).read_text())["engine"] == "transformers"


def test_a_server_is_asked_several_rows_at_a_time_and_the_order_stays(whole, world, model, assets, prompts, tmp_path):
    with serving(Server(model, assets, {prompt.digest: prompt for prompt in prompts.values()})) as server:
        keys = {"url": server.url, "concurrency": 5, "model": "tiny"}
        config = rollouts_config(world, engine="openai", server=keys, out=str(tmp_path / "out"))
        done = run_job(config)
    assert [(row.id, row.reason) for row in done.left_out] == [("heard", "unsupported")]
    found, expected = rows_of(config), [row for row in rows_of(whole[0]) if row.id != "heard"]
    assert [row.id for row in found] == [row.id for row in expected]
    assert [row.prompt_digest for row in found] == [row.prompt_digest for row in expected]
    assert done.card.about.model == "tiny"


def test_a_reference_tells_what_it_would_have_said(whole, world, engine, assets, prompts, tmp_path):
    """The model as its own reference gives the drawn log-probabilities again; another model gives others, which are
    those of the trainer's own model with its weights."""
    config = rollouts_config(world, out=str(tmp_path / "a"), limit=9, reference_path=str(world / "model"))
    run_job(config, engine)
    for row in rows_of(config):
        for response in row.responses:
            assert response.ref_logprobs == pytest.approx(list(response.logprobs), abs=1e-4)
    other = write_model(tmp_path / "other", seed=1)
    config = rollouts_config(world, out=str(tmp_path / "b"), limit=9, reference_path=str(other))
    assert run_job(config, engine).card.references
    theirs = build_foundation_model(other, eager_ops()).eval()
    for row in rows_of(config):
        answers = [Answer(r.ids, r.logprobs, r.finish) for r in row.responses]
        expected = trainer_logprobs(theirs, assets, prompts[row.id], answers)
        for response, wanted in zip(row.responses, expected, strict=True):
            assert response.ref_logprobs == pytest.approx(wanted, abs=1e-4)
            assert response.ref_logprobs != pytest.approx(list(response.logprobs), abs=1e-2)


def test_summary():
    class Row:
        def __init__(self, source, rewards, finish="stop"):
            self.source, self.rewards = source, rewards
            self.responses = [Answer([1, 2], [-1.0, -3.0], finish) for _ in rewards]
            self.response_tokens = 2 * len(rewards)

    found = summarise([Row("a", [1.0, 0.0]), Row("a", [0.0, 0.0], "length"), Row("b", [1.0, 1.0])])
    assert (found.rows, found.responses, found.tokens) == (3, 6, 12)
    assert found.mean_reward == pytest.approx(0.5)
    assert found.by_source == {"a": 0.25, "b": 1.0}
    assert found.equal_groups == pytest.approx(2 / 3)
    assert found.cut_off == pytest.approx(1 / 3)
    assert found.mean_logprob == -2.0
    assert summarise([]).mean_reward == 0


def test_the_commands(world, tmp_path, capsys):
    config = rollouts_config(world, out=str(tmp_path / "out"), limit=3)
    path = tmp_path / "rollouts.yaml"
    values = dump_config(config).splitlines()
    path.write_text("rollouts:\n" + "".join(f"  {line}\n" for line in values))
    assert command("run", str(path), "rollouts.sampling.group_size=2", "--json") == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["rows"], told["responses"], told["left_out"]) == (3, 6, {})
    assert command("run", str(path), "rollouts.sampling.group_size=2") == 0
    assert "nothing to do" in capsys.readouterr().out
    assert command("run", str(path)) == 2
    assert "rollouts of another job" in capsys.readouterr().err
    assert command("show", str(tmp_path / "out"), "--id", "clip1") == 0
    said = capsys.readouterr().out
    assert "clip1 [colours] 341 prompt tokens" in said
    assert "clip0" not in said
    path.write_text("rollouts: {dataset: a, model_path: b, out: c, scorrer: x}")
    assert command("run", str(path)) == 2
    assert "scorrer" in capsys.readouterr().err


def test_a_signal_stops_with_exit_code_5_and_the_same_command_goes_on(world, tmp_path, capsys):
    config = rollouts_config(world, out=str(tmp_path / "out"), part_rows=1)
    path = tmp_path / "rollouts.yaml"
    path.write_text("rollouts:\n" + "".join(f"  {line}\n" for line in dump_config(config).splitlines()))

    def stop():
        while not (tmp_path / "out/part-00001.parquet").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    assert command("run", str(path)) == 5
    thread.join()
    assert "stopped by SIGTERM; the same command goes on from here" in capsys.readouterr().err
    done = len(list((tmp_path / "out").glob("part-*")))
    assert 2 <= done < 12
    assert command("run", str(path)) == 0
    assert len(rows_of(config)) == 12


def command(*words):
    with pytest.raises(SystemExit) as ended:
        main(["rollouts", *words])
    return int(ended.value.code or 0)


def test_engines_are_opened_by_name(world, assets):
    assert isinstance(open_engine(rollouts_config(world), assets), HubEngine)
    assert isinstance(rollouts_config(world), RolloutsConfig)
