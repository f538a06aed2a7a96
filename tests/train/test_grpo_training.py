"""The trainer on recorded rollouts: from the configuration to the metrics, and on after a stop."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.errors import ConfigError, ResumableError, SchemaError
from schemas.rollouts import Response, RolloutAbout, RolloutRow, prompt_digest
from schemas.strict import check_config
from tests.train.data.loading import clip_sample, omni_assets, write_clips
from tests.train.grpo import prompt_ids
from tests.train.test_trainer import Watch
from tests.train.tiny import VOCAB, omni_config
from train.config import OmniConfig
from train.data.rollout_files import write_rollouts
from train.trainer import make_trainer
from train.validate import validate_config

STEPS = 6
GOOD, BAD = 11, 12  # tokens that are rewarded and that are not
GRPO = {"type": "grpo", "clip_low": 0.2, "clip_high": 0.3}
ABOUT = RolloutAbout(
    dataset="clips", dataset_fingerprint="f", model="m", engine="transformers", scorer="exact", sampling={}
)


def rows(count: int, references: bool) -> list[RolloutRow]:
    """Two responses to each clip, a good one and a bad one, drawn about as random weights do."""
    rng = np.random.default_rng(0)
    usual, end, made = -math.log(VOCAB), omni_assets().tokens.im_end, []
    for number in range(count):
        sample = clip_sample(number, rng)
        ids = prompt_ids(sample, omni_assets())
        responses = [
            Response([token, end], [usual] * 2, float(token == GOOD), "", "stop", [usual] * 2 if references else None)
            for token in (GOOD, BAD)
        ]
        made.append(RolloutRow(sample.meta.id, "made", len(ids), prompt_digest(ids), responses))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("grpo")
    write_clips(made / "clips", 12)
    write_rollouts(made / "rollouts", rows(12, references=True), ABOUT)
    write_rollouts(made / "no_references", rows(12, references=False), ABOUT)
    return made


def sources(folder: Path, rollouts: str | None = "rollouts", name: str = "clips") -> list[dict[str, Any]]:
    source = {"path": str(folder / "clips"), "name": name}
    return [source if rollouts is None else source | {"rollouts": str(folder / rollouts)}]


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "output" / "metrics.jsonl").read_text().splitlines()]


def test_a_training_learns_what_is_rewarded_and_goes_on_bit_by_bit(folder: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "max_steps": STEPS,
        "objective": GRPO | {"kl_coef": 0.01},
        "optimizer": {"lr": 2e-3, "lr_decay_style": "constant"},
        "evaluation": {"sources": sources(folder, None, "held_out"), "steps": 0, "max_batches": 2},
    }
    whole = Watch()
    trainer = make_trainer(omni_config(tmp_path / "whole", sources(folder), coef=0.0, **keys), callbacks=[whole])
    trainer.train()
    assert len(whole.losses) == STEPS and whole.losses[-1] < whole.losses[0] - 0.1
    lines = [line for line in metrics_of(tmp_path / "whole") if "loss" in line]
    for line, loss in zip(lines, whole.losses, strict=True):
        assert line["loss"] == pytest.approx(loss) and line["loss/clips"] == pytest.approx(loss)
        assert line["grpo/reward"] == 0.5 and line["grpo/reward_std"] == 0.5 and line["grpo/no_advantage"] == 0.0
        assert line["samples"] * 2 == line["label_tokens"]
    assert abs(lines[0]["grpo/ratio"] - 1) < 0.5 and 0 <= lines[0]["grpo/kl_ref"] < 0.1
    assert lines[-1]["grpo/kl_ref"] > lines[0]["grpo/kl_ref"] and lines[-1]["grpo/clip_high"] > 0
    assert whole.evaluated and whole.evaluated[-1].keys() == {"loss"}  # the cross-entropy of the data's own answers
    first, second = Watch(stop_after=2), Watch()
    config = omni_config(tmp_path / "parts", sources(folder), coef=0.0, **keys)
    with pytest.raises(ResumableError, match="after step 2"):
        make_trainer(config, callbacks=[first]).train()
    make_trainer(config, callbacks=[second]).train()
    assert first.losses + second.losses == whole.losses
    again = [line for line in metrics_of(tmp_path / "parts") if "loss" in line]
    for one, other in zip(lines, again, strict=True):
        assert {n: v for n, v in one.items() if n.startswith("grpo/")} == {
            n: v for n, v in other.items() if n.startswith("grpo/")
        }


def test_other_rollouts_are_other_data(folder: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"max_steps": 2, "objective": GRPO}
    with pytest.raises(ResumableError):
        config = omni_config(tmp_path, sources(folder), **keys)
        make_trainer(config, callbacks=[Watch(stop_after=1)]).train()
    other = omni_config(tmp_path, sources(folder, "no_references"), **keys)
    said = "the rollouts of source clips are others. To train on these, set another train.checkpoint.output_dir"
    with pytest.raises(ConfigError, match=said) as error:
        make_trainer(other).train()
    assert "the data are not those of the checkpoint" in str(error.value) and "weight 1.0" not in str(error.value)
    (fault,) = validate_config(other, 1).faults
    assert str(fault) == str(error.value)


def test_rows_without_advantage_are_told(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, equal in (("some", 3), ("all", 12)):
        made = rows(12, references=False)
        for row in made[:equal]:
            row.responses[:] = [replace(response, reward=0.25) for response in row.responses]
        write_rollouts(tmp_path / name, made, ABOUT)
    said = {
        "some": ("note", "data source clips: 3 of 12 rows (25%) have responses of equal rewards: no advantage"),
        "all": ("warning", "the responses of each row have equal rewards, so that nothing is learned from it"),
    }
    for name, (what, how) in said.items():
        config = omni_config(tmp_path, sources(folder, str(tmp_path / name)), objective=GRPO)
        assert any(kind == what and how in text for kind, text in validate_config(config, 1).facts)
    with caplog.at_level("INFO", "omniloom.train"):
        make_trainer(config).build()
    (record,) = [record for record in caplog.records if "equal rewards" in record.message]
    assert record.levelname == "WARNING" and said["all"][1] in record.message


def test_a_penalty_needs_references(folder: Path, tmp_path: Path) -> None:
    config = omni_config(tmp_path, sources(folder, "no_references"), objective=GRPO | {"kl_coef": 0.1})
    said = "train.objective.kl_coef is 0.1, but the rollouts of data source clips .* have no ref_logprobs"
    with pytest.raises(ConfigError, match=said):
        make_trainer(config).build()
    (fault,) = validate_config(config, 1).faults
    assert "no ref_logprobs" in str(fault)
    facts = dict(validate_config(omni_config(tmp_path, sources(folder), objective=GRPO), 1).facts)
    assert facts["data source clips"] == "12 rows" and facts["steps"].endswith("5 in all")


def test_the_objective_and_the_sources_must_agree(folder: Path, tmp_path: Path) -> None:
    def refused(said: str, given: list[dict[str, Any]], **train: Any) -> None:
        with pytest.raises(ConfigError, match=said):
            omni_config(tmp_path, given, **train)

    mixed = sources(folder) + sources(folder, None, "plain")
    refused(r"type is grpo, but data\.sources\.1 \(plain\) has no rollouts", mixed, objective=GRPO)
    refused(r"data\.sources\.0\.rollouts is .*, but train\.objective\.type is cross_entropy", sources(folder))
    refused(
        "source 'clips' has rollouts; an evaluation is the cross-entropy",
        sources(folder, None),
        evaluation={"sources": sources(folder), "steps": 1},
    )
    refused("clip_low", sources(folder), objective=GRPO | {"clip_low": 1.5})
    refused("clip_high", sources(folder), objective=GRPO | {"clip_high": 0})
    refused("kl_coef", sources(folder), objective=GRPO | {"kl_coef": -0.1})
    refused("cross_entropy", sources(folder), objective={"type": "ppo"})
    refused("clip_low of type grpo; the type is cross_entropy", sources(folder, None), objective={"clip_low": 0.1})


def test_the_plain_objective_takes_what_it_always_took(folder: Path, tmp_path: Path) -> None:
    """No extra entries in its batches, no second product."""
    trainer = make_trainer(omni_config(tmp_path, sources(folder, None), max_steps=1))
    trainer.build()
    assert trainer.parts.objective is None and trainer.model_inputs.extra_arrays is None
    calls = []
    bound = trainer.model.cross_entropy
    trainer.model.cross_entropy = lambda *args, **keys: (calls.append(keys["scale"].ndim), bound(*args, **keys))[1]
    trainer.train()
    assert calls == [0] * len(calls) and len(calls) == 4  # one for each micro-batch
    batch = next(iter(trainer.train_dataloader), None)
    assert batch is None  # the training is over


def test_defaults_are_stated_in_the_configuration() -> None:
    values = {"model": {"config_path": "m"}, "data": {"sources": [{"path": "d"}], "processor_path": "p"}}
    config = check_config(values, OmniConfig)
    assert config.train.objective.model_dump() == {
        "type": "cross_entropy", "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0, "normalize_std": True,
    }  # fmt: skip


def test_tokens_that_the_model_does_not_have_are_told_before_training(folder: Path, tmp_path: Path) -> None:
    """The last token of the vocabulary is one of the model's, the one behind it is not."""
    made = rows(12, references=False)
    for name, token in (("last", VOCAB - 1), ("none", VOCAB)):
        first = replace(made[5].responses[0], ids=[token, made[5].responses[0].ids[1]])
        write_rollouts(tmp_path / name, [*made[:5], replace(made[5], responses=[first]), *made[6:]], ABOUT)
    assert not validate_config(omni_config(tmp_path, sources(folder, str(tmp_path / "last")), objective=GRPO), 1).faults
    config = omni_config(tmp_path, sources(folder, str(tmp_path / "none")), objective=GRPO)
    said = f"rollout {made[5].id}: response 0: token 0 is {VOCAB}, and the model has {VOCAB}, from 0"
    with pytest.raises(SchemaError, match=said):
        make_trainer(config).train()
    (fault,) = validate_config(config, 1).faults
    assert said in str(fault)
