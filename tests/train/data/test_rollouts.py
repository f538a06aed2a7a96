"""Recorded responses on their way into batches: layout, lengths, plan, what stands beside the ids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from schemas.errors import ConfigError, IncompleteSourceError, SchemaError, VerificationError
from schemas.rollouts import Response, RolloutAbout, RolloutRow, prompt_digest
from schemas.sample import PackedSample
from tests.train.data.dataset import write_dataset
from tests.train.data.loading import Setup, clip_sample, data_config, omni_assets, write_text
from tests.train.data.packed import packed_sample
from tests.train.grpo import prompt_ids, rollout_row
from train.config import BatchConfig
from train.data.lengths import Lengths, load_lengths
from train.data.loader import TrainLoader
from train.data.rank_plan import DataRank
from train.data.rollout_files import read_rollouts, write_rollouts
from train.data.rollouts import ROLLOUT_INFO, RolloutArrays, advantages
from train.data.sample import IGNORE, TrainSample
from train.data.serving import ModelInputs
from train.data.transform import SampleTransform

ABOUT = RolloutAbout(
    dataset="elsewhere", dataset_fingerprint="f", model="m", engine="transformers", scorer="exact", sampling={}
)
REWARDS = [(1.0, 0.0, 0.5), (0.0, 0.0), (0.25, 1.0, 0.0, 0.0), (2.0,)]
END = omni_assets().tokens.im_end


def samples(count: int) -> list[PackedSample]:
    rng = np.random.default_rng(3)
    return [clip_sample(number, rng) for number in range(count)]


def rows_of(made: list[PackedSample], **how: Any) -> list[RolloutRow]:
    return [rollout_row(sample, omni_assets(), REWARDS[n % len(REWARDS)], n, **how) for n, sample in enumerate(made)]


def setup_of(folder: Path, made: list[PackedSample], rows: list[RolloutRow], **data: Any) -> Setup:
    """A packed dataset with rollouts, read for training."""
    write_dataset(folder / "clips", made, 4, 64 << 20)
    write_rollouts(folder / "rollouts", rows, ABOUT, part_rows=3)
    source = {"path": str(folder / "clips"), "name": "clips", "rollouts": str(folder / "rollouts")}
    config = data_config([source], folder / "cache", **({"max_seq_len": 1024} | data))
    return Setup(config, BatchConfig(global_batch_size=4))


@pytest.mark.parametrize("number", range(5))
def test_the_answer_of_the_data_as_a_response_gives_the_layout_of_the_data(number: int) -> None:
    sample, transform = samples(5)[number], SampleTransform(omni_assets())
    whole = transform.packed(sample, "s")
    answer = np.flatnonzero(whole.labels != IGNORE)
    start, stop = int(answer[0]), int(answer[-1]) + 1  # one turn of the assistant: its text and the end token
    assert len(answer) == stop - start and whole.ids[stop - 1] == END
    ids = whole.ids[start:stop].tolist()
    drawn = Response(ids, [-1.0] * len(ids), 1.0, "", "stop")
    cut = Response(ids[:1], [-2.0], 0.0, "", "length", None)
    row = RolloutRow(sample.meta.id, "s", start, prompt_digest(whole.ids[:start]), [drawn, cut])
    full, short = transform.responses(sample, row, "s")
    for got, end in ((full, stop), (short, start + 1)):
        assert got.ids.tolist() == whole.ids[:end].tolist()
        assert got.labels.tolist() == whole.labels[:end].tolist()
        assert np.array_equal(got.position_ids, whole.position_ids[:, :end])
        assert (got.num_video, got.num_audio, got.num_image) == (whole.num_video, whole.num_audio, whole.num_image)
        assert got.num_text == end - got.num_video - got.num_audio - got.num_image
        assert [(u.kind, u.rows.tolist()) for u in got.media] == [(u.kind, u.rows.tolist()) for u in whole.media]
        assert got.num_label_tokens == end - start
    assert (full.key, short.key) == (f"clip{number}#0", f"clip{number}#1")
    assert short.ids[-1] == ids[0] != END  # a response that was cut off ends without the end token


def test_a_conversation_that_ends_with_the_user_is_a_prompt_as_a_whole() -> None:
    turns: list[Any] = [["user", ("text", "Hi")], ["assistant", ("text", "Yes?")], ["user", ("text", "Name a colour.")]]
    asked = prompt_ids(packed_sample(turns, key="a"), omni_assets())
    answered = prompt_ids(packed_sample([*turns, ["assistant", ("text", "Red.")]], key="a"), omni_assets())
    assert asked.tolist() == answered.tolist()
    whole = SampleTransform(omni_assets()).packed(
        packed_sample([*turns, ["assistant", ("text", "Red.")]], key="a"), "s"
    )
    assert whole.ids[: len(asked)].tolist() == asked.tolist()
    assert (whole.labels[len(asked) :] != IGNORE).tolist()[:-1] == [True] * (len(whole.ids) - len(asked) - 1)


def test_lengths_are_those_of_all_responses(tmp_path: Path) -> None:
    made = samples(6)
    rows = rows_of(made)
    lengths = setup_of(tmp_path, made, rows).sources[0].lengths
    transform = SampleTransform(omni_assets())
    for n, (sample, row) in enumerate(zip(made, rows, strict=True)):
        laid_out = transform.responses(sample, row, "s")
        assert lengths.total[n] == sum(map(len, laid_out)) == sum(len(s) for s in laid_out)
        assert lengths.labels[n] == row.response_tokens == sum(s.num_label_tokens for s in laid_out)
        for kind in ("text", "video", "audio", "image"):
            assert getattr(lengths, kind)[n] == sum(getattr(s, f"num_{kind}") for s in laid_out)
        units = [unit for s in laid_out for unit in s.media]
        grids = [unit.grid for unit in units if unit.grid is not None]
        assert lengths.patches[n] == sum(t * h * w for t, h, w in grids)
        assert lengths.patch_pairs[n] == sum(t * (h * w) ** 2 for t, h, w in grids)
        assert lengths.mel[n] == sum(unit.num_mel for unit in units)
    config = data_config([{"path": str(tmp_path / "clips")}], tmp_path / "cache")
    plain = Setup(config, BatchConfig(global_batch_size=4))
    assert (plain.sources[0].lengths.total < lengths.total).sum() >= 4  # kept apart in the cache
    assert plain.sources[0].rows.fingerprint != setup_again(tmp_path).sources[0].rows.fingerprint


def setup_again(folder: Path, **data: Any) -> Setup:
    source = {"path": str(folder / "clips"), "name": "clips", "rollouts": str(folder / "rollouts")}
    return Setup(
        data_config([source], folder / "cache", **({"max_seq_len": 1024} | data)), BatchConfig(global_batch_size=4)
    )


def loaded(setup: Setup, rank: DataRank | None = None) -> list[Any]:
    inputs = ModelInputs(extra_arrays=RolloutArrays(), extra_info=ROLLOUT_INFO)
    loader = TrainLoader(
        setup.sources, setup.plans, setup.data, setup.batch, setup.assets, rank or DataRank(), model=inputs
    )
    return [batch for step in loader for batch in step.micro_batches]


def test_batches_hold_whole_groups_and_what_belongs_to_each_token(tmp_path: Path) -> None:
    made = samples(8)
    rows = {row.id: row for row in rows_of(made)}
    batches = loaded(setup_of(tmp_path, made, list(rows.values())))
    seen: list[str] = []
    for batch in batches:
        at = 0
        groups = list(dict.fromkeys(key.rpartition("#")[0] for key in batch.keys))
        assert batch.keys == [f"{g}#{n}" for g in groups for n in range(len(rows[g].responses))]
        seen += groups
        responses = batch.extra["response"]
        assert responses.shape == (2, len(batch.keys))
        for number, (key, size) in enumerate(zip(batch.keys, batch.sample_tokens.tolist(), strict=True)):
            row_id, _, which = key.rpartition("#")
            row = rows[row_id]
            drawn, prompt = row.responses[int(which)], row.prompt_tokens
            assert size == prompt + len(drawn.ids)
            wanted = advantages(np.array(row.rewards), normalize_std=True)[int(which)]
            place = slice(at + prompt - 1, at + size - 1)  # the row before predicts a token
            assert batch.labels[0, place].tolist() == list(drawn.ids)
            assert torch.equal(batch.extra["old_logprob"][place], torch.tensor(drawn.logprobs))
            assert torch.equal(batch.extra["ref_logprob"][place], torch.tensor(drawn.ref_logprobs))
            assert torch.allclose(batch.extra["advantage"][place], torch.tensor(float(wanted)))
            assert responses[:, number].tolist() == pytest.approx([drawn.reward, wanted])
            at += size
        others = batch.labels[0] == IGNORE
        for name in ("old_logprob", "ref_logprob", "advantage"):
            assert batch.extra[name].shape == batch.labels[0].shape and not batch.extra[name][others].any()
        assert int(batch.label_tokens.sum()) == int((~others).sum())
    assert sorted(seen) == sorted(rows)


def test_slices_of_a_sequence_have_their_share(tmp_path: Path) -> None:
    made = samples(4)
    setup = setup_of(tmp_path, made, rows_of(made))
    whole = loaded(setup)
    parts = [loaded(setup, DataRank(0, 1, rank, 2)) for rank in range(2)]
    for number, batch in enumerate(whole):
        for name in ("advantage", "old_logprob", "ref_logprob"):
            joined = torch.cat([parts[rank][number].extra[name] for rank in range(2)])
            assert torch.equal(joined[: len(batch.extra[name])], batch.extra[name])
        assert all(torch.equal(part[number].extra["response"], batch.extra["response"]) for part in parts)


@pytest.mark.parametrize("change", [{"prompt_digest": "0" * 16}, {"prompt_tokens": 3}])
def test_responses_to_another_prompt_are_an_error_that_names_the_row(tmp_path: Path, change: dict[str, Any]) -> None:
    made = samples(3)
    rows = rows_of(made)
    rows[1] = replace(rows[1], **change)
    with pytest.raises(SchemaError, match=r"rollout clip1: its prompt had .* the tokenizer, the processor"):
        setup_of(tmp_path, made, rows)
    with pytest.raises(SchemaError, match="rollout clip1"):
        SampleTransform(omni_assets()).responses(made[1], rows[1], "s")


def test_another_system_prompt_is_another_prompt(tmp_path: Path) -> None:
    made = samples(2)
    setup = setup_of(tmp_path, made, rows_of(made))
    other = omni_assets()
    other = replace(other, style=replace(other.style, system="Be brief."))
    with pytest.raises(SchemaError, match="rollout clip0: its prompt had"):
        SampleTransform(other).responses(made[0], read_rollouts(tmp_path / "rollouts")["clip0"], "s")
    assert setup.sources[0].lengths.faults == ()


def test_rows_without_responses_are_left_out_and_responses_without_rows_refused(tmp_path: Path) -> None:
    made = samples(5)
    rows = rows_of(made)
    setup = setup_of(tmp_path, made, rows[:2] + rows[3:])
    assert setup.sources[0].lengths.faults == ((2, "clip2: the rollouts have no response to it"),)
    assert setup.plans.planner.empty == {"clips": 1}
    assert not any(key.startswith("clip2#") for batch in loaded(setup) for key in batch.keys)
    write_dataset(tmp_path / "fewer", made[:3], 4, 64 << 20)
    source = {"path": str(tmp_path / "fewer"), "rollouts": str(tmp_path / "rollouts")}
    with pytest.raises(SchemaError, match=r"2 of 4 rollouts of .* are of no row of .*fewer; they were made from else"):
        Setup(data_config([source], tmp_path / "cache"), BatchConfig(global_batch_size=4))


def test_tokens_that_the_model_does_not_have_are_told_while_tokens_are_counted(tmp_path: Path) -> None:
    """The row by name, also where the lengths for a larger vocabulary are in the cache."""
    made = samples(4)
    rows = rows_of(made)
    last = rows[2].responses[-1]
    wrong = replace(last, ids=[*last.ids[:-1], 9000])
    rows[2] = replace(rows[2], responses=[*rows[2].responses[:-1], wrong])
    write_dataset(tmp_path / "clips", made, 4, 64 << 20)
    write_rollouts(tmp_path / "rollouts", rows, ABOUT)
    rollouts = read_rollouts(tmp_path / "rollouts")

    def count(vocab_size: int | None) -> Lengths:
        assets = replace(omni_assets(), vocab_size=vocab_size)
        return load_lengths(str(tmp_path / "clips"), assets, rollouts=rollouts, cache=str(tmp_path / "cache"))

    assert count(9001).total.all() and count(None).total.all()
    said = rf"rollout clip2: response \d: token {len(last.ids) - 1} is 9000, and the model has 9000, from 0"
    with pytest.raises(SchemaError, match=said):
        count(9000)


def test_rollouts_lie_in_a_folder_of_this_machine(tmp_path: Path) -> None:
    made = samples(2)
    setup_of(tmp_path, made, rows_of(made))
    source = {"path": str(tmp_path / "clips"), "rollouts": "s3://bucket/rollouts"}
    with pytest.raises(ConfigError, match="rollouts is s3://bucket/rollouts; copy them to a folder that all nodes see"):
        Setup(data_config([source], tmp_path / "cache"), BatchConfig(global_batch_size=4))
    with pytest.raises(IncompleteSourceError, match=r"there is no folder .*none; rollouts are what"):
        config = data_config([source | {"rollouts": f"file://{tmp_path}/none"}], tmp_path / "cache")
        Setup(config, BatchConfig(global_batch_size=4))


def test_text_sources_have_no_rollouts(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.jsonl", 3)
    source = {"path": str(text), "source_name": "openai_messages", "rollouts": str(tmp_path)}
    with pytest.raises(ConfigError, match="rollouts are responses to the rows of a packed dataset"):
        Setup(data_config([source], tmp_path / "cache"), BatchConfig(global_batch_size=4))


def test_a_row_that_is_too_long_with_all_its_responses_is_left_out(tmp_path: Path) -> None:
    made = samples(4)
    setup = setup_of(tmp_path, made, rows_of(made), max_seq_len=120)
    totals = setup.sources[0].lengths.total
    assert (totals > 120).sum() == 2
    assert setup.plans.planner.too_long == {"clips": 2}


def test_damaged_media_of_a_row_mask_all_its_responses(tmp_path: Path) -> None:
    made = samples(4)
    setup = setup_of(tmp_path, made, rows_of(made), dead_samples="mask")
    shard = next((tmp_path / "clips" / "parts" / "00000").glob("*.mds"))
    data = bytearray(shard.read_bytes())
    at = data.find(made[1].videos[0].frames[0])
    assert at > 0
    data[at + 40] ^= 0xFF
    shard.write_bytes(bytes(data))
    batches = loaded(setup)
    dead = [d for batch in batches for d in batch.dead]
    assert [(d.source, d.key) for d in dead] == [("clips", "clip1#0")]
    masked = [batch for batch in batches if batch.dead]
    for batch in masked:
        ends = [0, *batch.sample_tokens.cumsum(0).tolist()]
        spans = [slice(*ends[n : n + 2]) for n, key in enumerate(batch.keys) if key.startswith("clip1#")]
        assert len(spans) == 2
        for span in spans:
            assert (batch.labels[0, span] == IGNORE).all() and not batch.extra["advantage"][span].any()
        assert batch.extra["response"].shape[1] == len(batch.keys) - 2
    with pytest.raises(VerificationError, match="clips/parts/00000"):
        loaded(setup_again(tmp_path))


def test_advantages() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 0.5])
    std = float(np.sqrt(((rewards - rewards.mean()) ** 2).sum() / 3))
    assert advantages(rewards, normalize_std=True) == pytest.approx((rewards - 0.375) / (std + 1e-6), rel=1e-12)
    assert advantages(rewards, normalize_std=False) == pytest.approx(rewards - 0.375)
    assert advantages(rewards, normalize_std=True).sum() == pytest.approx(0.0, abs=1e-12)
    for equal in (np.array([0.7] * 3), np.array([0.1] * 7), np.array([5.0])):  # whose mean is rounded
        for normalize in (True, False):
            assert not advantages(equal, normalize_std=normalize).any()


def test_samples_without_a_response_have_empty_entries() -> None:
    none = np.zeros(0, np.int64)
    empty = TrainSample(none, none, np.zeros((3, 0), np.float32), [], "", "", 0, 0)
    arrays = RolloutArrays()(empty)
    assert arrays.keys() == ROLLOUT_INFO.keys()
    assert [arrays[name].shape for name in ROLLOUT_INFO] == [(0,), (0,), (0,), (2, 0)]
