"""What all models share: embed -> encode -> merge -> decode, and the loss, computed inside forward.

A model does not know whether it is parallel. `merge`, `reduce_router`, `cross_entropy` and the plain attributes of its
modules (`Attention.attention`, `Experts.compute`) are what parallel code and the loss replace from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from schemas.errors import UnsupportedError
from train.models.inputs import IGNORE, MediaEmbeddings, ModelInputs, ModelOutput, RouterStats
from train.models.moe import load_balancing_loss
from train.models.text import TextModel
from train.ops.label_rows import on_rows
from train.ops.linear_cross_entropy import CrossEntropy
from train.ops.registry import Ops
from train.ops.token_objective import labelled_loss

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Merged = tuple[Tensor, Tensor | None, tuple[Tensor, ...]]


class Hearing(Protocol):
    """An audio tower that is no part of the model (`train.models.frozen_audio`). window_frames: log-mel frames that
    attention spans; tower: the module; nbytes: of its weights in memory."""

    @property
    def window_frames(self) -> int: ...

    @property
    def tower(self) -> nn.Module: ...

    @property
    def nbytes(self) -> int: ...

    def __call__(self, mel: Tensor, lengths: Sequence[int]) -> Tensor: ...


class FoundationModel(nn.Module):
    """A text model with a head, and in subclasses towers.

    merge(hidden, media, inputs) -> (hidden, deepstack rows, deepstack features); reduce_router(counts, prob_sums,
    tokens) -> the same three, summed over whoever shares the auxiliary loss; cross_entropy: the bound op, of its
    signature; widen_head: rows [S, H] -> (rows [S, H'], weight [V, H']) whose product the logits are, in place of the
    head's weight, or None; frozen_audio: what hears for a model without an audio tower of its own, or None.
    """

    def __init__(self, config: PreTrainedConfig, text_config: PreTrainedConfig, ops: Ops, *, tied: bool) -> None:
        super().__init__()
        self.config = config
        self.initializer_range: float = getattr(config, "initializer_range", text_config.initializer_range)
        self.aux_loss_coef: float = getattr(text_config, "router_aux_loss_coef", 0.0)
        # a tied head has no parameter of its own: two names of one would part when a model leaves the meta device
        self.lm_head = None if tied else nn.Linear(text_config.hidden_size, text_config.vocab_size, bias=False)
        self.merge: Callable[[Tensor, MediaEmbeddings, ModelInputs], Merged] = merge_media
        self.reduce_router: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = _unreduced
        self.cross_entropy: Callable[..., CrossEntropy] = ops.linear_cross_entropy
        self.frozen_audio: Hearing | None = None
        self.widen_head: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None

    @property
    def text(self) -> TextModel:
        """The text model, wherever the family has it."""
        raise NotImplementedError

    @property
    def head_weight(self) -> Tensor:
        """[V, H]."""
        return self.text.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def embed(self, inputs: ModelInputs) -> Tensor:
        """[S, H] of the ids."""
        rows: Tensor = self.text.embed_tokens(inputs.ids)
        return rows

    def encode(self, inputs: ModelInputs) -> MediaEmbeddings:
        """What the towers make of this rank's media. UnsupportedError for media that the model has no tower for."""
        if inputs.grids:
            raise UnsupportedError(f"patches of {len(inputs.grids)} pictures for a model without a vision tower")
        return self.hear(inputs, MediaEmbeddings())

    def hear(self, inputs: ModelInputs, found: MediaEmbeddings) -> MediaEmbeddings:
        """Adds what the tower beside the model makes of this rank's sound."""
        if not inputs.mel_lengths or inputs.mel is None:
            return found
        if self.frozen_audio is None:
            raise UnsupportedError(f"log-mel of {len(inputs.mel_lengths)} sounds for a model without an audio tower")
        return replace(found, audio=self.frozen_audio(inputs.mel, inputs.mel_lengths))

    def decode(
        self,
        hidden: Tensor,
        inputs: ModelInputs,
        deepstack_rows: Tensor | None = None,
        deepstack: tuple[Tensor, ...] = (),
    ) -> tuple[Tensor, RouterStats | None]:
        """(rows [S, H] after the last norm, statistics of the routers) of embedded rows."""
        found: tuple[Tensor, RouterStats | None] = self.text(
            hidden, inputs.position_ids, inputs.segments, inputs.num_valid, deepstack_rows, deepstack
        )
        return found

    def forward(self, inputs: ModelInputs, *, logits: bool = False) -> ModelOutput:
        """The loss of labelled inputs; logits [S, V] too when asked for, whole in memory."""
        media = self.encode(inputs)
        hidden, rows, deepstack = self.merge(self.embed(inputs), media, inputs)
        if media.zero is not None:
            hidden = hidden + media.zero.to(hidden.dtype)
        hidden, stats = self.decode(hidden, inputs, rows, deepstack)
        head = (hidden, self.head_weight) if self.widen_head is None else self.widen_head(hidden)
        output = self._losses(*head, inputs, stats)
        return output._replace(logits=F.linear(*head)) if logits else output

    def _losses(self, hidden: Tensor, weight: Tensor, inputs: ModelInputs, stats: RouterStats | None) -> ModelOutput:
        counts = None if stats is None else stats.counts
        if inputs.labels is None:
            return ModelOutput(expert_counts=counts)
        scale = inputs.loss_scale
        if scale is None:
            scale = (inputs.labels != IGNORE).sum().clamp(min=1).float().reciprocal()
        cross_entropy = on_rows(self.cross_entropy, inputs.label_rows)
        found = labelled_loss(cross_entropy, hidden, weight, inputs.labels, scale, inputs.objective)
        output = ModelOutput(found.loss, found.loss, None, found.token_loss, counts, None, found.sums)
        if stats is None:
            return output
        aux = load_balancing_loss(RouterStats(*self.reduce_router(stats.counts, stats.prob_sums, stats.tokens)))
        loss = found.loss + self.aux_loss_coef * inputs.aux_scale * aux
        return output._replace(loss=loss, aux_loss=aux)


def merge_media(hidden: Tensor, media: MediaEmbeddings, inputs: ModelInputs) -> Merged:
    """Puts the embeddings where their placeholders stand; (hidden, rows of vision, deepstack features)."""
    if media.vision is not None:
        hidden = _fill(hidden, media.vision, inputs.vision_rows, "vision")
    if media.audio is not None:
        hidden = _fill(hidden, media.audio, inputs.audio_rows, "audio")
    return hidden, inputs.vision_rows if media.deepstack else None, media.deepstack


def _fill(hidden: Tensor, values: Tensor, rows: Tensor | None, kind: str) -> Tensor:
    count = 0 if rows is None else len(rows)
    if rows is None or count != len(values):
        raise ValueError(f"{kind}_rows names {count} rows for {len(values)} embeddings of the {kind} tower")
    return hidden.index_copy(0, rows, values.to(hidden.dtype))


def _unreduced(counts: Tensor, prob_sums: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return counts, prob_sums, tokens
