"""Sources and bases that contradict themselves or each other, or that change: refused, with both values."""

from __future__ import annotations

import argparse
import io
import os
import shutil
import signal
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from convert.assemble import masters_missing
from convert.dcp import DcpReader
from convert.dcp_record import data_start
from convert.directions import (
    omni_to_text_conversion,
    omni_to_vl_conversion,
    relayout_conversion,
    vl_to_omni_conversion,
)
from convert.families import model_of, read_config, text_section
from convert.job import Options, run
from convert.lora import merge_lora_conversion
from convert.megatron_source import check_common
from convert.output import OutputDirectory
from convert.progress import stoppable
from convert.tensors import TensorInfo
from jobs.cli import main
from schemas.errors import IncompleteSourceError, ResumableError, UnsafeInputError, UnsupportedError
from tests.convert.dcp_factory import save
from tests.convert.models import edit_config, make_text, read_weights, rewrite_weights
from tests.convert.test_lora import adapter, factors

TEXT_AT = ("thinker_config", "text_config")
Q = "base_model.model.model.layers.{}.self_attn.q_proj"


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("text") / "hf")


@pytest.fixture
def base(hf: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(hf, tmp_path / "base"))


@pytest.fixture(scope="module")
def vl(omni: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vl") / "vl"
    run(omni_to_vl_conversion(omni), folder, Options(), lambda count: None)
    return folder


def lora(folder: Path, layers: tuple[int, ...] = (0, 1), **config: Any) -> Path:
    tensors = {name: tensor for i in layers for name, tensor in factors(Q.format(i), 32, 40).items()}
    return adapter(folder, tensors, **config)


# --- quantised models


def quantise(folder: Path, how: str) -> None:
    weights, name = read_weights(folder), "model.layers.0.self_attn.q_proj.weight"
    if how == "config":
        edit_config(folder, quantization_config={"quant_method": "fp8"})
    elif how == "scale":
        rewrite_weights(folder, {**weights, name + "_scale_inv": torch.ones(1, 1)})
    else:
        rewrite_weights(folder, {**weights, name: weights[name].to(torch.float8_e4m3fn)})


@pytest.mark.parametrize("how", ["config", "scale", "dtype"])
def test_quantised_models_are_refused(base: Path, tmp_path: Path, how: str) -> None:
    quantise(base, how)
    with pytest.raises(UnsupportedError, match="quantised"):
        merge_lora_conversion(lora(tmp_path / "lora"), base)
    with pytest.raises(UnsupportedError, match="quantised"):
        relayout_conversion(base, "v5")


def test_a_merge_needs_the_whole_base(base: Path, tmp_path: Path) -> None:
    weights = read_weights(base)
    lost = weights.pop("model.layers.1.self_attn.k_norm.weight")
    rewrite_weights(base, weights)
    with pytest.raises(IncompleteSourceError, match=r"layers\.1\.self_attn\.k_norm"):
        merge_lora_conversion(lora(tmp_path / "lora"), base)
    rewrite_weights(base, {**weights, "model.layers.1.self_attn.k_norm.weight": lost, "model.extra": lost.clone()})
    with pytest.raises(UnsupportedError, match=r"model\.extra"):
        merge_lora_conversion(lora(tmp_path / "lora2"), base)


# --- rotary statements


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rope_theta": 1e4}, r"rope_theta is 10000\.0 and rope_parameters\.rope_theta is 1000000\.0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters says .*rope_scaling says"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ],
)
def test_rotary_statements_that_disagree(omni: Path, tmp_path: Path, change: dict[str, Any], says: str) -> None:
    source = Path(shutil.copytree(omni, tmp_path / "source"))
    edit_config(source, *TEXT_AT, **change)
    for conversion in (omni_to_vl_conversion, omni_to_text_conversion):
        with pytest.raises(UnsupportedError, match=says):
            conversion(source)


# --- a pseudo Qwen3-VL and its base


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (("vision_config",), {"num_heads": 4}),
        (("vision_config",), {"hidden_act": "gelu"}),
        (("vision_config",), {"deepstack_visual_indexes": [0, 2]}),
        (("vision_config",), {"temporal_patch_size": 1}),
        (("text_config",), {"use_sliding_window": True, "sliding_window": 8}),
        ((), {"image_token_id": 7}),
    ],
    ids=str,
)
def test_a_base_that_computes_another_way(
    omni: Path, vl: Path, tmp_path: Path, path: tuple[str, ...], change: dict[str, Any]
) -> None:
    base = Path(shutil.copytree(omni, tmp_path / "base"))
    edit_config(base, "thinker_config", *path, **change)
    key = [*change][-1]
    with pytest.raises(UnsupportedError, match=f"{key} is"):
        vl_to_omni_conversion(vl, base)


def test_a_scaled_rotary_embedding_that_the_base_lacks(omni: Path, vl: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(vl, tmp_path / "source"))
    yarn = {"rope_type": "yarn", "factor": 4.0, "mrope_section": [3, 1, 1], "mrope_interleaved": True}
    edit_config(source, "text_config", rope_scaling=yarn, rope_parameters=None)
    with pytest.raises(UnsupportedError, match="rope_type is 'yarn'"):
        vl_to_omni_conversion(source, omni)


# --- arguments of a Megatron run


@pytest.mark.parametrize(
    "arguments",
    [
        {"rotary_base": 500000}, {"norm_epsilon": 1e-3}, {"moe_router_topk": 3}, {"window_size": (128, 0)},
        {"moe_router_score_function": "sigmoid"}, {"moe_router_topk_scaling_factor": 2.5}, {"num_layers": 3},
        {"position_embedding_type": "none"}, {"use_rope_scaling": True}, {"num_experts": 8}, {"vocab_size": 500},
        {"multi_latent_attention": True}, {"hidden_size": 64}, {"moe_router_group_topk": 1},
        {"attention_output_gate": True}, {"glu_linear_offset": 1.0}, {"moe_router_pre_softmax": False},
    ],
    ids=str,
)  # fmt: skip
def test_arguments_that_contradict_the_base(hf: Path, tmp_path: Path, arguments: dict[str, Any]) -> None:
    model = model_of(read_config(hf), str(hf))
    torch.save({"args": argparse.Namespace(**arguments)}, tmp_path / "common.pt")
    name, value = next(iter(arguments.items()))
    with pytest.raises(UnsupportedError) as caught:
        check_common(tmp_path, model.geometry, text_section(model, hf))
    assert f"{name} is {value!r}" in str(caught.value)


def test_arguments_that_agree_or_say_nothing(hf: Path, tmp_path: Path) -> None:
    """Defaults that are written down whatever the model is."""
    arguments = {
        "rotary_base": 10000, "norm_epsilon": 1e-6, "moe_router_topk": 2, "window_size": None, "vocab_size": 90,
        "rope_scaling_factor": 8.0, "use_rope_scaling": False, "position_embedding_type": "rope",
        "moe_router_score_function": "softmax", "moe_router_pre_softmax": True, "softmax_type": "vanilla",
        "glu_linear_offset": 0.0, "rotary_percent": 1.0, "num_layers": 2, "num_experts": 4, "padded_vocab_size": 128,
    }  # fmt: skip
    model = model_of(read_config(hf), str(hf))
    torch.save({"args": argparse.Namespace(**arguments), "iteration": 3}, tmp_path / "common.pt")
    assert check_common(tmp_path, model.geometry, text_section(model, hf)) == 3


# --- adapters that are not whole


@pytest.mark.parametrize(
    ("layers", "config", "says"),
    [
        ((0,), {"target_modules": ["q_proj"]}, r"'q_proj', of which 1 are missing: .*layers\.1"),
        ((0, 1), {"target_modules": ["q_proj", "v_proj"]}, "'v_proj', of which there is nothing"),
        ((0, 1), {"modules_to_save": ["lm_head"]}, "'lm_head', of which there is nothing"),
        ((0, 1), {"target_parameters": ["mlp.experts.down_proj"]}, "down_proj', of which there is nothing"),
        ((0,), {"target_modules": r".*\.q_proj"}, "of which 1 are missing"),
    ],
)
def test_an_adapter_that_lacks_what_was_trained(
    hf: Path, tmp_path: Path, layers: tuple[int, ...], config: dict[str, Any], says: str
) -> None:
    with pytest.raises(IncompleteSourceError, match=says):
        merge_lora_conversion(lora(tmp_path / "lora", layers, **config), hf)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj"], "layers_to_transform": [0]},
        {"target_modules": ["q_proj"], "exclude_modules": ["model.layers.1.self_attn.q_proj"]},
        {"target_modules": ["layers.0.self_attn.q_proj", "a_module_of_another_model"]},
        {"target_modules": "all-linear"},
    ],
    ids=str,
)
def test_an_adapter_of_chosen_layers(hf: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    conversion = merge_lora_conversion(lora(tmp_path / "lora", (0,), **config), hf)
    made = [recipe.target for recipe in conversion.recipes]
    assert len(made) == 1 and made[0].endswith("layers.0.self_attn.q_proj.weight")  # of the others the base's are kept


# --- files that change, layouts that nobody loads, what comes behind the rename


@pytest.mark.parametrize("how", ["written", "replaced"])
def test_a_source_that_changes_during_the_run(base: Path, tmp_path: Path, how: str) -> None:
    path, conversion = base / "model.safetensors", relayout_conversion(base, "v5")

    def change(title: str, total: int, resumed: int) -> None:
        if how == "written":
            with path.open("r+b") as file:
                file.seek(-4, os.SEEK_END)
                file.write(b"abcd")
        else:
            shutil.copy2(path, tmp_path / "copy")
            (tmp_path / "copy").replace(path)

    with pytest.raises(IncompleteSourceError, match=r"model\.safetensors.*changed while it was read"):
        run(conversion, tmp_path / "out", Options(), lambda count: None, None, change)
    assert not list(tmp_path.glob("out*"))


def test_a_layout_that_transformers_does_not_load(hf: Path) -> None:
    assert "no released transformers" in relayout_conversion(hf, "hub").warnings[0]
    assert not relayout_conversion(hf, "v5").warnings


def test_nothing_behind_the_rename_fails_the_run(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: OutputDirectory) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(OutputDirectory, "tidy", fail)
    run(relayout_conversion(hf, "v5"), tmp_path / "out", Options(), lambda count: None)
    assert (tmp_path / "out" / "config.json").is_file() and not (tmp_path / "out.partial").exists()


# --- records of which two readers read different things


@pytest.mark.parametrize("extra", ["archive/data/0", "other/data/0"])
def test_records_with_a_name_twice_or_two_roots(extra: str) -> None:
    saved, made = io.BytesIO(), io.BytesIO()
    torch.save(torch.arange(8.0), saved)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(made, "w") as new, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
        new.writestr(extra if "other" in extra else old.namelist()[0].split("/")[0] + "/data/0", bytes(32))
    data = made.getvalue()
    with pytest.raises(UnsafeInputError, match=r"twice|roots"):
        data_start(lambda at, size: data[at : at + size], len(data), TensorInfo((8,), torch.float32), "a record")


# --- entries, factors, options and signals that could be taken for something else


def test_objects_of_no_known_kind(tmp_path: Path) -> None:
    save(tmp_path / "known", {"model.w": torch.ones(2)}, objects={"rng_state": [1]})
    assert DcpReader(tmp_path / "known").skipped
    save(tmp_path / "other", {"model.w": torch.ones(2)}, objects={"model.layers.0.hidden": [1]})
    with pytest.raises(UnsupportedError, match=r"no known kind.*model\.layers\.0\.hidden"):
        DcpReader(tmp_path / "other")


def test_a_warning_names_parameters_without_masters(tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "b": torch.ones(2), "optimizer.state.fp32_param.a": torch.ones(2)}
    save(tmp_path / "dcp", state)
    reader = DcpReader(tmp_path / "dcp", from_master=True)
    assert reader.without_masters == ("b",) and "b" in masters_missing(reader.without_masters)[0]


def test_float64_is_no_dtype_of_these_models(hf: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["convert", "relayout", str(hf), str(tmp_path / "out"), "--layout", "v5", "--dtype", "float64"])
    assert ended.value.code == 2


def test_a_signal_is_not_taken_for_a_fault_of_a_file() -> None:
    with pytest.raises(ResumableError, match="SIGTERM"), stoppable():
        try:
            signal.raise_signal(signal.SIGTERM)
        except Exception as error:  # as code does that turns every fault into its own error
            raise UnsafeInputError("a damaged file") from error
