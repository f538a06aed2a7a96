"""Rules against torch operations on whole tensors, and every table's inverse, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from convert.engine import resolve
from convert.families import expected, model_of
from convert.fill import slabs
from convert.geometry import Geometry
from convert.ledger import check_ledger, recipes
from convert.rules import (
    Copy,
    Drop,
    Fuse,
    Map,
    NotInvertibleError,
    Rule,
    Slice,
    Split,
    Stack,
    Transpose,
    Unstack,
    inverse,
    prefixed,
    rename,
)
from convert.safetensors_io import SafetensorsReader
from convert.tables.experts import FORMS
from convert.tables.hub import FAMILIES
from convert.tables.omni_vl import OMNI_TO_VL, VL_TO_OMNI
from convert.tables.trainer import STYLES
from convert.tensors import TensorInfo
from convert.trainer import to_hub
from schemas.errors import IncompleteSourceError, UnsupportedError
from tests.convert.memory import MemoryReader, apply
from tests.convert.models import omni_config

GEOMETRY = Geometry({"a": 6, "b": 4, "turns": 2}, {"expert": (0, 1, 2), "layer": (0, 1)})


def test_split_in_groups_takes_turns() -> None:
    """Heads of grouped queries: q q k v, q q k v."""
    rule = Map(("qkv",), ("q", "k", "v"), (Split(0, (4, 2, 2), groups="turns"),))
    made = apply((rule,), {"qkv": torch.arange(16).view(8, 2)}, GEOMETRY)
    rows = {name: (tensor[:, 0] // 2).tolist() for name, tensor in made.items()}
    assert rows == {"q": [0, 1, 4, 5], "k": [2, 6], "v": [3, 7]}


def test_every_step_against_torch() -> None:
    parts = {f"e.{i}.{half}": torch.randn(6, 5) for i in range(3) for half in ("gate", "up")}
    steps = (Fuse(0, ("a", "a")), Transpose(), Stack("expert"))
    made = apply((Map(("e.{expert}.gate", "e.{expert}.up"), ("fused",), steps),), parts, GEOMETRY)
    expected_ = torch.stack([torch.cat([parts[f"e.{i}.gate"], parts[f"e.{i}.up"]]).T for i in range(3)])
    assert torch.equal(made["fused"], expected_)
    layers = torch.randn(2, 7, 3)
    sliced = Map(("l",), ("layer.{layer}",), (Unstack("layer"), Slice(0, "b", "padding")))
    made = apply((sliced,), {"l": layers}, GEOMETRY)
    assert made.keys() == {"layer.0", "layer.1"}
    assert torch.equal(made["layer.1"], layers[1, :4])


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(0, 1),
    st.booleans(),
    st.integers(1, 40),
)
def test_any_chain_comes_back(sizes: list[int], groups: int, dim: int, transposed: bool, limit: int) -> None:
    """fuse -> transpose -> stack and its inverse, made in slabs of any size."""
    measures = tuple(size * groups for size in sizes)
    names = tuple(f"x.{{expert}}.{part}" for part in range(len(sizes)))
    steps = (Fuse(dim, measures, groups), *((Transpose(),) if transposed else ()), Stack("expert"))
    rule = Map(names, ("fused",), steps)
    tensors = {
        f"x.{i}.{part}": torch.randn(*((size, 5) if dim == 0 else (5, size)))
        for i in range(3)
        for part, size in enumerate(measures)
    }
    fused = apply((rule,), tensors, GEOMETRY, limit)
    back = apply((rule.inverse(),), fused, GEOMETRY, limit)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_what_drops_does_not_invert() -> None:
    for rule in (Drop("x", "why"), Copy("x", "why"), Map(("x",), ("y",), (Slice(0, 2, "padding"),))):
        with pytest.raises(NotInvertibleError):
            rule.inverse()
    assert inverse((rename("a", "b"), Drop("x", "why"))) == (rename("b", "a"),)


def tables() -> dict[str, tuple[tuple[Rule, ...], tuple[Rule, ...], str]]:
    """name -> (rules, their inverse, form of the experts in the source)."""
    config = omni_config().to_dict()
    omni = model_of(config, "config.json")
    found: dict[str, tuple[tuple[Rule, ...], tuple[Rule, ...], str]] = {}
    for form in ("hub", "v5"):
        experts = prefixed(FORMS["per-expert", form], "thinker.model.", "model.language_model.")
        there = (*experts, *prefixed(OMNI_TO_VL, "thinker."), rename("thinker.audio_tower.{name}", "audio.{name}"))
        experts_back = prefixed(FORMS[form, "per-expert"], "model.language_model.", "thinker.model.")
        back = (
            *experts_back,
            *prefixed(VL_TO_OMNI, target="thinker."),
            rename("audio.{name}", "thinker.audio_tower.{name}"),
        )
        found[f"omni to vl, {form}"] = (there, back, "per-expert")
    for names in STYLES["qwen3_omni_moe"]:
        for form in ("v5", "hub", "per-expert"):
            rules = to_hub(names, omni, form, "per-expert", "model.")
            found[f"hub to {names.style}, {form}"] = (inverse(rules), rules, "per-expert")
    return found


@pytest.mark.parametrize("name", tables())
def test_every_table_comes_back_bit_for_bit(name: str) -> None:
    there, back, form = tables()[name]
    model = model_of(omni_config().to_dict(), "config.json")
    shapes = expected(model, form)
    tensors = {key: torch.randn(shape) for key, shape in shapes.items()}
    made = apply(there, tensors, model.geometry)
    assert made.keys() != tensors.keys()
    again = apply(back, made, model.geometry)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[key], tensors[key]) for key in tensors)


def test_expected_tensors_of_an_omni_are_what_transformers_saves(omni: Path) -> None:
    saved = SafetensorsReader(omni).tensors
    model = model_of(omni_config().to_dict(), "config.json")
    assert expected(model) == {name: info.shape for name, info in saved.items() if name.startswith("thinker.")}
    assert {name.split(".")[0] + "." for name in saved} == {"thinker.", *FAMILIES["qwen3_omni_moe"].rest}


TEXT = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
}
MOE = {"num_experts": 3, "moe_intermediate_size": 24, "mlp_only_layers": [1], "decoder_sparse_step": 1}
VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 44,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 1],
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("qwen3", TEXT),
        ("qwen3_moe", TEXT | MOE),
        ("qwen3_moe", TEXT | MOE | {"mlp_only_layers": [], "decoder_sparse_step": 2}),
        ("qwen3_vl", {"text_config": TEXT, "vision_config": VISION}),
        ("qwen3_vl_moe", {"text_config": TEXT | MOE, "vision_config": VISION}),
    ],
)
def test_expected_tensors_are_those_of_transformers(model_type: str, values: dict, tied: bool) -> None:
    """Dense and mixed layers too. transformers 5 has experts in memory as the form `v5`."""
    config = AutoConfig.for_model(model_type, **values, tie_word_embeddings=tied)
    family = FAMILIES[model_type]
    with torch.device("meta"):
        model = getattr(transformers, family.architecture)(config)
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if tied:
        state.pop("lm_head.weight")
    assert expected(model_of(config.to_dict(), "config.json"), "v5") == state


def infos(**shapes: tuple[int, ...]) -> dict[str, TensorInfo]:
    return {name.replace("_", "."): TensorInfo(shape, torch.float32) for name, shape in shapes.items()}


def test_names_without_a_rule() -> None:
    with pytest.raises(UnsupportedError, match=r"2 of 3 source tensors .*: p, q"):
        resolve((rename("x", "y"),), infos(x=(1,), p=(1,), q=(1,)), GEOMETRY)


def test_index_without_leading_zeros() -> None:
    with pytest.raises(UnsupportedError, match=r"layers\.01"):
        resolve((rename("layers.{layer}", "l.{layer}"),), infos(layers_01=(1,)), GEOMETRY)


def test_missing_member_of_a_stack() -> None:
    rule = Map(("e.{expert}",), ("fused",), (Stack("expert"),))
    with pytest.raises(IncompleteSourceError, match=r"1 source tensors are missing: e\.1"):
        resolve((rule,), infos(e_0=(2,), e_2=(2,)), GEOMETRY)


def test_surplus_member_of_a_stack() -> None:
    rule = Map(("e.{expert}",), ("fused",), (Stack("expert"),))
    with pytest.raises(UnsupportedError, match=r"3 of \{expert\}.*: e\.3"):
        resolve((rule,), infos(e_0=(2,), e_1=(2,), e_2=(2,), e_3=(2,)), GEOMETRY)


def test_missing_part_of_a_fuse() -> None:
    rule = Map(("gate", "up"), ("fused",), (Fuse(0, ("a", "a")),))
    with pytest.raises(IncompleteSourceError, match=r"missing: up"):
        resolve((rule,), infos(gate=(6, 2)), GEOMETRY)


@pytest.mark.parametrize(
    ("steps", "shape", "says"),
    [
        ((Split(0, ("a", "b")),), (9, 2), r"9, 2\] is not 6 \+ 4"),
        ((Split(0, (5, 5), groups=2),), (10, 2), r"is not 5 \+ 5 in 2 groups"),
        ((Slice(0, "a", "padding"),), (5, 2), r"5, 2\] is shorter than 6"),
        ((Unstack("expert"),), (4, 2), r"does not hold one row for each expert \(3\)"),
    ],
)
def test_shapes_that_do_not_fit(steps: tuple, shape: tuple[int, ...], says: str) -> None:
    targets = ("y{expert}",) if isinstance(steps[0], Unstack) else ("y", "z")
    with pytest.raises(UnsupportedError, match=rf"^x: .*{says}"):
        resolve((Map(("x",), targets, steps),), infos(x=shape), GEOMETRY)


def test_target_made_twice() -> None:
    with pytest.raises(UnsupportedError, match=r"^y is made twice: by q and by p"):
        resolve((rename("p", "y"), rename("q", "y")), infos(p=(1,), q=(1,)), GEOMETRY)


def test_ledger_names_missing_surplus_and_wrong_shapes() -> None:
    tensors = infos(x=(2, 3))
    resolution = resolve((rename("x", "y"),), tensors, GEOMETRY)
    check_ledger(resolution, tensors, {"y": (2, 3)})
    with pytest.raises(IncompleteSourceError, match=r"1 of 2 target tensors .*: z"):
        check_ledger(resolution, tensors, {"y": (2, 3), "z": (1,)})
    with pytest.raises(UnsupportedError, match=r"no place in the target model: y"):
        check_ledger(resolution, tensors, {})
    with pytest.raises(UnsupportedError, match=r"y would be \[2, 3\], config.json says \[3, 2\]"):
        check_ledger(resolution, tensors, {"y": (3, 2)})


def test_ledger_counts_every_element() -> None:
    """A source that a faulty step uses in part only is noticed, whatever the rules say."""
    tensors = infos(x=(4, 3))
    resolution = resolve((Map(("x",), ("y",), (Slice(0, 2, "padding"),)),), tensors, GEOMETRY)
    check_ledger(resolution, tensors, {"y": (2, 3)})
    resolution.sliced.clear()
    with pytest.raises(UnsupportedError, match=r"x: 6 of 12 elements are used, 0 sliced away"):
        check_ledger(resolution, tensors, {"y": (2, 3)})


def test_mixed_types_need_a_decision() -> None:
    tensors = {"p": TensorInfo((2,), torch.float32), "q": TensorInfo((2,), torch.bfloat16)}
    resolution = resolve((Map(("p", "q"), ("y",), (Fuse(0, (2, 2)),)),), tensors, GEOMETRY)
    with pytest.raises(UnsupportedError, match=r"y would mix the types bfloat16, float32"):
        recipes(resolution, tensors, {})
    assert recipes(resolution, tensors, {"y": torch.float16})[0].info.dtype == torch.float16
    values = {"p": torch.tensor([1.0, 2.0]), "q": torch.tensor([3.0, 4.0]).bfloat16()}
    recipe = recipes(resolution, tensors, {"y": torch.float16})[0]
    assert torch.cat(list(slabs(recipe, MemoryReader(values)))).tolist() == [1, 2, 3, 4]
