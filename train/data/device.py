"""Batches on the device, ahead of the step that trains on them: the copy, and the features that are made there."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch

from train.data.batch import Batch, MediaFeatures
from train.data.features import frames_to_patches, log_mel
from train.data.processor import ProcessorAssets

_END = object()
_POLL_S = 0.2  # how soon a waiting thread notices that it is to stop
_CLOSE_S = 1.0  # how long `close` waits for the batch that is being made


@dataclass(frozen=True, eq=False)
class Destination:
    """Where batches go. dtype: of their features, that of the model spares it a cast and half the memory; stream: that
    copies and features are made on, None on a CPU. Those who take turns share one, as memory that a stream has freed is
    for that stream alone."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    stream: torch.cuda.Stream | None = None

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype = torch.float32) -> Destination:
        """With a stream of its own on a GPU."""
        if device.type != "cuda":
            return cls(device, dtype)
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return cls(device, dtype, torch.cuda.Stream(device))


def make_features(batch: Batch, assets: ProcessorAssets, dtype: torch.dtype = torch.float32) -> MediaFeatures:
    """Patches and log-mel of this rank's pieces, on the device where the batch is. Each piece is made in float32."""
    spec, sound = assets.video, assets.sound
    if batch.audio and sound is None:
        raise ValueError("a batch with sound for a model that takes none")
    grids, lengths = [found.grid for found in batch.vision], [part.mel_stop - part.mel_start for part in batch.audio]
    width = 3 * spec.temporal_patch * spec.patch_size**2
    patches = batch.pixels.new_empty(sum(prod(grid) for grid in grids), width, dtype=dtype)
    mel = batch.sound.new_empty(sound.num_mel if sound else 0, sum(lengths), dtype=dtype)
    for found, rows in zip(batch.vision, patches.split([prod(grid) for grid in grids]), strict=True):
        pictures = batch.pixels[found.start : found.start + prod(found.shape)].view(found.shape)
        rows.copy_(frames_to_patches(pictures, found.size, assets.image if found.is_image else spec))
    for part, columns in zip(batch.audio, mel.split(lengths, 1), strict=True):
        assert sound is not None
        whole = log_mel(batch.sound[part.start : part.start + part.samples], sound)
        columns.copy_(whole[:, part.mel_start : part.mel_stop])
    return MediaFeatures(patches=patches, grids=grids, mel=mel, mel_lengths=lengths)


class DevicePrefetcher:
    """Takes batches from an iterator in a thread of its own, and gives them back on the device with their features.

    depth: batches that wait on the device. An error of the source is raised where its batch is asked for. On a GPU the
    work runs on the stream of the destination, which the consumer's stream waits for.
    """

    def __init__(
        self, source: Iterator[Batch], to: Destination, assets: ProcessorAssets, depth: int, features: bool = True
    ) -> None:
        self._source, self._to, self._assets, self._features = source, to, assets, features
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
            current = torch.cuda.current_stream(self._to.device)
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
            if self._to.stream is not None:
                # a thread begins on GPU 0, and leaving another's stream would open a context there
                torch.cuda.set_device(self._to.device)
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
        if self._to.stream is None:
            return self._on_device(batch), None
        with torch.cuda.stream(self._to.stream):
            ready = self._on_device(batch)
            return ready, self._to.stream.record_event()

    def _on_device(self, batch: Batch) -> Batch:
        moved = batch.to(self._to.device)
        if not self._features:
            return moved
        # the raw media have served; their features are what the model takes
        made = make_features(moved, self._assets, self._to.dtype)
        return replace(moved, features=made, pixels=moved.pixels[:0].clone(), sound=moved.sound[:0].clone())


def _device_tensors(batch: Batch) -> list[torch.Tensor]:
    tensors = [tensor for tensor in batch.tensors().values() if tensor.is_cuda]
    if batch.features is not None:
        tensors += [batch.features.patches, batch.features.mel]
    return tensors
