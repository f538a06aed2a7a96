"""What goes into a model and what comes out: one packed micro-batch, T rows of which this rank holds S (S = T without
sequence parallelism)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from train.ops.segments import Segments
from train.ops.token_objective import TokenObjective

IGNORE = -100  # label of a row without loss
Grid = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class RowExchange:
    """One rank's part in bringing one tower's embeddings to the ranks that own their tokens.

    send_index: int64 [sent], which of this rank's embeddings to send, ordered by destination, None = all in order;
    send_counts, recv_counts: rows to and from each rank; recv_rows: int64 [received], rows of this slice that those
    which come fill.
    """

    send_index: Tensor | None
    send_counts: Sequence[int]
    recv_counts: Sequence[int]
    recv_rows: Tensor


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """One packed micro-batch on the compute device.

    ids: int64 [S]; position_ids: [3, S] (time, height, width), float32 or int64, from 0 on in each document; segments:
    documents of the FULL sequence, the pad tail one of them; labels: int64 [S], shifted inside each document (the label
    of a row is the next token), -100 = none; label_rows: int64 [n], rows that have one, where their number is known to
    the host; None: the head looks at all rows; loss_scale: float32 scalar tensor on the device that the summed
    cross-entropy is multiplied by, e.g. 1 / label tokens of the global step; None: 1 / label tokens of these rows;
    objective: a function of the log-probabilities whose sum takes the place of the summed cross-entropy, or None;
    aux_scale: factor of the router's auxiliary loss inside `ModelOutput.loss`; num_valid: rows of this slice before the
    pad tail;

    patches: [P, channels * temporal_patch * patch_size ** 2], rows of one merged patch following one another; grids:
    (t, h, w) in patches of each vision piece, adding up to P; mel: [num_mel, M], log-mel frames; mel_lengths: frames of
    each audio piece, adding up to M; a piece starts where a window of the audio tower starts;
    vision_rows, audio_rows: int64 [n], rows that the towers' outputs fill, in the order of these outputs; under
    sequence parallelism None, and vision_exchange, audio_exchange say where the outputs go; `merge`, which sequence
    parallelism replaces, alone reads them;
    dummy_vision, dummy_audio: run that tower on a unit of zeros when there is nothing for it, and add 0 x its result,
    so that every rank takes part in its collectives and each of its parameters gets a gradient.
    """

    ids: Tensor
    position_ids: Tensor
    segments: Segments
    num_valid: int
    labels: Tensor | None = None
    label_rows: Tensor | None = None
    loss_scale: Tensor | None = None
    objective: TokenObjective | None = None
    aux_scale: float | Tensor = 1.0
    patches: Tensor | None = None
    grids: Sequence[Grid] = ()
    mel: Tensor | None = None
    mel_lengths: Sequence[int] = ()
    vision_rows: Tensor | None = None
    audio_rows: Tensor | None = None
    vision_exchange: RowExchange | None = None
    audio_exchange: RowExchange | None = None
    dummy_vision: bool = False
    dummy_audio: bool = False


@dataclass(frozen=True, eq=False)
class MediaEmbeddings:
    """What the towers made of this rank's media.

    vision: [n, H] of the merged patches; deepstack: per level [n, H]; audio: [m, H]; None where there is nothing;
    zero: scalar 0 that carries the gradients of towers which ran on a dummy unit, added to the hidden rows after the
    merge.
    """

    vision: Tensor | None = None
    deepstack: tuple[Tensor, ...] = ()
    audio: Tensor | None = None
    zero: Tensor | None = None


@dataclass(frozen=True, eq=False)
class RouterStats:
    """Sums over this rank's valid rows, one row per MoE layer.

    counts: float32 [layers, E], how often each expert was chosen; prob_sums: float32 [layers, E], sums of the router's
    probabilities, with gradient; tokens: float32 scalar, valid rows.
    """

    counts: Tensor
    prob_sums: Tensor
    tokens: Tensor


class ModelOutput(NamedTuple):
    """loss: ce_loss + router_aux_loss_coef * aux_scale * aux_loss, with gradient; token_loss: float32 [S], of each row,
    unscaled, 0 where there is no label; all None without labels; aux_loss: None without experts; expert_counts: float32
    [MoE layers, E], choices of this rank's valid rows; logits: [S, V], only when asked for; objective_sums: float32
    [K], of an objective, whose losses then ce_loss and token_loss are.

    A tuple, because wrappers such as FSDP look for the tensors of a result in containers that they know.
    """

    loss: Tensor | None = None
    ce_loss: Tensor | None = None
    aux_loss: Tensor | None = None
    token_loss: Tensor | None = None
    expert_counts: Tensor | None = None
    logits: Tensor | None = None
    objective_sums: Tensor | None = None


def text_inputs(
    documents: Sequence[Tensor], labels: Sequence[Tensor] | None = None, device: torch.device | str = "cpu"
) -> ModelInputs:
    """Documents of text (int64 [L] each) packed into one sequence. labels: not shifted, -100 where a token is not
    trained; None: no loss."""
    lengths = [len(document) for document in documents]
    positions = torch.cat([torch.arange(length) for length in lengths])
    shifted = None
    if labels is not None:
        ends = torch.full((1,), IGNORE)
        shifted = torch.cat([torch.cat([document[1:].cpu(), ends]) for document in labels]).to(device)
    return ModelInputs(
        ids=torch.cat([document.cpu() for document in documents]).to(device),
        position_ids=positions.expand(3, -1).to(device),
        segments=Segments.from_lengths(lengths, torch.device(device)),
        num_valid=sum(lengths),
        labels=shifted,
    )
