"""Every attention backend against float64, document by document."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from schemas.errors import ConfigError, UnsupportedError
from tests.train.ops import float64
from train.ops.attention import sdpa
from train.ops.attention_cudnn import LONG, by_length, padded_length
from train.ops.attention_flex import BLOCK, block_mask
from train.ops.attention_varlen import varlen_options
from train.ops.device import describe_device
from train.ops.registry import OPS
from train.ops.segments import Segments

LENGTHS = {
    "one row": [1],
    "one document": [17],
    "single rows between": [1, 5, 1, 1, 9, 3],
    "equal neighbours": [4, 4, 4, 7, 7, 2],
    "over block borders": [100, 60, 128, 1, 97, 128],
}
LONG_AND_SHORT = [7, 2300, 40, 1, 2048, 2048, 300, 3001]


def inputs(rows: int, heads: int, kv_heads: int, size: int, value_size: int | None = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + heads)
    shapes = {"q": (rows, heads, size), "k": (rows, kv_heads, size), "v": (rows, kv_heads, value_size or size)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def check(name: str, lengths: list[int], causal: bool, tensors: dict[str, torch.Tensor], **options: Any) -> None:
    chosen = {key: options.pop(key) for key in ("scale", "window", "softcap") if key in options}
    device = options.get("device", "cpu")
    function = OPS["attention"].backends[name].load()
    segments = Segments.from_lengths(lengths, device)
    float64.compare(
        lambda q, k, v: function(q, k, v, segments, causal=causal, **chosen),
        lambda q, k, v: float64.attention(q, k, v, lengths, causal, **chosen),
        tensors,
        **options,
    )


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_values_and_gradients(name: str, lengths: list[int], heads: tuple[int, int], causal: bool) -> None:
    check(name, lengths, causal, inputs(sum(lengths), *heads, size=8))


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_scale_value_size_dtypes_and_no_rows(name: str) -> None:
    check(name, [3, 4], True, inputs(7, 2, 1, 8), scale=0.3)
    check(name, [3, 4], False, inputs(7, 2, 1, 8, value_size=5))
    check(name, [3, 4], True, inputs(7, 2, 1, 8), dtype=torch.float64)
    check(name, [3, 4], True, inputs(7, 4, 2, 8), dtype=torch.bfloat16)
    check(name, [], True, inputs(0, 2, 1, 8))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_flex_attention_has_the_values_on_a_cpu_too(lengths: list[int], causal: bool) -> None:
    check("flex_attention", lengths, causal, inputs(sum(lengths), 4, 2, 16), gradients=False)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("window", [None, 100, 129])
@pytest.mark.parametrize("lengths", [*LENGTHS.values(), [128, 256, 384], [700], [1] * 300], ids=str)
def test_blocks_of_the_document_mask(lengths: list[int], window: int | None, causal: bool) -> None:
    causal = causal or window is not None
    segments = Segments.from_lengths(lengths)
    mask = block_mask(segments, causal, window)
    assert block_mask(segments, causal, window) is mask
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    allowed = number[:, None] == number[None, :]
    if causal:
        allowed = allowed.tril()
    if window is not None:
        allowed = allowed.triu(1 - window)
    size = -(-len(number) // BLOCK)
    padded = torch.zeros(size * BLOCK, size * BLOCK, dtype=torch.bool)
    padded[: len(number), : len(number)] = allowed
    tiles = padded.unflatten(0, (size, BLOCK)).unflatten(2, (size, BLOCK)).transpose(1, 2)
    for counts, columns, wanted in (
        (mask.kv_num_blocks, mask.kv_indices, tiles.any(-1).any(-1) & ~tiles.all(-1).all(-1)),
        (mask.full_kv_num_blocks, mask.full_kv_indices, tiles.all(-1).all(-1)),
    ):
        assert counts is not None and columns is not None
        for row in range(size):
            listed = columns[0, 0, row, : int(counts[0, 0, row])].tolist()
            assert listed == wanted[row].nonzero()[:, 0].tolist()


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_sliding_windows_and_capped_scores(window: int) -> None:
    tensors = inputs(20, 4, 2, 8)
    check("eager", [7, 1, 12], True, tensors, window=window, softcap=2.0)
    check("sdpa", [7, 1, 12], True, tensors, window=window)
    check("flex_attention", [7, 1, 12], True, tensors, window=window, softcap=2.0, gradients=False)


@pytest.mark.parametrize("name", ["sdpa", "cudnn", "torch_varlen"])
def test_what_a_backend_lacks_is_an_error(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"attn_implementation {name} has no .*softcap"):
        check(name, [3], True, inputs(3, 2, 2, 8), softcap=2.0)
    with pytest.raises(UnsupportedError, match="window"):
        check(name, [3], False, inputs(3, 2, 2, 8), window=2)


@pytest.mark.parametrize(
    "lengths",
    [[2300], [5, 2048, 7, 1], [2048, 2048, 3000], [9, 2304, 2304, 40, 41, 2049, 8], [3, 4], [2047, 2049]],
    ids=str,
)
def test_long_and_short_documents_apart(lengths: list[int]) -> None:
    seen: dict[str, list[tuple[int, ...]]] = {"long": [], "short": []}

    def long(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen["long"].append((q.shape[0], q.shape[2]))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def short(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Segments) -> torch.Tensor:
        seen["short"].append(documents.lengths)
        return sdpa(q, k, v, documents, causal=True)

    segments = Segments.from_lengths(lengths)
    float64.compare(
        lambda q, k, v: by_length(q, k, v, segments, long, short),
        lambda q, k, v: float64.attention(q, k, v, lengths, True),
        inputs(sum(lengths), 2, 1, 8),
    )
    wanted = [length for length in lengths if length < LONG]
    assert seen["short"] == ([tuple(wanted)] if wanted else [])
    assert all(n == 1 or rows in lengths for n, rows in seen["long"])
    assert sum(n for n, _ in seen["long"]) == len(lengths) - len(wanted)


def test_documents_are_padded_to_few_lengths() -> None:
    lengths = range(LONG, 200_000)
    padded = [padded_length(length) for length in lengths]
    assert all(n <= m <= n * 17 / 16 for n, m in zip(lengths, padded, strict=True))
    assert len(set(padded)) < 7 * 16
    assert padded_length(4096) == 4096 and padded_length(4097) == 4352


def test_arguments_of_each_signature_of_varlen_attn() -> None:
    torch_2_10 = {"query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "is_causal", "return_aux", "scale"}
    torch_2_11 = torch_2_10 - {"is_causal"} | {"window_size"}
    torch_2_14 = torch_2_11 | {"enable_gqa", "seqused_k", "block_table", "num_splits"}

    def options(
        known: set[str], causal: bool, scale: float | None = None, grouped: bool = True, window: int | None = None
    ) -> dict[str, Any]:
        return varlen_options(known, causal=causal, scale=scale, window=window, grouped=grouped)

    assert options(torch_2_10, True) == {"is_causal": True}
    assert options(torch_2_10, False, 0.5) == {"is_causal": False, "scale": 0.5}
    assert options(torch_2_11, True) == {"window_size": (-1, 0)}
    assert options(torch_2_11, False) == {"window_size": (-1, -1)}
    assert options(torch_2_14, True, 0.5) == {"window_size": (-1, 0), "enable_gqa": True, "scale": 0.5}
    assert options(torch_2_14, True, grouped=False) == {"window_size": (-1, 0)}
    assert options(torch_2_11, True, window=5) == {"window_size": (4, 0)}
    with pytest.raises(UnsupportedError, match="sliding window"):
        options(torch_2_10, True, window=5)


def test_rows_and_heads_must_fit() -> None:
    function = OPS["attention"].backends["sdpa"].load()
    segments = Segments.from_lengths([3, 4])
    with pytest.raises(ValueError, match="8, 8, 8 rows and the segments 7"):
        function(*inputs(8, 2, 2, 4).values(), segments, causal=True)
    with pytest.raises(ValueError, match="3 query heads cannot share 2 key"):
        function(*inputs(7, 3, 2, 4).values(), segments, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("heads", "size"),
    [((8, 2), 128), ((4, 4), 64), ((4, 4), 72), ((2, 2), 20)],
    ids=["text", "audio", "vision", "tiny"],
)
@pytest.mark.parametrize("lengths", [*LENGTHS.values(), [1000, 24, 1, 777], LONG_AND_SHORT], ids=str)
@pytest.mark.parametrize("name", list(OPS["attention"].backends))
def test_on_a_gpu(name: str, lengths: list[int], heads: tuple[int, int], size: int, causal: bool) -> None:
    try:
        OPS["attention"].resolve(name, describe_device("cuda"), "bfloat16")
    except ConfigError as error:
        pytest.skip(str(error))
    on_gpu: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda", "reference_device": "cuda"}
    check(name, lengths, causal, inputs(sum(lengths), *heads, size), **on_gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(OPS["attention"].backends))
def test_windows_on_a_gpu(name: str) -> None:
    try:
        OPS["attention"].resolve(name, describe_device("cuda"), "bfloat16")
    except ConfigError as error:
        pytest.skip(str(error))
    lengths = [300, 1, 77, 500]
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    tensors = inputs(sum(lengths), 8, 2, 64)
    check(name, lengths, True, tensors, window=100, **options)
    if name in ("cudnn", "sdpa", "torch_varlen", "triton"):
        with pytest.raises(UnsupportedError, match="softcap"):
            check(name, lengths, True, tensors, window=100, softcap=3.0, **options)
    else:
        check(name, lengths, True, tensors, window=100, softcap=3.0, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["eager", "sdpa", "flex_attention"])
def test_float32_on_a_gpu(name: str) -> None:
    lengths = [130, 1, 300, 77]
    check(name, lengths, True, inputs(sum(lengths), 8, 2, 64), device="cuda", tolerance=2e-3)  # tf32 in compiled code
