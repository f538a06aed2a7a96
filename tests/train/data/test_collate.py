from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.train.data.loading import clip_sample, omni_assets
from train.data.batch import Batch, BatchPlace
from train.data.collate import COLLATE_INFO, Collator, DataCollateInfo, DecodeError, shift_labels
from train.data.device import Destination, DevicePrefetcher, make_features
from train.data.features import frames_to_patches, log_mel
from train.data.route import RouteSpec
from train.data.sample import TrainSample
from train.data.transform import SampleTransform, decode_unit

PLACE = BatchPlace(0, 0, 0)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def samples() -> list[TrainSample]:
    rng = np.random.default_rng(5)
    transform = SampleTransform(omni_assets())
    return [transform.packed(clip_sample(number, rng), "made") for number in range(5)]


def collate(samples: list[TrainSample], sp_size: int = 1, **settings: Any) -> list[Batch]:
    """The batch of every sequence-parallel rank."""
    return [Collator(rank, sp_size, **settings)(samples, PLACE) for rank in range(sp_size)]


def test_packing_is_what_a_loop_over_tokens_gives(samples: list[TrainSample]) -> None:
    (batch,) = collate(samples)
    at = 0
    for sample, end in zip(samples, batch.cu_seqlens[1:].tolist(), strict=False):
        for i in range(len(sample)):
            assert batch.ids[0, at] == sample.ids[i]
            assert batch.labels[0, at] == (sample.labels[i + 1] if i + 1 < len(sample) else -100)
            assert batch.position_ids[:, 0, at].tolist() == sample.position_ids[:, i].tolist()
            at += 1
        assert at == end
    assert batch.length % 8 == 0 and 0 <= batch.num_pad == batch.length - at < 8
    assert batch.cu_seqlens[0] == 0 and batch.cu_seqlens[-1] == batch.length
    assert len(batch.cu_seqlens) == len(samples) + 1 + (batch.num_pad > 0)
    assert batch.max_seqlen == max(map(len, samples))
    assert (batch.labels[0, at:] == -100).all()
    assert batch.label_rows is not None
    assert batch.label_rows.tolist() == [row for row, label in enumerate(batch.labels[0].tolist()) if label != -100]
    assert batch.label_tokens.tolist() == [int((sample.labels[1:] != -100).sum()) for sample in samples]
    assert batch.sample_tokens.tolist() == [len(sample) for sample in samples]
    assert sum(batch.modality_tokens.values()) == at
    assert batch.keys == [f"clip{i}" for i in range(5)] and set(batch.sources) == {"made"}


def test_the_first_label_of_a_sample_is_never_predicted_from_its_neighbour() -> None:
    assert shift_labels(np.array([5, 6, -100, 7])).tolist() == [6, -100, 7, -100]
    assert shift_labels(np.zeros(0, np.int64)).tolist() == []


@pytest.mark.parametrize("sp_size", [2, 4])
def test_slices_of_all_ranks_are_the_sequence_of_one(samples: list[TrainSample], sp_size: int) -> None:
    ranks = collate(samples, sp_size)
    (whole,) = collate(samples, pad_multiple=8 * sp_size)
    assert {batch.length for batch in ranks} == {whole.length}
    for name in ("ids", "labels", "position_ids"):
        assert torch.equal(torch.cat([getattr(batch, name) for batch in ranks], -1), getattr(whole, name))
    for batch in ranks:
        assert torch.equal(batch.cu_seqlens, whole.cu_seqlens)
        assert (batch.num_pad, batch.max_seqlen) == (whole.num_pad, whole.max_seqlen)


@pytest.mark.parametrize("sp_size", [1, 2, 4])
def test_features_of_all_ranks_are_those_of_the_whole_media(samples: list[TrainSample], sp_size: int) -> None:
    assets = omni_assets()
    assert assets.sound is not None
    patches, mels = [], []
    for sample in samples:
        for unit in sample.media:
            values = decode_unit(unit).values
            assert values is not None
            if unit.kind == "audio":
                mels.append(log_mel(torch.from_numpy(values), assets.sound))
            else:
                assert unit.size is not None
                spec = assets.image if unit.kind == "image" else assets.video
                patches.append(frames_to_patches(torch.from_numpy(values), unit.size, spec))
    spec = RouteSpec(sound_window=100)
    found = [make_features(batch, assets) for batch in collate(samples, sp_size, route_spec=spec)]
    assert torch.equal(torch.cat([part.patches for part in found]), torch.cat(patches))
    assert torch.equal(torch.cat([part.mel for part in found], 1), torch.cat(mels, 1))
    for part in found:
        assert sum(part.mel_lengths) == part.mel.shape[1]
        assert sum(t * h * w for t, h, w in part.grids) == len(part.patches)
    if sp_size > 1:
        assert all(part.grids for part in found)


def test_an_empty_sequence_is_padding(samples: list[TrainSample]) -> None:
    for sp_size in (1, 2):
        for batch in collate([], sp_size):
            assert batch.ids.shape == (1, 8)
            assert batch.cu_seqlens.tolist() == [0, 8 * sp_size]
            assert (batch.num_pad, batch.max_seqlen) == (8 * sp_size, 8 * sp_size)
            assert (batch.labels == -100).all()
            assert batch.position_ids.dtype == torch.float32 and batch.position_ids.shape == (3, 1, 8)
            features = make_features(batch, omni_assets())
            assert features.patches.shape == (0, 1536) and features.mel.shape == (128, 0)
    assert collate([], position_dtype="int64")[0].position_ids.dtype == torch.int64


def test_a_model_adds_entries_to_the_table(samples: list[TrainSample]) -> None:
    def extra(sample: TrainSample) -> dict[str, np.ndarray]:
        return {"marks": np.arange(len(sample)), "groups": np.full((2, 3), len(sample), np.float32)}

    info = {
        "marks": DataCollateInfo(sp_slice=True, sp_pad_value=-1),
        "groups": DataCollateInfo(pack_dim=0, sp_slice=True, sp_pad_value=0, sp_pad_scale=4, per_token=False),
    }
    ranks = collate(samples[:3], 2, extra_arrays=extra, extra_info=info)
    marks = torch.cat([batch.extra["marks"] for batch in ranks])
    assert marks[: len(samples[0])].tolist() == list(range(len(samples[0])))
    assert len(marks) == ranks[0].length and (marks[len(marks) - ranks[0].num_pad :] == -1).all()
    groups = torch.cat([batch.extra["groups"] for batch in ranks])
    assert groups.shape == (8, 3) and ranks[0].extra["groups"].shape == (4, 3)  # 6 rows, a multiple of 2 ranks x 4
    assert groups[:6, 0].tolist() == [len(samples[i // 2]) for i in range(6)] and not groups[6:].any()
    assert "extra.marks" in ranks[0].tensors()
    with pytest.raises(ValueError, match="'groups'"):
        collate(samples[:1], extra_arrays=lambda s: {"marks": np.arange(len(s))}, extra_info=info)
    with pytest.raises(ValueError, match="stand in the common table"):
        Collator(extra_info={"ids": COLLATE_INFO["ids"]})
    with pytest.raises(ValueError, match="needs an sp_pad_value"):
        DataCollateInfo(sp_slice=True)


def test_a_medium_that_cannot_be_decoded_names_its_sample(samples: list[TrainSample]) -> None:
    unit = samples[1].media[0]
    broken = replace(samples[1], media=[replace(unit, blobs=(b"\xff\xd8 no picture", *unit.blobs[1:]))])
    with pytest.raises(DecodeError) as caught:
        collate([samples[0], broken])
    assert caught.value.sample == 1


def test_batches_travel_and_move(samples: list[TrainSample]) -> None:
    (batch,) = collate(samples)
    moved = batch.to(CPU)
    assert all(torch.equal(tensor, moved.tensors()[name]) for name, tensor in batch.tensors().items())
    assert moved.keys == batch.keys and moved.route is batch.route


def test_the_prefetcher_keeps_the_order_and_makes_features(samples: list[TrainSample]) -> None:
    batches = [collate([sample])[0] for sample in samples]
    prefetcher = DevicePrefetcher(iter(batches), Destination(CPU), omni_assets(), depth=2)
    found = list(prefetcher)
    assert [batch.keys for batch in found] == [batch.keys for batch in batches]
    for made, batch in zip(found, batches, strict=True):
        assert made.features is not None and not len(made.pixels) and not len(made.sound)
        assert torch.equal(made.features.patches, make_features(batch, omni_assets()).patches)
    assert list(prefetcher) == []
    prefetcher.close()


def test_an_error_of_the_source_is_raised_where_its_batch_was_due(samples: list[TrainSample]) -> None:
    def source() -> Iterator[Batch]:
        yield collate(samples[:1])[0]
        raise OSError("no more")

    prefetcher = DevicePrefetcher(source(), Destination(CPU), omni_assets(), depth=1)
    assert next(prefetcher).keys == ["clip0"]
    for _ in range(2):
        with pytest.raises(OSError, match="no more"):
            next(prefetcher)
    prefetcher.close()


def test_closing_ends_a_prefetcher_that_nobody_reads(samples: list[TrainSample]) -> None:
    (batch,) = collate(samples[:1])
    endless: Iterator[Batch] = iter(lambda: batch, None)
    prefetcher = DevicePrefetcher(endless, Destination(CPU), omni_assets(), depth=1)
    next(prefetcher)
    prefetcher.close()
    assert not prefetcher._thread.is_alive()
