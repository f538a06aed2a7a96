"""A rollouts job from start to end: which rows, what is done already, part after part, the card.

OUT/job.json                 what the rollouts are made of; another configuration is refused
OUT/part-00000.parquet ...   each whole or not there
OUT/left_out/part-00000.json the rows of that part that could not be asked or scored, and why
OUT/rollouts.json            last
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from transformers import AutoTokenizer

from jobs.rollout.config import RolloutsConfig
from jobs.rollout.engine import Answer, Engine
from jobs.rollout.prompts import Prompt, make_prompt, prompt_assets
from jobs.rollout.reference import AnswerReference
from jobs.rollout.scorers import Scorer, find_scorer
from pack.reader import PackedDataset
from schemas.errors import (
    ConfigError,
    DataThresholdError,
    IncompleteSourceError,
    OmniloomError,
    RowError,
    SchemaError,
    UnsupportedError,
)
from schemas.rollouts import ROLLOUTS_CARD, Response, RolloutAbout, RolloutCard, RolloutRow, check, part_name
from schemas.wording import one_line, short
from train.data.collate import DecodeError
from train.data.durable import write_durably
from train.data.processor import ProcessorAssets
from train.data.rollout_files import commit_rollouts, read_card, write_part
from train.data.transform import SampleTransform
from train.lora.base import base_digest
from train.progress import progress

JOB_FILE = "job.json"
# what may be another when a job goes on
CHANGEABLE = ("out", "part_rows", "workers", "worker", "max_bad_ratio", "local", "server")


@dataclass(frozen=True)
class LeftOut:
    """A row without rollout."""

    id: str
    reason: str
    detail: str


@dataclass(frozen=True)
class Done:
    """How a job ended. card: None while parts of other workers are missing; parts: how many there are, and will be;
    nothing_to_do: it had ended like this before."""

    card: RolloutCard | None
    left_out: list[LeftOut]
    parts: tuple[int, int]
    nothing_to_do: bool = False

    @property
    def reasons(self) -> dict[str, int]:
        return dict(sorted(Counter(row.reason for row in self.left_out).items()))


def run_job(config: RolloutsConfig, engine: Engine | None = None) -> Done:
    """Answers every row that has none yet. engine: None = the one of the configuration.

    The folder of a stopped job goes on where it stopped. ConfigError: the folder has rollouts of something else.
    """
    scorer = find_scorer(config.scorer, config.imports)
    dataset, out = PackedDataset(config.dataset), Path(config.out)
    about = _about(config, dataset)
    _claim(out, config, about)
    rows = _rows(config, dataset)
    size = config.part_rows
    parts = [rows[first : first + size] for first in range(0, len(rows), size)]
    if (out / ROLLOUTS_CARD).is_file():
        return Done(read_card(out), _left_out(out), (len(parts), len(parts)), nothing_to_do=True)
    assets = prompt_assets(config)
    mine = range(config.worker, len(parts), config.workers)
    todo = [number for number in mine if not (out / part_name(number)).is_file()]
    if todo:
        worker = RowWorker(engine or open_engine(config, assets), assets, scorer, config)
        total, left = (sum(len(parts[number]) for number in numbers) for numbers in (mine, todo))
        with progress("asking", total, "rows") as advance:
            advance(total - left)
            for number in todo:
                _write(out, number, worker.part(dataset, parts[number], advance))
    there = sum((out / part_name(number)).is_file() for number in range(len(parts)))
    card = commit_rollouts(out, about) if there == len(parts) else None
    return Done(card, _left_out(out), (there, len(parts)))


def check_threshold(done: Done, config: RolloutsConfig) -> None:
    """DataThresholdError when a finished job left more rows out than `max_bad_ratio` allows."""
    if done.card is None:
        return
    count, total = len(done.left_out), len(done.left_out) + done.card.rows
    if count > config.max_bad_ratio * total:
        first = done.left_out[0]
        raise DataThresholdError(
            f"{count:,} of {total:,} rows could not be asked or scored; rollouts.max_bad_ratio allows "
            f"{config.max_bad_ratio:.1%}. The first: {first.id}: {first.detail}"
        )


def open_engine(config: RolloutsConfig, assets: ProcessorAssets) -> Engine:
    """The engine of a configuration; a model is loaded."""
    if config.engine == "transformers":
        from jobs.rollout.hub import HubEngine, load_model  # noqa: PLC0415  # servers need no model code

        model = load_model(Path(config.model_path), config.local)
        return HubEngine(model, assets, config.sampling, config.local.batch_size)
    if config.engine == "openai":
        from jobs.rollout.openai import OpenAIEngine  # noqa: PLC0415

        return OpenAIEngine(config, assets)
    from jobs.rollout.sglang import SglangEngine  # noqa: PLC0415

    return SglangEngine(config, assets)


def open_reference(config: RolloutsConfig, assets: ProcessorAssets) -> AnswerReference | None:
    """The reference model of a configuration, loaded; None when it has none."""
    if config.reference_path is None:
        return None
    from jobs.rollout.hub import load_model  # noqa: PLC0415

    return AnswerReference(load_model(Path(config.reference_path), config.local), assets)


class ScorerError(Exception):
    """A scorer raised, or gave no reward, for one answer."""


class RowWorker:
    """Row -> rollout, several at a time where the engine takes several."""

    def __init__(self, engine: Engine, assets: ProcessorAssets, scorer: Scorer, config: RolloutsConfig) -> None:
        self.engine, self.scorer, self.seed = engine, scorer, config.sampling.seed
        self.transform = SampleTransform(assets)
        self.reference = open_reference(config, assets)
        folder = config.processor_path or config.model_path
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)

    def part(self, dataset: PackedDataset, rows: Sequence[int], advance: Any) -> list[RolloutRow | LeftOut]:
        """In the order of the rows."""
        found: list[RolloutRow | LeftOut] = []
        asked: deque[Future[RolloutRow | LeftOut]] = deque()
        with ThreadPoolExecutor(self.engine.concurrency) as pool:
            try:
                for row in rows:
                    if len(asked) == 2 * self.engine.concurrency:  # so many samples with their media are in memory
                        found.append(asked.popleft().result())
                        advance(1)
                    asked.append(pool.submit(self.row, dataset[row]))
                for future in asked:
                    found.append(future.result())
                    advance(1)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # those that are on their way are waited for
                raise
        return found

    def row(self, sample: Any) -> RolloutRow | LeftOut:
        """The rollout of one sample, or why there is none."""
        key = sample.meta.id
        try:
            prompt = make_prompt(sample, self.transform)
            answers = self.engine.answers(prompt, row_seed(self.seed, key))
            told = self.reference.logprobs(prompt, answers) if self.reference else [None] * len(answers)
            responses = [self._response(*pair, prompt) for pair in zip(answers, told, strict=True)]
            found = RolloutRow(key, sample.meta.source, len(prompt.ids), prompt.digest, responses)
            check(found)
        except RowError as error:
            return LeftOut(key, error.reason, error.detail)
        except UnsupportedError as error:
            return LeftOut(key, "unsupported", str(error))
        except DecodeError as error:
            return LeftOut(key, "undecodable", error.reason)
        except ScorerError as error:
            return LeftOut(key, "scorer_failed", str(error))
        except SchemaError as error:
            return LeftOut(key, "bad_answer", str(error))
        return found

    def _response(self, answer: Answer, ref_logprobs: Sequence[float] | None, prompt: Prompt) -> Response:
        text: str = self.tokenizer.decode(answer.ids, skip_special_tokens=True)
        reward = self._reward(text, prompt.meta.extra)
        return Response(answer.ids, answer.logprobs, reward, text, answer.finish, ref_logprobs)

    def _reward(self, text: str, facts: dict[str, Any]) -> float:
        """ScorerError, where the scorer says no more: an error of omniloom tells what is wrong itself."""
        try:
            reward: Any = self.scorer(text, facts)
        except OmniloomError:
            raise
        except Exception as error:  # of the user's own code
            raise ScorerError(f"the scorer raised {type(error).__name__}: {one_line(error)}") from error
        number = np.asarray(reward)
        if number.ndim or number.dtype.kind not in "biuf" or not abs(float(number)) <= float(np.finfo(np.float32).max):
            raise ScorerError(f"the scorer gives {short(reward)}; a reward is a number, finite in float32")
        return float(number)


def row_seed(seed: int, key: str) -> int:
    """63 bits, of the job's seed and the row's id: what a row is answered does not depend on which rows came before."""
    return int(xxhash.xxh3_64_intdigest(f"{seed}:{key}".encode())) >> 1


def _about(config: RolloutsConfig, dataset: PackedDataset) -> RolloutAbout:
    card = dataset.card()
    if card is None:
        raise IncompleteSourceError(f"{config.dataset} has no dataset.json; run `omniloom pack merge` first")
    return RolloutAbout(
        dataset=config.dataset,
        dataset_fingerprint=card.fingerprint,
        model=config.server.model or config.model_path,
        engine=config.engine,
        scorer=config.scorer,
        sampling=config.sampling.model_dump(mode="json"),
    )


def _claim(out: Path, config: RolloutsConfig, about: RolloutAbout) -> None:
    """Notes what the rollouts of a folder are made of, or refuses a folder of others."""
    made_of = config.model_dump(mode="json", exclude=set(CHANGEABLE))
    made_of |= {"part_rows": config.part_rows, "dataset_fingerprint": about.dataset_fingerprint}
    if config.engine == "transformers":  # what a server has loaded, nobody knows
        made_of["model_digest"] = base_digest(Path(config.model_path), 0)
    path = out / JOB_FILE
    if path.is_file():
        then = json.loads(path.read_text())
        keys = sorted(key for key in {*then, *made_of} if then.get(key) != made_of.get(key))
        if keys:
            changed = "; ".join(f"{key}: {then.get(key)} then, {made_of.get(key)} now" for key in keys)
            raise ConfigError(f"rollouts.out: {out} has rollouts of another job ({changed}); choose another folder")
        return
    if out.is_dir() and any(not entry.name.startswith(".") for entry in out.iterdir()):
        raise ConfigError(f"rollouts.out: {out} is not empty and has no {JOB_FILE}; choose another folder")
    write_durably(path, (json.dumps(made_of, indent=1) + "\n").encode())


def _rows(config: RolloutsConfig, dataset: PackedDataset) -> list[int]:
    """Numbers of the rows that are asked. ConfigError when there are none."""
    wanted = config.sources
    rows: Iterator[int] = iter(range(len(dataset)))
    if wanted is not None:
        rows = (row for row in rows if dataset.meta(row).source in wanted)
    found = [row for row, _ in zip(rows, range(config.limit or len(dataset)), strict=False)]
    if not found:
        raise ConfigError(f"rollouts.dataset: {config.dataset} has no row" + (f" of {wanted}" if wanted else ""))
    return found


def _write(out: Path, number: int, found: Sequence[RolloutRow | LeftOut]) -> None:
    """The rows left out first: a part that is there is finished."""
    missing = [asdict(row) for row in found if isinstance(row, LeftOut)]
    if missing:
        name = f"left_out/{part_name(number)}".removesuffix(".parquet") + ".json"
        write_durably(out / name, (json.dumps(missing, indent=1, ensure_ascii=False) + "\n").encode())
    write_part(out, number, [row for row in found if isinstance(row, RolloutRow)])


def _left_out(out: Path) -> list[LeftOut]:
    paths = sorted((out / "left_out").glob("part-*.json"))
    return [LeftOut(**row) for path in paths for row in json.loads(path.read_text())]
