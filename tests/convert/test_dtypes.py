"""What config.json says of the dtypes, and what is written: the same, in every direction and every section."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from convert.directions import (
    omni_to_text_conversion,
    omni_to_vl_conversion,
    relayout_conversion,
    vl_to_omni_conversion,
)
from convert.job import Conversion, Options, run
from convert.lora import merge_lora_conversion
from convert.megatron_to_hf import megatron_to_hf_conversion
from convert.trainer import dcp_to_hf_conversion, hf_to_dcp_conversion
from convert.verify import verify
from schemas.errors import UnsupportedError
from tests.convert.dcp_factory import save
from tests.convert.models import edit_config, make_text, read_weights, rewrite_weights
from tests.convert.refusing import MEGATRON
from tests.convert.test_lora import TEXT, H, adapter, factors

HALF = torch.bfloat16


def convert(conversion: Conversion, output: Path) -> Path:
    run(conversion, output, Options(workers=2), lambda count: None)
    return output


def stated(config: Any, path: str = "") -> dict[str, str]:
    """Every dtype of a config.json by its place."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if key in ("dtype", "torch_dtype") and value is not None:
            found[path + key] = value
        elif isinstance(value, dict):
            found |= stated(value, f"{path}{key}.")
    return found


@pytest.fixture(scope="module")
def labelled(omni: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny omni with a dtype in every section, under both names."""
    folder = convert(relayout_conversion(omni, "per-expert"), tmp_path_factory.mktemp("labelled") / "omni")
    edit_config(folder, torch_dtype="float32", dtype="float32")
    for path in (["thinker_config"], ["talker_config"], ["code2wav_config"], ["talker_config", "text_config"]):
        edit_config(folder, *path, dtype="float32")
    for part in ("text_config", "vision_config", "audio_config"):
        edit_config(folder, "thinker_config", part, torch_dtype="float32")
    return folder


def vl(omni: Path, folder: Path) -> Path:
    return convert(omni_to_vl_conversion(omni), folder / "vl")


def lora(folder: Path) -> Path:
    return adapter(folder / "lora", factors(f"{TEXT}0.self_attn.q_proj", H, 40))


DIRECTIONS: dict[str, Callable[[Path, Path], Conversion]] = {
    "omni-to-vl": lambda omni, tmp: omni_to_vl_conversion(omni, HALF),
    "omni-to-text": lambda omni, tmp: omni_to_text_conversion(omni, HALF),
    "relayout": lambda omni, tmp: relayout_conversion(omni, "v5", HALF),
    "hf-to-dcp": lambda omni, tmp: hf_to_dcp_conversion(omni, dtype=HALF),
    "vl-to-omni": lambda omni, tmp: vl_to_omni_conversion(vl(omni, tmp), omni, HALF),
    "merge-lora": lambda omni, tmp: merge_lora_conversion(lora(tmp), omni, HALF),
    "dcp-to-hf": lambda omni, tmp: dcp_to_hf_conversion(convert(hf_to_dcp_conversion(omni), tmp / "dcp"), omni, HALF),
}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_config_states_what_was_written(labelled: Path, tmp_path: Path, direction: str) -> None:
    output = convert(DIRECTIONS[direction](labelled, tmp_path), tmp_path / "out")
    places = stated(json.loads((output / "config.json").read_text()))
    assert places
    weights = read_weights(output)
    for place, dtype in places.items():
        copied = [] if direction in ("relayout", "hf-to-dcp") else ["talker_config.", "code2wav_config."]
        copied += ["thinker_config.audio_config."] if direction == "vl-to-omni" else []
        assert dtype == ("float32" if place.startswith(tuple(copied)) else "bfloat16"), place
    for name, tensor in weights.items():
        if not name.startswith(("talker.", "code2wav.", "thinker.audio_tower.")) or direction == "relayout":
            assert tensor.dtype == HALF, name


def test_megatron_with_a_base_of_no_weights(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    config = json.loads((MEGATRON / "tp1" / "hf_ref" / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32", "dtype": "float32"}))
    output = convert(megatron_to_hf_conversion(MEGATRON / "tp1", base, torch.float16), tmp_path / "out")
    assert {tensor.dtype for tensor in read_weights(output).values()} == {torch.float16}
    assert set(stated(json.loads((output / "config.json").read_text())).values()) == {"float16"}


def test_what_is_right_keeps_its_bytes(labelled: Path, tmp_path: Path) -> None:
    edit_config(labelled, transformers_version="x")  # written by json.dumps without an indent
    output = convert(relayout_conversion(labelled, "v5"), tmp_path / "out")
    assert (output / "config.json").read_bytes() == (labelled / "config.json").read_bytes()


def test_a_training_checkpoint_comes_back_in_its_dtype(tmp_path: Path) -> None:
    """Without --base the config.json beside the checkpoint decides."""
    checkpoint = convert(hf_to_dcp_conversion(make_text(tmp_path / "hf"), dtype=HALF), tmp_path / "dcp")
    back = convert(dcp_to_hf_conversion(checkpoint, None), tmp_path / "back")
    assert {tensor.dtype for tensor in read_weights(back).values()} == {HALF}


# --- whole numbers are no weights


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.uint8, torch.int64])
def test_whole_numbers_in_the_source(omni: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    source = convert(relayout_conversion(omni, "per-expert"), tmp_path / "source")
    weights = read_weights(source)
    name = "thinker.model.layers.0.self_attn.q_proj.weight"
    rewrite_weights(source, weights | {name: weights[name].to(dtype)})
    builds: tuple[Callable[[], Conversion], ...] = (
        lambda: omni_to_vl_conversion(source),
        lambda: omni_to_text_conversion(source, torch.bfloat16),
        lambda: relayout_conversion(source, "v5"),
        lambda: hf_to_dcp_conversion(source),
        lambda: dcp_to_hf_conversion(save(tmp_path / "dcp", read_weights(source)), omni),
    )
    for build in builds[:4]:
        with pytest.raises(UnsupportedError, match=r"q_proj\.weight is (int|uint|bool).* whole numbers are no weights"):
            build()


def test_whole_numbers_in_a_training_checkpoint_or_a_base(tmp_path: Path) -> None:
    base = make_text(tmp_path / "base")
    weights = read_weights(base)
    name = "model.layers.0.self_attn.q_proj.weight"
    save(tmp_path / "dcp", weights | {name: weights[name].to(torch.int8)})
    with pytest.raises(UnsupportedError, match=r"q_proj\.weight is int8 .* of float32"):
        dcp_to_hf_conversion(tmp_path / "dcp", base)
    save(tmp_path / "plain", weights)
    rewrite_weights(base, weights | {name: weights[name].to(torch.int8)})
    with pytest.raises(UnsupportedError, match=r"q_proj\.weight is float32 .* of int8"):
        dcp_to_hf_conversion(tmp_path / "plain", base)


def test_whole_numbers_of_parts_that_are_not_converted_stay(omni: Path, tmp_path: Path) -> None:
    source = convert(relayout_conversion(omni, "per-expert"), tmp_path / "source")
    rewrite_weights(source, read_weights(source) | {"code2wav.offset": torch.arange(3)})
    made = read_weights(convert(relayout_conversion(source, "v5", HALF), tmp_path / "out"))
    assert made["code2wav.offset"].dtype == torch.int64


def test_verify_takes_no_whole_numbers_for_weights(tmp_path: Path) -> None:
    folder = make_text(tmp_path / "hf")
    weights = read_weights(folder)
    name = "model.layers.0.self_attn.q_proj.weight"
    rewrite_weights(folder, weights | {name: weights[name].to(torch.int8)})
    (fault,) = verify(folder).faults
    assert "1 tensors hold whole numbers" in fault and name in fault
