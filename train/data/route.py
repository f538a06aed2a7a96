"""Which sequence-parallel rank encodes which media, and how the embeddings reach the rank that owns their tokens.

The vision tower attends within one temporal grid and the sound tower within one window of log-mel frames, so media are
cut there. The pieces of a micro-batch, in the order of their tokens, are dealt to the ranks in runs of equal cost, for
each tower apart; every rank knows all rows and computes the same deal. Embeddings then travel in one all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from schemas.geometry import MEL_WINDOW, TOKENS_PER_WINDOW
from train.data.sample import MediaUnit, TrainSample

Tower = Literal["vision", "audio"]


@dataclass(frozen=True)
class RouteSpec:
    """Where media may be cut and what they cost, in patches. sound_window: log-mel frames that the sound tower attends
    within, a multiple of 100; vision_attention_len: patches of a grid whose attention costs as much as all the rest;
    sound_token_cost: of one token of sound."""

    sound_window: int = 800
    vision_attention_len: int = 6600
    sound_token_cost: float = 1.6

    def __post_init__(self) -> None:
        if self.sound_window < MEL_WINDOW or self.sound_window % MEL_WINDOW:
            raise ValueError(f"sound_window {self.sound_window} is no multiple of {MEL_WINDOW} log-mel frames")


@dataclass(frozen=True)
class MediaPiece:
    """What one rank encodes of one unit.

    sample: number in the micro-batch; unit: index in its `media`; start, stop: temporal grids of a video, 0 and 1 of
    an image, log-mel frames of a sound; rows: int64 [n], rows of the full packed sequence that it fills, in the order
    of the encoder's output.
    """

    tower: Tower
    sample: int
    unit: int
    start: int
    stop: int
    rows: np.ndarray


@dataclass(frozen=True)
class RowExchange:
    """One rank's part of the all-to-all of one tower's embeddings.

    send_index: int64 [sent], which of this rank's embeddings to send, ordered by destination; send_counts, recv_counts:
    [sp] rows to and from each rank; recv_rows: int64 [received], rows of this rank's slice of the sequence that the
    received embeddings fill.
    """

    send_index: np.ndarray
    send_counts: list[int]
    recv_counts: list[int]
    recv_rows: np.ndarray


@dataclass(frozen=True)
class MediaRoute:
    """vision, audio: of the towers' embeddings (deepstack features go the way of vision); pieces: what this rank
    encodes, each tower's in the order of its embeddings."""

    sp_rank: int
    sp_size: int
    vision: RowExchange
    audio: RowExchange
    pieces: list[MediaPiece]


def make_route(
    samples: Sequence[TrainSample], length: int, sp_rank: int, sp_size: int, spec: RouteSpec | None = None
) -> MediaRoute:
    """The route of one micro-batch. length: tokens of the padded sequence, a multiple of sp_size."""
    spec = spec or RouteSpec()
    atoms = _atoms(samples, spec)
    pieces: list[MediaPiece] = []
    exchanges = {}
    for tower in ("vision", "audio"):
        mine = [atom for atom in atoms if atom.piece.tower == tower]
        ranks = _deal(np.array([atom.cost for atom in mine]), sp_size)
        pieces += _joined([atom.piece for atom, rank in zip(mine, ranks, strict=True) if rank == sp_rank])
        rows = np.concatenate([*(atom.piece.rows for atom in mine), np.zeros(0, np.int64)])
        encoders = np.repeat(ranks, [len(atom.piece.rows) for atom in mine])
        exchanges[tower] = _exchange(rows, encoders, length // sp_size, sp_rank, sp_size)
    return MediaRoute(sp_rank, sp_size, exchanges["vision"], exchanges["audio"], pieces)


@dataclass(frozen=True)
class _Atom:
    """A piece that cannot be cut further."""

    piece: MediaPiece
    cost: float


def _atoms(samples: Sequence[TrainSample], spec: RouteSpec) -> list[_Atom]:
    atoms: list[_Atom] = []
    first = 0
    for number, sample in enumerate(samples):
        for index, unit in enumerate(sample.media):
            atoms += _sound_atoms(number, index, unit, first, spec) if unit.kind == "audio" else []
            atoms += _grid_atoms(number, index, unit, first, spec) if unit.kind != "audio" else []
        first += len(sample)
    return atoms


def _grid_atoms(sample: int, index: int, unit: MediaUnit, first: int, spec: RouteSpec) -> list[_Atom]:
    if unit.grid is None:
        raise ValueError(f"{unit.kind} {unit.index} has no grid")
    grids, height, width = unit.grid
    patches = height * width
    cost = patches * (1 + patches / spec.vision_attention_len)
    rows = (first + unit.rows).reshape(grids, -1)
    return [_Atom(MediaPiece("vision", sample, index, t, t + 1, rows[t]), cost) for t in range(grids)]


def _sound_atoms(sample: int, index: int, unit: MediaUnit, first: int, spec: RouteSpec) -> list[_Atom]:
    per_window = spec.sound_window // MEL_WINDOW * TOKENS_PER_WINDOW
    rows = first + unit.rows
    atoms = []
    for number, start in enumerate(range(0, unit.num_mel, spec.sound_window)):
        part = rows[number * per_window : (number + 1) * per_window]
        stop = min(start + spec.sound_window, unit.num_mel)
        atoms.append(_Atom(MediaPiece("audio", sample, index, start, stop, part), len(part) * spec.sound_token_cost))
    return atoms


def _deal(costs: np.ndarray, ranks: int) -> np.ndarray:
    """int64: the rank of each atom, not falling: each goes where its middle lies among equal shares of the cost."""
    if not len(costs):
        return np.zeros(0, np.int64)
    ends = np.cumsum(costs)
    return np.minimum(((ends - costs / 2) * ranks / ends[-1]).astype(np.int64), ranks - 1)


def _joined(pieces: list[MediaPiece]) -> list[MediaPiece]:
    """Neighbouring pieces of one unit as one."""
    runs: list[list[MediaPiece]] = []
    for piece in pieces:
        last = runs[-1][-1] if runs else None
        if last is not None and (last.sample, last.unit, last.stop) == (piece.sample, piece.unit, piece.start):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [replace(run[0], stop=run[-1].stop, rows=np.concatenate([piece.rows for piece in run])) for run in runs]


def _exchange(rows: np.ndarray, encoders: np.ndarray, slice_len: int, sp_rank: int, sp_size: int) -> RowExchange:
    """rows: all rows of a tower, in the order of the encoders' outputs, encoder after encoder."""
    owners = rows // slice_len
    sent_to = owners[encoders == sp_rank]
    received = owners == sp_rank
    return RowExchange(
        send_index=np.argsort(sent_to, kind="stable"),
        send_counts=np.bincount(sent_to, minlength=sp_size).tolist(),
        recv_counts=np.bincount(encoders[received], minlength=sp_size).tolist(),
        recv_rows=rows[received] - sp_rank * slice_len,
    )
