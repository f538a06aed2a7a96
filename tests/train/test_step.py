"""One step in one process: what it counts, what it frees, and what it leaves alone."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from tests.train.models import media
from tests.train.models.families import omni
from tests.train.parallel.steps import STEPS, batches_of, make_parts, meta_model, without_labels
from train.loss import SourceLoss, source_losses, step_scale
from train.mesh import Degrees, Mesh
from train.models.inputs import IGNORE
from train.state import TrainerState
from train.step import train_step

CPU = torch.device("cpu")
MIXES = [media.text_mix(), media.clip_with_sound_mix(), media.image_mix()]


def batch(**how: Any) -> Any:
    found = media.batch_of(media.omni_assets(), MIXES, **how)
    found.sources[:] = ["a", "b", "a"]
    return found


def test_losses_by_source_of_whole_and_sliced_sequences() -> None:
    whole = batch()
    losses = torch.rand(whole.ids.shape[1], generator=torch.Generator().manual_seed(0))
    ends = whole.sample_tokens.cumsum(0).tolist()
    samples = [losses[start:stop].sum() for start, stop in zip([0, *ends], ends, strict=False)]
    found = source_losses(losses, whole)
    assert list(found) == ["a", "b"]
    assert torch.allclose(found["a"].total, samples[0] + samples[2])
    assert torch.allclose(found["b"].total, samples[1])
    labels = whole.label_tokens.tolist()
    assert (found["a"].tokens, found["b"].tokens) == (labels[0] + labels[2], labels[1])
    slices = [batch(sp_rank=rank, sp_size=4) for rank in range(4)]
    size = slices[0].ids.shape[1]
    padded = torch.nn.functional.pad(losses, (0, 4 * size - len(losses)))
    parts = [source_losses(padded[rank * size : (rank + 1) * size], part) for rank, part in enumerate(slices)]
    for name, expected in found.items():
        assert torch.allclose(torch.stack([part[name].total for part in parts]).sum(), expected.total)
        assert {part[name].tokens for part in parts} == {expected.tokens}
    assert source_losses(torch.zeros(8), media.empty_batch()) == {}
    total = SourceLoss(torch.tensor(1.0), 2) + SourceLoss(torch.tensor(3.0), 4)
    assert (float(total.total), total.tokens) == (4.0, 6)


def test_the_scale_is_one_over_all_labels_of_the_step() -> None:
    batches = [batch(), without_labels(batch()), media.batch_of(media.omni_assets(), [media.text_mix()])]
    labels = sum(int((b.labels != IGNORE).sum()) for b in batches)
    scale = step_scale(batches, Mesh(Degrees(), 0, CPU))
    assert int(scale.label_tokens) == labels and float(scale.aux_scale) == pytest.approx(1 / 3)
    assert float(scale.loss_scale) == pytest.approx(1 / labels) and scale.loss_scale.dtype == torch.float32
    assert float(step_scale(batches[1:2], Mesh(Degrees(), 0, CPU)).loss_scale) == 1.0


def test_a_micro_batch_of_padding_alone_is_no_part_of_the_routers_loss() -> None:
    filled = [batch(), media.batch_of(media.omni_assets(), [media.text_mix()])]
    results = []
    for batches in (filled, [*filled, media.empty_batch()]):
        parts = make_parts({}, meta_model(0.5))
        result = train_step(parts, batches)
        assert result.aux_loss is not None
        results.append((float(result.aux_loss), float(result.grad_norm)))
    assert results[1] == pytest.approx(results[0], rel=1e-6) and results[0][0] > 1
    assert float(step_scale([media.empty_batch()], Mesh(Degrees(), 0, CPU)).aux_scale) == 1.0


def test_a_step_counts_what_it_trained_on() -> None:
    batches = [batch(), media.batch_of(media.omni_assets(), [media.text_mix()])]
    parts = make_parts({}, meta_model(), max_grad_norm=0.1)
    result = train_step(parts, list(batches), wait_s=0.25)
    assert result.tokens == sum(int(b.sample_tokens.sum()) for b in batches)
    assert result.padding == sum(b.num_pad for b in batches)
    assert result.samples == 4 and result.wait_s == 0.25 and result.step_s > 0
    assert result.label_tokens == int(result.step_tokens) == sum(s.tokens for s in result.source_loss.values())
    assert torch.allclose(sum(s.total for s in result.source_loss.values()), result.loss_sum)
    assert sum(result.modality_tokens.values()) == result.tokens
    text = omni().text_config
    assert result.expert_counts is not None
    assert result.expert_counts.shape == (text.num_hidden_layers, text.num_experts)
    assert (result.expert_counts.sum(1) == result.tokens * text.num_experts_per_tok).all()
    assert float(result.grad_norm) > 0.1  # before clipping
    moved = sum((p.grad is not None) for p in parts.model.parameters())
    assert moved == 0  # set to None, and not kept


def test_each_micro_batch_is_freed_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = make_parts({}, meta_model())
    batches = [media.batch_of(media.omni_assets(), [make()]) for make in (media.text_mix, media.image_mix) * 2]
    alive = [weakref.ref(b.ids) for b in batches]
    seen: list[int] = []
    parts.model.register_forward_pre_hook(lambda *_: seen.append(sum(ref() is not None for ref in alive)))
    train_step(parts, batches)
    assert seen == [4, 3, 2, 1] and batches == []


def test_the_learning_rate_of_a_result_is_the_one_that_was_used() -> None:
    parts = make_parts({}, meta_model())
    rates = [train_step(parts, batches_of(0, 1)[:1]).lr["default"] for _ in range(2)]
    assert rates == [parts.scheduler.schedule.factor(n) * 0.05 for n in range(2)]
    assert parts.scheduler.steps == 2 < STEPS


def test_where_a_training_stands_survives_json() -> None:
    state = TrainerState()
    state.count(100, 3, epoch_ends=False)
    state.evaluated(2.0)
    state.count(50, 2, epoch_ends=True)
    state.evaluated(2.5)
    assert state.to_json() == {
        "step": 2, "epoch": 1, "tokens": 150, "samples": 5, "best_loss": 2.0, "best_step": 1, "evaluated_step": 2,
    }  # fmt: skip
    assert TrainerState.from_json(state.to_json()) == state
