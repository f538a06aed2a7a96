"""Full attention in Triton against the eager op in float64, on packed documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from schemas.errors import UnsupportedError
from tests.train.ops.triton_cases import DEVICE, DTYPES, TOLERANCE, assert_same, gpu, kernels_can_run, relative_error
from train.ops.attention import eager
from train.ops.segments import Segments
from train.ops.triton_attention import attention, backward, forward, full_attention
from train.ops.triton_attention_tiles import AttentionTile, parts, tile_map

setup_module = kernels_can_run

LENGTHS = {
    "single rows beside others": [1, 6, 1],
    "shorter than a step": [5, 1, 15],
    "about a tile": [31, 32, 33],
    "about two tiles": [63, 64, 65],
    "short ones before long ones": [3, 80, 16, 47],
}
TILES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bulk copies": {"bulk": True},
    "ends as other steps": {"k": 0},
    "bulk copies, ends as other steps": {"bulk": True, "k": 0},
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def check(lengths: list[int], heads: int, size: int, dtype: torch.dtype, scale: float | None = None) -> None:
    segments = Segments.from_lengths(lengths, DEVICE)
    assert_same(
        lambda q, k, v: full_attention(q, k, v, segments, scale),
        lambda q, k, v: eager(q, k, v, segments, causal=False, scale=scale),
        [draw(sum(lengths), heads, size, seed=seed) for seed in range(3)],
        dtype,
    )


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_values_and_gradients(lengths: list[int]) -> None:
    check(lengths, 2, 72, torch.float32)


@pytest.mark.parametrize("size", [8, 16, 20, 64, 80, 100, 128])
def test_head_sizes(size: int) -> None:
    check([5, 37], 1, size, torch.float32)


@pytest.mark.parametrize("size", [64, 72])
def test_half_precision(size: int) -> None:
    check([5, 37], 2, size, torch.bfloat16)


@pytest.mark.parametrize("options", TILES.values(), ids=TILES)
def test_a_temporal_grid_and_a_scale_with_tiles_of_real_size(options: dict[str, Any]) -> None:
    segments = Segments.from_lengths([540], DEVICE)
    q, k, v, dout = (draw(540, 1, 72, seed=seed).to(DEVICE) for seed in range(4))
    tile = AttentionTile(**{"m": 128, "n": 64, "k": 32, "warps": 4, "stages": 1} | options)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected = eager(*exact, segments, causal=False, scale=0.31)
    expected.backward(dout.double())
    out, lse = forward(q, k, v, segments, 0.31, tile)
    found = backward(dout, q, k, v, out, lse, segments, 0.31, (tile, tile))
    assert relative_error(out, expected) < TOLERANCE[torch.float32]
    assert all(relative_error(a, b.grad) < TOLERANCE[torch.float32] for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize(
    ("lengths", "heads", "size"),
    [
        gpu([540] * 8, 16, 72),
        gpu([64, 1500, 256, 777, 1, 128], 16, 72),
        gpu([104] * 13, 20, 64),
        gpu([300, 77], 4, 128),
        gpu([300, 77], 4, 80),
        gpu([300, 77], 4, 16),
        gpu([300, 77], 4, 112),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_sizes(lengths: list[int], heads: int, size: int, dtype: torch.dtype) -> None:
    check(lengths, heads, size, dtype)


def test_views_of_one_projection() -> None:
    segments = Segments.from_lengths([7, 50], DEVICE)
    assert_same(
        lambda x: attention(*x.unbind(1), segments, causal=False),
        lambda x: eager(*x.unbind(1), segments, causal=False),
        [draw(57, 3, 3, 24)],
        torch.float32,
    )
    assert_same(  # heads before rows, and columns that do not lie together
        lambda x, y: full_attention(x.transpose(0, 1), y.transpose(1, 2), y.transpose(1, 2), segments),
        lambda x, y: eager(x.transpose(0, 1), y.transpose(1, 2), y.transpose(1, 2), segments, causal=False),
        [draw(2, 57, 24), draw(57, 24, 2)],
        torch.float32,
    )


def test_a_gradient_that_is_a_view() -> None:
    segments = Segments.from_lengths([7, 50], DEVICE)
    q, k, v, wide = (draw(57, 2, size, seed=size).to(DEVICE) for size in (24, 24, 24, 48))
    out, lse = forward(q, k, v, segments)
    dout = wide[..., 24:]
    found = backward(dout, q, k, v, out, lse, segments)
    assert all(torch.equal(a, b) for a, b in zip(
        found, backward(dout.contiguous(), q, k, v, out, lse, segments), strict=True))  # fmt: skip


def test_the_logarithms_of_the_sums() -> None:
    segments = Segments.from_lengths([3, 40], DEVICE)
    q, k, v = (draw(43, 2, 72, seed=seed).to(DEVICE) for seed in range(3))
    _, lse = forward(q, k, v, segments)
    scores = torch.einsum("thd,shd->hts", q.double(), k.double()) * 72**-0.5
    other = segments.ids[:, None] != segments.ids[None, :]
    assert relative_error(lse, scores.masked_fill(other, float("-inf")).logsumexp(-1)) < TOLERANCE[torch.float32]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of rows that are not stored
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_large_scores(sign: float) -> None:
    """exp of the scores themselves, and of minus them, is beyond float32."""
    segments = Segments.from_lengths([37, 1], DEVICE)
    q = (draw(38, 1, 24).abs() * 30).to(DEVICE)
    k = (sign * draw(38, 1, 24, seed=1).abs() * 30).to(DEVICE)
    v, dout = (draw(38, 1, 24, seed=seed).to(DEVICE) for seed in (2, 3))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected = eager(*exact, segments, causal=False)
    expected.backward(dout.double())
    out, lse = forward(q, k, v, segments)
    found = backward(dout, q, k, v, out, lse, segments)
    assert relative_error(out, expected) < 1e-3
    assert all(relative_error(a, b.grad) < 1e-3 for a, b in zip(found, exact, strict=True))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of rows that are not stored
def test_documents_do_not_meet() -> None:
    lengths = [19, 33, 8]
    q, k, v, dout = (draw(60, 2, 72, seed=seed).to(DEVICE) for seed in range(4))
    q[:19], v[52:], dout[:19] = float("nan"), float("inf"), float("nan")
    segments = Segments.from_lengths(lengths, DEVICE)
    out, lse = forward(q, k, v, segments)
    found = (out, *backward(dout, q, k, v, out, lse, segments))
    alone = Segments.from_lengths([33], DEVICE)
    parts_of = [x[19:52] for x in (q, k, v)]
    out, lse = forward(*parts_of, alone)
    expected = (out, *backward(dout[19:52], *parts_of, out, lse, alone))
    assert all(torch.equal(a[19:52], b) for a, b in zip(found, expected, strict=True))


def test_same_bits_twice_and_no_memory_left_unwritten() -> None:
    dtype = torch.bfloat16
    segments = Segments.from_lengths([33, 70, 1], DEVICE)
    q, k, v, dout = (draw(104, 2, 72, seed=seed).to(DEVICE, dtype) for seed in range(4))

    def run() -> tuple[Tensor, ...]:
        out, lse = forward(q, k, v, segments)
        return (out, lse, *backward(dout, q, k, v, out, lse, segments))

    first = run()
    assert all(x.isfinite().all() for x in first)
    assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_no_rows() -> None:
    q, k, v = (torch.empty(0, 2, 72, device=DEVICE, requires_grad=True) for _ in range(3))
    out = attention(q, k, v, Segments.from_lengths([], DEVICE), causal=False)
    out.sum().backward()
    assert out.shape == (0, 2, 72)
    assert q.grad is not None and q.grad.shape == (0, 2, 72)


def test_a_tile_covers_every_row_once_and_long_documents_come_first() -> None:
    lengths = [5, 300, 64, 1, 129, 130, 40, 128]
    segments = Segments.from_lengths(lengths, DEVICE)
    tiles = tile_map(segments, 64)
    covered = torch.zeros(sum(lengths), dtype=torch.int64)
    for start, length, row in tiles.tolist():
        assert 0 <= row < length
        covered[start + row : start + min(row + 64, length)] += 1
    assert covered.eq(1).all()
    assert tiles[:, 1].tolist() == sorted(tiles[:, 1].tolist(), reverse=True)
    assert tile_map(segments, 64) is tiles  # made once per batch


@pytest.mark.parametrize(
    ("size", "expected"),
    [(8, (16, 0)), (16, (16, 0)), (24, (32, 0)), (40, (32, 16)), (64, (64, 0)), (72, (64, 16)), (80, (64, 16)),
     (96, (64, 32)), (112, (128, 0)), (128, (128, 0))],
)  # fmt: skip
def test_parts_of_a_head(size: int, expected: tuple[int, int]) -> None:
    assert parts(size) == expected


def test_what_the_kernels_do_not_take() -> None:
    segments = Segments.from_lengths([4], DEVICE)
    q = draw(4, 4, 16).to(DEVICE)
    with pytest.raises(UnsupportedError, match="heads of one number and size"):
        full_attention(q, q[:, :2], q[:, :2], segments)
    with pytest.raises(UnsupportedError, match="a positive scale"):
        full_attention(q, q, q, segments, scale=-1.0)
    with pytest.raises(UnsupportedError, match="softcap"):
        attention(q, q, q, segments, causal=False, softcap=3.0)
    with pytest.raises(UnsupportedError, match="without a causal mask"):
        attention(q, q, q, segments, causal=False, window=2)
    with pytest.raises(ValueError, match="rows and the segments"):
        attention(q[:3], q, q, segments, causal=False)
