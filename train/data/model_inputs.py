"""A batch on the device -> what a model takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from train.data import route
from train.data.batch import Batch
from train.data.device import make_features
from train.data.processor import ProcessorAssets
from train.models.inputs import ModelInputs, RowExchange
from train.ops.segments import Segments
from train.ops.token_objective import TokenObjective


def model_inputs(
    batch: Batch,
    assets: ProcessorAssets | None = None,
    *,
    loss_scale: Tensor | None = None,
    objective: TokenObjective | None = None,
    aux_scale: float | Tensor = 1.0,
    dummy_towers: bool = False,
) -> ModelInputs:
    """The inputs of one micro-batch, on the device where the batch is; nothing waits for the device.

    assets: makes the features of a batch that has none yet; loss_scale, objective, aux_scale: see `ModelInputs`;
    dummy_towers: the towers of the model run on a dummy unit where this rank has no media.
    """
    features = batch.features
    if features is None:
        if assets is None:
            raise ValueError("a batch without features, and no assets to make them")
        features = make_features(batch, assets)
    rows = batch.ids.shape[1]
    return ModelInputs(
        ids=batch.ids[0],
        position_ids=batch.position_ids[:, 0],
        segments=batch_segments(batch),
        num_valid=min(max(batch.length - batch.num_pad - batch.route.sp_rank * rows, 0), rows),
        labels=batch.labels[0],
        label_rows=batch.label_rows,
        loss_scale=loss_scale,
        objective=objective,
        aux_scale=aux_scale,
        patches=features.patches,
        grids=features.grids,
        mel=features.mel,
        mel_lengths=features.mel_lengths,
        dummy_vision=dummy_towers and not features.grids,
        dummy_audio=dummy_towers and not features.mel_lengths,
        **_destinations(batch),
    )


def batch_segments(batch: Batch) -> Segments:
    """The samples of the full sequence and the pad tail, without asking the device."""
    lengths = (*batch.sample_tokens.tolist(), batch.num_pad)
    kept = tuple(length for length in lengths if length)
    if len(kept) + 1 != len(batch.cu_seqlens):  # a sample without a token
        return Segments.from_lengths(kept, batch.cu_seqlens.device)
    return Segments(batch.cu_seqlens, kept, batch.max_seqlen)


def _destinations(batch: Batch) -> dict[str, Any]:
    """Where the towers' outputs go: rows of this rank, or an exchange under sequence parallelism."""
    vision, audio = batch.route.vision, batch.route.audio
    if batch.route.sp_size == 1:
        return {
            "vision_rows": _to_device(batch, vision.recv_rows),
            "audio_rows": _to_device(batch, audio.recv_rows),
        }
    return {"vision_exchange": _exchange(batch, vision), "audio_exchange": _exchange(batch, audio)}


def _exchange(batch: Batch, planned: route.RowExchange) -> RowExchange:
    in_order = np.array_equal(planned.send_index, np.arange(len(planned.send_index)))
    return RowExchange(
        send_index=None if in_order else _to_device(batch, planned.send_index),
        send_counts=planned.send_counts,
        recv_counts=planned.recv_counts,
        recv_rows=_to_device(batch, planned.recv_rows),
    )


def _to_device(batch: Batch, rows: np.ndarray) -> Tensor:
    found = torch.from_numpy(rows)
    if batch.ids.is_cuda:
        found = found.pin_memory()  # a copy from pageable memory would wait for the device
    return found.to(batch.ids.device, non_blocking=True)
