"""Files of every layout -> the same parameters, by no more bytes than are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from convert.tensors import Box
from schemas.errors import IncompleteSourceError, OmniloomError, UnsupportedError
from tests.convert.models import edit_config, make_omni
from tests.train.models.checkpoints import EXPERT_LAYOUTS, save_model, write
from tests.train.models.families import FAMILIES, hub_names
from train.models.loading import SLAB_BYTES, HubWeights, assign_whole, open_weights, row_boxes
from train.models.spec import build_foundation_model
from train.ops.registry import eager_ops

CASES = [
    *(("moe", layout, "hub") for layout in EXPERT_LAYOUTS),
    *(("vl_moe", layout, "hub") for layout in EXPERT_LAYOUTS),
    *(("omni", layout, names) for layout in EXPERT_LAYOUTS for names in ("hub", "thinker", "memory")),
    ("dense", "v5", "hub"),
    ("mixed_moe", "per-expert", "hub"),
    ("vl", "v5", "hub"),
    ("vl_tied", "v5", "hub"),
]


def shapes_of(weights: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in weights.items()}


@pytest.mark.parametrize(("name", "layout", "names"), CASES)
def test_every_layout_gives_the_same_parameters(tmp_path: Path, name: str, layout: str, names: str) -> None:
    expected = save_model(name, tmp_path, layout, names)
    model = build_foundation_model(tmp_path, eager_ops())
    found = {key: parameter.detach() for key, parameter in model.named_parameters()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_a_whole_omni_that_transformers_saved(tmp_path: Path) -> None:
    """The thinker of it, in another dtype; the talker and the vocoder are left out."""
    folder = make_omni(tmp_path, shards=3)
    edit_config(folder, "thinker_config", "audio_config", n_window=50, n_window_infer=200)
    model = build_foundation_model(folder, eager_ops(), dtype=torch.bfloat16)
    files = {}
    for path in folder.glob("*.safetensors"):
        files |= load_file(path)
    for key, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        if ".experts." not in key:
            assert torch.equal(parameter, files[f"thinker.{key}"].bfloat16()), key
    path = "thinker.model.layers.1.mlp.experts"
    expert = [files[f"{path}.3.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(model.get_parameter("model.layers.1.mlp.experts.gate_up_proj")[3], torch.cat(expert).bfloat16())
    weights = open_weights(folder, {key: tuple(p.shape) for key, p in model.named_parameters()})
    assert set(weights.dropped) == {key for key in files if not key.startswith("thinker.")}


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_a_slice_reads_its_own_bytes_only(tmp_path: Path, layout: str) -> None:
    expected = save_model("moe", tmp_path, layout)
    weights = open_weights(tmp_path, shapes_of(expected))
    boxes = {
        "model.layers.1.mlp.experts.gate_up_proj": [
            ((3, 5), (0, 40), (0, 48)),
            ((0, 8), (15, 27), (0, 48)),
            ((2, 3), (0, 40), (7, 30)),
            ((5, 5), (0, 40), (0, 48)),
        ],
        "model.layers.0.mlp.experts.down_proj": [((7, 8), (0, 48), (0, 20)), ((1, 7), (11, 12), (3, 20))],
        "model.layers.2.self_attn.q_proj.weight": [((5, 19), (0, 48)), ((0, 64), (24, 48))],
        "model.norm.weight": [((13, 14),)],
    }
    for name, asked in boxes.items():
        for box in asked:
            before = weights.bytes_read
            part = weights.read(name, box)
            wanted = expected[name][tuple(slice(*bounds) for bounds in box)]
            assert torch.equal(part, wanted), (name, box)
            assert part.is_contiguous() and weights.bytes_read - before == wanted.numel() * 4, (name, box)
    with pytest.raises(ValueError, match="does not lie within"):
        weights.read("model.norm.weight", ((40, 49),))


def test_all_bytes_are_read_once_and_in_the_order_of_the_file(tmp_path: Path) -> None:
    expected = save_model("omni", tmp_path, "per-expert", "thinker")
    weights = open_weights(tmp_path, shapes_of(expected))
    assert weights.bytes_read == 0  # headers alone decide whether the files fit
    names = weights.names()
    assert sorted(names) == sorted(expected)
    for name in names:
        weights.read(name)
    assert weights.bytes_read == weights.nbytes == sum(value.nbytes for value in expected.values())


def test_row_boxes_tile_a_tensor() -> None:
    assert list(row_boxes((5, 3), 4, 24)) == [((0, 2), (0, 3)), ((2, 4), (0, 3)), ((4, 5), (0, 3))]
    assert list(row_boxes((2, 1000), 4, 8)) == [((0, 1), (0, 1000)), ((1, 2), (0, 1000))]
    assert list(row_boxes((), 4)) == [()] and list(row_boxes((0, 3), 4)) == []


def test_a_parameter_is_filled_a_slab_at_a_time() -> None:
    """In another dtype than the files'; what was read is told."""
    model, read, told = nn.Linear(1024, 10240, bias=False, dtype=torch.bfloat16), [], []
    values = torch.randn(10240, 1024)

    def read_slice(box: Box | None = None) -> Tensor:
        assert box is not None
        part = values[tuple(slice(*bounds) for bounds in box)]
        read.append(part.nbytes)
        return part

    assign_whole(model, told.append)("weight", read_slice)
    assert torch.equal(model.weight, values.bfloat16())
    assert len(read) > 1 and max(read) <= 2 * SLAB_BYTES and read == told and sum(told) == values.nbytes


def _damaged(folder: Path, name: str, **changes: Tensor | str | None) -> OmniloomError:
    """What is raised when tensors are removed (None), renamed (text) or replaced."""
    expected = save_model(name, folder, "per-expert")
    tensors = load_file(folder / "model.safetensors")
    for key, change in changes.items():
        value = tensors.pop(key)
        if change is not None:
            tensors |= {change: value} if isinstance(change, str) else {key: change}
    write(folder, tensors)
    with pytest.raises(OmniloomError) as raised:
        open_weights(folder, shapes_of(expected))
    return raised.value


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    key = "model.layers.1.mlp.gate.weight"
    error = _damaged(tmp_path, "moe", **{key: None})
    assert isinstance(error, IncompleteSourceError) and f"1 of {3 * (9 + 24) + 3} tensors" in str(error)
    assert key in str(error) and str(tmp_path) in str(error)
    error = _damaged(tmp_path, "moe", **{key: "model.layers.1.mlp.gates.weight"})
    assert isinstance(error, UnsupportedError)
    assert f"is model.layers.1.mlp.gates.weight meant to be {key}?" in str(error)
    error = _damaged(tmp_path, "moe", **{key: torch.zeros(8, 47)})
    assert isinstance(error, UnsupportedError) and f"{key} is [8, 47] and should be [8, 48]" in str(error)
    error = _damaged(tmp_path, "moe", **{"model.layers.2.mlp.experts.7.up_proj.weight": None})
    assert isinstance(error, IncompleteSourceError) and "model.layers.2.mlp.experts.7.up_proj.weight" in str(error)
    error = _damaged(tmp_path, "omni", **{"audio_tower.proj1.bias": None})
    assert isinstance(error, IncompleteSourceError) and "audio_tower.proj1.bias" in str(error)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    error = _damaged(tmp_path, "moe", **{"model.layers.0.self_attn.q_proj.weight": torch.zeros(64, 48).char()})
    assert isinstance(error, UnsupportedError) and "quantised" in str(error) and "q_proj" in str(error)
    save_model("dense", tmp_path / "b")
    edit_config(tmp_path / "b", quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnsupportedError, match="quantization_config"):
        build_foundation_model(tmp_path / "b", eager_ops())


def test_a_tied_head_may_be_stored_when_it_equals_the_embedding(tmp_path: Path) -> None:
    expected = save_model("vl_tied", tmp_path, with_head=True)
    assert "lm_head.weight" not in expected
    model = build_foundation_model(tmp_path, eager_ops())
    assert all(torch.equal(model.get_parameter(key), value) for key, value in expected.items())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"][17, 3] += 1
    write(tmp_path, tensors)
    with pytest.raises(UnsupportedError, match="ties the head to the embedding"):
        build_foundation_model(tmp_path, eager_ops())


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    save_model("dense", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    write(tmp_path, tensors)
    with pytest.raises(IncompleteSourceError, match=r"1 of 36 tensors of the model are missing: lm_head\.weight"):
        build_foundation_model(tmp_path, eager_ops())


def test_sources_of_several_dtypes_keep_their_values(tmp_path: Path) -> None:
    expected = save_model("moe", tmp_path, "per-expert")
    tensors = load_file(tmp_path / "model.safetensors")
    key = "model.layers.0.mlp.experts.2.gate_proj.weight"
    tensors[key] = tensors[key].bfloat16()
    write(tmp_path, tensors)
    weights: HubWeights = open_weights(tmp_path, shapes_of(expected))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    expected[name][2, :20] = expected[name][2, :20].bfloat16()
    assert weights.tensors[name].dtype == torch.float32
    assert torch.equal(weights.read(name), expected[name])


def test_the_names_are_those_of_transformers(tmp_path: Path) -> None:
    """What transformers saves itself, in the layout that it chooses."""
    for name in ("moe", "vl_moe", "omni", "vl_tied"):
        reference = FAMILIES[name].reference._from_config(FAMILIES[name].make_config())
        reference.save_pretrained(tmp_path / name)
        model = build_foundation_model(tmp_path / name, eager_ops())
        expected = hub_names(reference)
        assert all(torch.equal(p, expected[key]) for key, p in model.named_parameters())
