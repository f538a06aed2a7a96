"""Puts what the towers of a sequence-parallel group made where the tokens are: each rank encodes its own pieces, and
the rows travel to the slices that they belong to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from train.models.foundation import FoundationModel, Hearing, Merged
from train.models.inputs import MediaEmbeddings, ModelInputs, RowExchange
from train.models.spec import spec_of
from train.models.vision import VisionTower
from train.parallel.exchange import exchange_rows


class SequenceMerge:
    """For `FoundationModel.merge`: one all-to-all for pictures, deepstack features included, and one for sound. Every
    rank takes part, whatever it encodes or receives; None for a tower that the model lacks."""

    def __init__(self, group: ProcessGroup, vision: VisionTower | None, audio: nn.Module | Hearing | None) -> None:
        self.group, self.vision, self.audio = group, vision, audio

    def __call__(self, hidden: Tensor, media: MediaEmbeddings, inputs: ModelInputs) -> Merged:
        """(hidden, rows of vision, deepstack features), of this rank's slice."""
        rows: Tensor | None = None
        deepstack: tuple[Tensor, ...] = ()
        if self.vision is not None:
            exchange = _required(inputs.vision_exchange, "vision")
            made: tuple[Tensor, ...] = () if media.vision is None else (media.vision, *media.deepstack)
            levels = 1 + len(self.vision.deepstack_indexes)
            received = self._bring(made, levels, hidden, exchange, self.vision)
            rows, deepstack = exchange.recv_rows, received[1:]
            hidden = hidden.index_copy(0, rows, received[0])
        if self.audio is not None:
            exchange = _required(inputs.audio_exchange, "audio")
            made = () if media.audio is None else (media.audio,)
            received = self._bring(made, 1, hidden, exchange, self.audio)
            hidden = hidden.index_copy(0, exchange.recv_rows, received[0])
        return hidden, rows if deepstack else None, deepstack

    def _bring(
        self, made: Sequence[Tensor], parts: int, hidden: Tensor, exchange: RowExchange, tower: nn.Module | Hearing
    ) -> tuple[Tensor, ...]:
        """[received, H] for each part of `made`, [sent, H] each; `made` is empty on a rank that encodes nothing."""
        width = hidden.shape[1]
        rows = torch.cat(list(made), 1).to(hidden.dtype) if made else hidden.new_zeros(0, parts * width)
        if exchange.send_index is not None:
            rows = rows[exchange.send_index]
        if torch.is_grad_enabled() and not rows.requires_grad and _is_trained(tower):
            rows.requires_grad_()  # the others' gradients travel back; all must take part
        received = exchange_rows(rows, exchange.send_counts, exchange.recv_counts, self.group)
        return tuple(received.split(width, 1))


def apply_merge(model: FoundationModel, group: ProcessGroup) -> None:
    """Replaces the merge of a model that has towers."""
    names = spec_of(model).names
    vision = None if names.visual is None else model.get_submodule(names.visual.rstrip("."))
    assert vision is None or isinstance(vision, VisionTower)
    audio = model.frozen_audio if names.audio is None else model.get_submodule(names.audio.rstrip("."))
    if vision is not None or audio is not None:
        model.merge = SequenceMerge(group, vision, audio)


def _required(exchange: RowExchange | None, kind: str) -> RowExchange:
    if exchange is None:
        raise ValueError(f"inputs without {kind}_exchange; batches of sequence parallelism are collated with sp_size")
    return exchange


def _is_trained(tower: nn.Module | Hearing) -> bool:
    return isinstance(tower, nn.Module) and any(parameter.requires_grad for parameter in tower.parameters())
