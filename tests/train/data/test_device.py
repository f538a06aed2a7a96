from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from train.data.batch import Batch, BatchPlace, SoundSamples, VisionPixels
from train.data.device import Destination, DevicePrefetcher, make_features
from train.data.processor import ProcessorAssets, SoundSpec, VisionSpec
from train.data.route import make_route

HALF = (0.5, 0.5, 0.5)
SPEC = VisionSpec(patch_size=16, temporal_patch=2, merge_size=2, mean=HALF, std=HALF)
NOT_NEEDED: Any = None
ASSETS = ProcessorAssets(
    path="",
    encode=NOT_NEEDED,
    tokens=NOT_NEEDED,
    style=NOT_NEEDED,
    video=SPEC,
    image=SPEC,
    sound=SoundSpec(16000, 400, 160, 128),
    fingerprint="",
)


def make_batch(number: int) -> Batch:
    """A batch with one clip of 4 frames and one second of sound."""
    rng = np.random.default_rng(number)
    ids = torch.full((1, 64), number)
    pixels = torch.from_numpy(rng.integers(0, 255, 4 * 64 * 96 * 3, np.uint8))
    sound = torch.from_numpy(rng.integers(-9000, 9000, 16000).astype(np.int16))
    return Batch(
        place=BatchPlace(0, number, 0),
        ids=ids,
        labels=ids.clone(),
        position_ids=torch.zeros(3, 1, 64),
        cu_seqlens=torch.tensor([0, 64], dtype=torch.int32),
        length=64,
        max_seqlen=64,
        num_pad=0,
        sources=["s"],
        keys=[str(number)],
        sample_tokens=torch.tensor([64]),
        label_tokens=torch.tensor([63]),
        modality_tokens={"text": 64, "video": 0, "audio": 0, "image": 0},
        route=make_route([], 64, 0, 1),
        pixels=pixels,
        sound=sound,
        vision=[VisionPixels(False, 0, (4, 64, 96, 3), (2, 4, 6), (64, 96))],
        audio=[SoundSamples(0, 16000, 0, 100)],
        extra={"marks": torch.arange(64) + number},
    )


def test_features_are_those_of_the_pictures_and_the_sound() -> None:
    batch = make_batch(3)
    found = make_features(batch, ASSETS)
    assert found.patches.shape == (48, 1536) and found.grids == [(2, 4, 6)]
    assert found.mel.shape == (128, 100) and found.mel_lengths == [100]
    corner = batch.pixels.view(4, 64, 96, 3)[:2, :16, :16].permute(3, 0, 1, 2).float() / 255
    assert torch.allclose(found.patches[0], ((corner - 0.5) / 0.5).flatten(), atol=1e-5)
    silent = replace(batch, audio=[], vision=[])
    assert make_features(silent, ASSETS).patches.shape == (0, 1536)
    with pytest.raises(ValueError, match="takes none"):
        make_features(batch, replace(ASSETS, sound=None))


def test_features_in_the_dtype_of_the_model_are_those_rounded_once() -> None:
    wanted = make_features(make_batch(3), ASSETS)
    prefetcher = DevicePrefetcher(iter([make_batch(3)]), Destination(torch.device("cpu"), torch.bfloat16), ASSETS, 1)
    (batch,) = prefetcher
    prefetcher.close()
    found = batch.features
    assert found is not None and found.patches.dtype == found.mel.dtype == torch.bfloat16
    assert torch.equal(found.patches, wanted.patches.bfloat16()) and torch.equal(found.mel, wanted.mel.bfloat16())
    assert (found.grids, found.mel_lengths) == (wanted.grids, wanted.mel_lengths)


def test_raw_media_can_be_kept_instead_of_features() -> None:
    prefetcher = DevicePrefetcher(iter([make_batch(0)]), Destination(torch.device("cpu")), ASSETS, 1, features=False)
    (batch,) = prefetcher
    assert batch.features is None and len(batch.pixels)
    prefetcher.close()


def test_the_thread_works_on_its_own_gpu_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it asks for a batch, as the thread that pins memory takes over the GPU; on GPU 0, where threads begin,
    leaving the stream of another would open a context of half a gigabyte."""
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())

    class Moved:
        def to(self, device: torch.device) -> Moved:
            calls.append(("moved to", device))
            return self

    def source() -> Iterator[Batch]:
        calls.append("asked")
        yield cast(Batch, Moved())

    device, stream = torch.device("cuda:1"), SimpleNamespace(record_event=lambda: None)
    destination = Destination(device, stream=cast(torch.cuda.Stream, stream))
    prefetcher = DevicePrefetcher(source(), destination, ASSETS, 1, features=False)
    assert len(list(prefetcher)) == 1
    prefetcher.close()
    assert calls == [device, "asked", ("moved to", device)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gets_what_a_cpu_gets_while_it_works() -> None:
    """Batches are copied and made on a side stream while the consumer's stream is busy with the ones before."""
    count, device = 12, torch.device("cuda")
    # exact products: the check is of streams and memory, not of how a GPU rounds
    expected = [make_features(make_batch(number), ASSETS) for number in range(count)]

    def source() -> Iterator[Batch]:
        for number in range(count):
            yield make_batch(number).pin_memory()

    prefetcher = DevicePrefetcher(source(), Destination.on(device), ASSETS, depth=2)
    load = torch.randn(4096, 4096, device=device)
    kept = []
    for batch in prefetcher:
        for _ in range(20):
            load = torch.nn.functional.normalize(load @ load)
        features = batch.features
        assert features is not None and features.patches.is_cuda and batch.ids.is_cuda
        assert not batch.label_tokens.is_cuda
        kept.append((batch.ids * 1, features.patches * 1, features.mel * 1, batch.extra["marks"] * 1))
        del batch, features  # their memory may be used again by the side stream at once
    prefetcher.close()
    assert len(kept) == count
    for number, (ids, patches, mel, marks) in enumerate(kept):
        assert (ids == number).all() and torch.equal(marks.cpu(), torch.arange(64) + number)
        assert torch.allclose(patches.cpu(), expected[number].patches, atol=1e-5)
        assert torch.allclose(mel.cpu(), expected[number].mel, atol=1e-3)
