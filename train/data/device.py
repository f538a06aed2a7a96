"""Batches on the device, ahead of the step that trains on them: the copy, and the features that are made there."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from math import prod

import torch

from train.data.batch import Batch, MediaFeatures
from train.data.features import frames_to_patches, log_mel
from train.data.processor import ProcessorAssets

_END = object()
_POLL_S = 0.2  # how soon a waiting thread notices that it is to stop
_CLOSE_S = 1.0  # how long `close` waits for the batch that is being made


def make_features(batch: Batch, assets: ProcessorAssets) -> MediaFeatures:
    """Patches and log-mel of this rank's pieces, on the device where the batch is."""
    patches, mels, lengths = [], [], []
    for found in batch.vision:
        pictures = batch.pixels[found.start : found.start + prod(found.shape)].view(found.shape)
        patches.append(frames_to_patches(pictures, found.size, assets.image if found.is_image else assets.video))
    for part in batch.audio:
        if assets.sound is None:
            raise ValueError("a batch with sound for a model that takes none")
        mel = log_mel(batch.sound[part.start : part.start + part.samples], assets.sound)
        mels.append(mel[:, part.mel_start : part.mel_stop])
        lengths.append(part.mel_stop - part.mel_start)
    spec = assets.video
    width = 3 * spec.temporal_patch * spec.patch_size**2
    empty = batch.pixels.new_zeros(0, dtype=torch.float32)
    return MediaFeatures(
        patches=torch.cat(patches) if patches else empty.view(0, width),
        grids=[found.grid for found in batch.vision],
        mel=torch.cat(mels, 1) if mels else empty.view(assets.sound.num_mel if assets.sound else 0, 0),
        mel_lengths=lengths,
    )


class DevicePrefetcher:
    """Takes batches from an iterator in a thread of its own, and gives them back on the device with their features.

    depth: batches that wait on the device. An error of the source is raised where its batch is asked for. On a GPU the
    work runs on a stream of its own, which the consumer's stream waits for.
    """

    def __init__(
        self, source: Iterator[Batch], device: torch.device, assets: ProcessorAssets, depth: int, features: bool = True
    ) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._source, self._device, self._assets, self._features = source, device, assets, features
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queue: queue.Queue[object] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        item = self._queue.get()
        if item is _END or isinstance(item, BaseException):
            self._queue.put(item)  # for whoever asks again
            if isinstance(item, BaseException):
                raise item
            raise StopIteration
        assert isinstance(item, tuple)
        batch, event = item
        if event is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(event)
            for tensor in _device_tensors(batch):
                tensor.record_stream(current)
        found: Batch = batch
        return found

    def close(self) -> None:
        """Ends the thread; batches that wait are dropped. A batch that takes long is not waited for: the thread then
        ends with it, and the workers with the thread or the process."""
        self._stop.set()
        end = time.monotonic() + _CLOSE_S
        while self._thread.is_alive() and time.monotonic() < end:
            try:
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(_POLL_S)

    def _run(self) -> None:
        try:
            for batch in self._source:
                if self._stop.is_set() or not self._put(self._prepare(batch)):
                    return
            self._put(_END)
        except BaseException as error:  # noqa: BLE001  # raised again in the consumer's thread
            self._put(error)
        finally:
            if isinstance(self._source, Generator):
                self._source.close()  # ends its workers now

    def _put(self, item: object) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=_POLL_S)
                return True
            except queue.Full:
                continue
        return False

    def _prepare(self, batch: Batch) -> tuple[Batch, torch.cuda.Event | None]:
        if self._stream is None:
            return self._on_device(batch), None
        with torch.cuda.stream(self._stream):
            ready = self._on_device(batch)
            return ready, self._stream.record_event()

    def _on_device(self, batch: Batch) -> Batch:
        moved = batch.to(self._device)
        if not self._features:
            return moved
        # the raw media have served; their features are what the model takes
        made = make_features(moved, self._assets)
        return replace(moved, features=made, pixels=moved.pixels[:0].clone(), sound=moved.sound[:0].clone())


def _device_tensors(batch: Batch) -> list[torch.Tensor]:
    tensors = [tensor for tensor in batch.tensors().values() if tensor.is_cuda]
    if batch.features is not None:
        tensors += [batch.features.patches, batch.features.mel]
    return tensors
