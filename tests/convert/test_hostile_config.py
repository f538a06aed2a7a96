"""config.json with values of a wrong kind: a line that names file and key, exit code 2, and no trace of an output."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from convert.directions import omni_to_vl_conversion
from convert.job import Options, run
from jobs.cli import main
from tests.convert.dcp_factory import save
from tests.convert.models import edit_config, make_text, read_weights, rewrite_weights
from tests.convert.refusing import MEGATRON

TEXT, VISION, AUDIO = (("thinker_config", f"{part}_config") for part in ("text", "vision", "audio"))
WRONG: list[tuple[tuple[str, ...], str, Any]] = [
    (TEXT, "num_experts", "8"), (TEXT, "num_experts", 8.0), (TEXT, "num_experts", True), (TEXT, "num_experts", [8]),
    (TEXT, "num_experts", -1), (TEXT, "num_experts", 10**9), (TEXT, "mlp_only_layers", 3),
    (TEXT, "mlp_only_layers", "0"),
    (TEXT, "mlp_only_layers", ["0"]), (TEXT, "mlp_only_layers", {}), (TEXT, "decoder_sparse_step", "1"),
    (TEXT, "num_attention_heads", 0), (TEXT, "num_attention_heads", "4"), (TEXT, "num_key_value_heads", 0),
    (TEXT, "num_key_value_heads", 3), (TEXT, "hidden_size", 0), (TEXT, "hidden_size", 1 << 70),
    (TEXT, "head_dim", "10"), (TEXT, "vocab_size", [1]), (TEXT, "num_hidden_layers", 10**9),
    (TEXT, "num_hidden_layers", 10**30), (TEXT, "moe_intermediate_size", None), (TEXT, "rope_theta", "1e6"),
    (TEXT, "attention_bias", "no"), (TEXT, "tie_word_embeddings", "false"), (TEXT, "max_position_embeddings", "512"),
    (VISION, "deepstack_visual_indexes", 2), (VISION, "deepstack_visual_indexes", "012"), (VISION, "num_heads", 0),
    (VISION, "num_heads", 3), (VISION, "depth", "3"), (VISION, "depth", 10**8), (VISION, "spatial_merge_size", 0),
    (VISION, "patch_size", [4, 4]), (AUDIO, "d_model", 0), (AUDIO, "encoder_layers", 10**9),
    (AUDIO, "num_mel_bins", "16"), ((), "thinker_config", 3), ((), "thinker_config", [1]),
    (("thinker_config",), "text_config", "x"), (("thinker_config",), "vision_config", [1]),
    ((*TEXT, "rope_parameters"), "mrope_section", 3), ((*TEXT, "rope_parameters"), "mrope_section", "311"),
    ((*TEXT, "rope_parameters"), "mrope_section", [3, "1", 1]), ((*TEXT, "rope_parameters"), "rope_theta", [1]),
    ((*TEXT, "rope_parameters"), "rope_theta", 10**400), ((*TEXT, "rope_parameters"), "rope_theta", float("nan")),
    (("thinker_config",), "audio_token_id", "301"), (("thinker_config",), "position_id_per_seconds", "13"),
    (("thinker_config",), "image_token_id", 1.5), ((), "im_start_token_id", [1]),
    ((), "model_type", ["qwen3_omni_moe"]), ((), "model_type", {}), ((), "model_type", None), ((), "model_type", 3),
]  # fmt: skip


def omniloom(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["convert", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def copied(omni: Path, folder: Path) -> Path:
    """A directory with a configuration of its own beside the same weights."""
    folder.mkdir()
    for path in omni.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "config.json").unlink()
    shutil.copy(omni / "config.json", folder / "config.json")
    return folder


@pytest.mark.parametrize(("path", "key", "value"), WRONG, ids=str)
def test_values_of_a_wrong_kind(
    omni: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: tuple[str, ...], key: str, value: Any
) -> None:
    source = copied(omni, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    section = config
    for step in path:
        section = section[step]
    section[key] = value
    if key == "rope_theta" and path == TEXT:
        section["rope_parameters"].pop("rope_theta")
    if key == "tie_word_embeddings":
        config.pop(key, None)
        config["thinker_config"].pop(key, None)
    (source / "config.json").write_text(json.dumps(config))
    began = time.monotonic()
    assert omniloom("omni-to-vl", source, tmp_path / "out") == 2
    message = capsys.readouterr().err
    assert "config.json" in message and key in message and "fault of omniloom" not in message
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]
    assert omniloom("inspect", source) in (0, 2)  # says what it is, and why nothing takes it
    assert time.monotonic() - began < 60  # a size that somebody made up would take hours, or all memory
    assert "fault of omniloom" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", ["", "[]", "3", "null", "{", '{"a": 1, "a": 2}', '{"a":' * 100_000, "[" * 100_000, "\xff\xfe", "NaN",
                '{"model_type": ' + "9" * 5000 + "}"]
)  # fmt: skip
def test_what_is_no_object(omni: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    source = copied(omni, tmp_path / "source")
    (source / "config.json").write_bytes(content.encode("latin1"))
    for command in (["omni-to-vl", source, tmp_path / "out"], ["inspect", source], ["verify", source]):
        assert omniloom(*command) == 2
        message = capsys.readouterr().err
        assert "config.json" in message and "fault of omniloom" not in message
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("name", ["generation_config.json", "chat_template.json"])
@pytest.mark.parametrize("content", ["", "[]", "3", "{", "[" * 100_000, '{"a": 1, "a": 2}'])
def test_small_files_that_are_no_objects(
    omni: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str
) -> None:
    source = copied(omni, tmp_path / "source")
    (source / name).unlink(missing_ok=True)
    (source / name).write_text(content)
    assert omniloom("omni-to-text", source, tmp_path / "out") == 2
    message = capsys.readouterr().err
    assert name in message and "fault of omniloom" not in message


def test_a_mixture_of_experts_must_say_of_how_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_text(tmp_path / "source")
    edit_config(source, num_experts=None, num_local_experts=None)
    capsys.readouterr()
    assert omniloom("relayout", source, tmp_path / "out", "--layout", "v5") == 2
    assert "config.json.num_experts: missing" in capsys.readouterr().err
    edit_config(source, num_local_experts=4)  # as some classes of transformers 5 call it
    assert omniloom("relayout", source, tmp_path / "out", "--layout", "v5") == 0


def test_a_dense_family_has_no_experts_whatever_it_says(tmp_path: Path) -> None:
    source = make_text(tmp_path / "source", moe=False)
    edit_config(source, num_experts=4, mlp_only_layers=[], decoder_sparse_step=1, moe_intermediate_size=8)
    assert omniloom("hf-to-dcp", source, tmp_path / "dcp") == 0


def test_a_million_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_text(tmp_path / "source")
    for layers, experts in ((1_000_000, 4), (100_000, 100_000)):
        edit_config(source, num_hidden_layers=layers, num_experts=experts)
        for command in (
            ["inspect", source],
            ["relayout", source, tmp_path / "out", "--layout", "v5"],
            ["verify", source],
            ["hf-to-dcp", source, tmp_path / "out"],
        ):
            began = time.process_time()
            assert omniloom(*command) in (0, 2, 7, 8)
            assert time.process_time() - began < 60  # ten times what it takes; layer by layer it would be hours
    assert "fault of omniloom" not in capsys.readouterr().err


def test_a_base_that_means_another_computation(omni: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vl = tmp_path / "vl"
    run(omni_to_vl_conversion(omni), vl, Options(), lambda count: None)
    for path in ((), ("text_config",)):
        if path:
            edit_config(vl, *path, rms_norm_eps=0.5)
    assert omniloom("vl-to-omni", vl, tmp_path / "out", "--base", omni) == 7
    assert "rms_norm_eps" in capsys.readouterr().err


def test_shapes_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not a failed verification: nothing was written."""
    base = make_text(tmp_path / "base")
    weights = read_weights(base)
    name = "model.layers.0.self_attn.q_proj.weight"
    source = Path(shutil.copytree(base, tmp_path / "source"))
    rewrite_weights(source, weights | {name: weights[name][:-1].clone()})
    capsys.readouterr()
    assert omniloom("relayout", source, tmp_path / "out", "--layout", "v5") == 7
    assert name in capsys.readouterr().err
    save(tmp_path / "dcp", weights | {name: weights[name].T.contiguous()})
    assert omniloom("dcp-to-hf", tmp_path / "dcp", tmp_path / "out", "--base", base) == 7
    assert name in capsys.readouterr().err


@pytest.mark.parametrize("shape", [(), (0,), (3, 4, 5)])
def test_tensors_that_tell_sizes_but_have_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: tuple
) -> None:

    source = make_text(tmp_path / "source")
    edit_config(source, head_dim=None)
    weights = read_weights(source)
    rewrite_weights(source, weights | {"model.layers.0.self_attn.q_norm.weight": torch.zeros(shape)})
    capsys.readouterr()
    assert omniloom("relayout", source, tmp_path / "out", "--layout", "v5") in (2, 7)
    assert "fault of omniloom" not in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [3, ["bfloat16"], "int8", "bfloat17"])
def test_a_dtype_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: Any) -> None:
    base = tmp_path / "base"
    base.mkdir()
    config = json.loads((MEGATRON / "tp1" / "hf_ref" / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "dtype": dtype, "torch_dtype": dtype}))
    assert omniloom("megatron-to-hf", MEGATRON / "tp1", tmp_path / "out", "--base", base) == 2
    message = capsys.readouterr().err
    assert "config.json" in message and "dtype" in message


def test_half_a_pair_of_surrogates(omni: Path, tmp_path: Path) -> None:
    """JSON can say it, UTF-8 cannot."""
    source = copied(omni, tmp_path / "source")
    edit_config(source, "thinker_config", "text_config", hidden_act="\ud800")
    assert omniloom("omni-to-vl", source, tmp_path / "vl") == 0
    assert json.loads((tmp_path / "vl" / "config.json").read_text())["text_config"]["hidden_act"] == "\ud800"
    assert omniloom("relayout", source, tmp_path / "v5", "--layout", "v5", "--dtype", "bfloat16") == 0
