"""config.json of the outputs, field by field, and that nothing is defaulted."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from convert.directions import omni_to_text_conversion, omni_to_vl_conversion
from convert.families import model_of
from convert.model_config import carried_files
from schemas.errors import ConfigError, UnsupportedError
from tests.convert.models import IDS, edit_config

TEXT_AT = ("thinker_config", "text_config")
VISION_AT = ("thinker_config", "vision_config")


SCALING = {"rope_type": "default", "mrope_section": [3, 1, 1], "mrope_interleaved": True}
VL_TEXT = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "dtype": "float32",
    "head_dim": 10,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "max_position_embeddings": 512,
    "mlp_only_layers": [],
    "model_type": "qwen3_vl_moe_text",
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1e6,
    "rope_scaling": SCALING,
    "rope_parameters": {**SCALING, "rope_theta": 1e6},
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 320,
}
VL_VISION = {
    "model_type": "qwen3_vl_moe",
    "depth": 3,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 44,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "out_hidden_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [0, 1],
    "num_position_embeddings": 36,
}


@pytest.fixture
def source(omni: Path, tmp_path: Path) -> Path:
    shutil.copytree(omni, tmp_path / "source")
    return tmp_path / "source"


def vl_config(source: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(omni_to_vl_conversion(source).files["config.json"])
    return config


def test_vl_configuration(source: Path) -> None:
    edit_config(source, eos_token_id=[7, 8])
    (source / "generation_config.json").write_text('{"eos_token_id": 1, "pad_token_id": 9}')
    assert vl_config(source) == {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "dtype": "float32",
        "tie_word_embeddings": False,
        "image_token_id": 302,
        "video_token_id": 303,
        "vision_start_token_id": 306,
        "vision_end_token_id": 307,
        "eos_token_id": [7, 8],
        "pad_token_id": 9,
        "text_config": VL_TEXT,
        "vision_config": VL_VISION,
        "omni_sideband": {
            "position_id_per_seconds": 13,
            "seconds_per_chunk": 2,
            "audio_token_id": IDS["audio_token_id"],
            "audio_start_token_id": IDS["audio_start_token_id"],
            "audio_end_token_id": IDS["audio_end_token_id"],
            "user_token_id": IDS["user_token_id"],
            "im_start_token_id": 151644,
            "im_end_token_id": 151645,
            "source_repository": "source",
            "source_revision": None,
            "source_config_sha256": hashlib.sha256((source / "config.json").read_bytes()).hexdigest(),
        },
    }


def test_configuration_as_the_hub_writes_it(source: Path) -> None:
    """rope_scaling with `type` and `interleaved`, rope_theta beside it, keys of other classes."""
    legacy = {"type": "default", "mrope_section": [3, 1, 1], "interleaved": True, "factor_of_nothing": 1}
    edit_config(source, *TEXT_AT, rope_parameters=None, rope_scaling=legacy, rope_theta=1000000)
    edit_config(source, *TEXT_AT, shared_expert_intermediate_size=0, use_qk_norm=True, use_sliding_window=False)
    edit_config(source, *VISION_AT, apply_vit_abs_pos_embed=True, tokens_per_second=2, image_size=768)
    config = vl_config(source)
    scaling = {"rope_type": "default", "mrope_section": [3, 1, 1], "mrope_interleaved": True}
    assert config["text_config"]["rope_scaling"] == scaling
    assert config["text_config"]["rope_parameters"] == {**scaling, "rope_theta": 1000000}
    assert not {"shared_expert_intermediate_size", "use_qk_norm", "use_sliding_window"} & config["text_config"].keys()
    assert not {"apply_vit_abs_pos_embed", "tokens_per_second", "image_size"} & config["vision_config"].keys()


def test_text_configuration(source: Path) -> None:
    config = json.loads(omni_to_text_conversion(source).files["config.json"])
    assert config["model_type"] == "qwen3_moe"
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["head_dim"] == 10
    assert config["tie_word_embeddings"] is False
    assert config["rope_theta"] == 1e6
    assert config["rope_scaling"] is None
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}
    assert not any("mrope" in json.dumps(value) for value in config.values())


def test_numbers_that_the_weights_tell(source: Path) -> None:
    """head_dim is no field of the thinker's class, and the class default of num_position_embeddings is another."""
    edit_config(source, *TEXT_AT, head_dim=None)
    edit_config(source, *VISION_AT, num_position_embeddings=2304)
    config = vl_config(source)
    assert config["text_config"]["head_dim"] == 10
    assert config["vision_config"]["num_position_embeddings"] == 36


@pytest.mark.parametrize(
    "path",
    [
        *(("thinker_config", key) for key in IDS),
        ("thinker_config", "position_id_per_seconds"),
        ("thinker_config", "seconds_per_chunk"),
        ("im_start_token_id",),
        *(
            (*TEXT_AT, key)
            for key in ("norm_topk_prob", "num_experts_per_tok", "rms_norm_eps", "mlp_only_layers", "vocab_size")
        ),
        *(
            (*VISION_AT, key)
            for key in ("spatial_merge_size", "deepstack_visual_indexes", "hidden_act", "temporal_patch_size")
        ),
    ],
    ids=lambda path: path[-1],
)
def test_missing_value_is_named_and_never_defaulted(source: Path, path: tuple[str, ...]) -> None:
    edit_config(source, *path[:-1], **{path[-1]: None})
    with pytest.raises(ConfigError, match=re.escape(f"config.json.{'.'.join(path)}: missing")):
        omni_to_vl_conversion(source)


@pytest.mark.parametrize("key", ["rope_theta", "mrope_section", "rope_type"])
def test_missing_rotary_value(source: Path, key: str) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [3, 1, 1]}
    rope.pop(key)
    edit_config(source, *TEXT_AT, rope_parameters=rope)
    with pytest.raises(ConfigError, match=rf"text_config\..*{key}: missing"):
        omni_to_vl_conversion(source)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "mrope_section": [3, 1, 1]}}, "type 'yarn'"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window: true"),
        ({"attention_bias": True}, "attention_bias: true"),
    ],
)
def test_what_has_no_counterpart_is_refused(source: Path, values: dict[str, Any], says: str) -> None:
    edit_config(source, *TEXT_AT, **values)
    with pytest.raises(UnsupportedError, match=says):
        omni_to_vl_conversion(source)


def test_source_in_a_hub_cache_names_repository_and_revision(omni: Path, tmp_path: Path) -> None:
    snapshot = (
        tmp_path
        / "models--Qwen--Qwen3-Omni-30B-A3B-Instruct"
        / "snapshots"
        / "26291f793822fb6be9555850f06dfe95f2d7e695"
    )
    shutil.copytree(omni, snapshot)
    sideband = vl_config(snapshot)["omni_sideband"]
    assert sideband["source_repository"] == "Qwen/Qwen3-Omni-30B-A3B-Instruct"
    assert sideband["source_revision"] == "26291f793822fb6be9555850f06dfe95f2d7e695"


def test_tied_head(source: Path) -> None:
    """The configuration decides; without a statement the weights do."""
    config = json.loads((source / "config.json").read_text())
    where = str(source / "config.json")
    assert not model_of(config, where).tied
    config["thinker_config"]["tie_word_embeddings"] = True
    assert model_of(config, where).tied
    del config["thinker_config"]["tie_word_embeddings"], config["thinker_config"]["text_config"]["tie_word_embeddings"]
    with pytest.raises(ConfigError, match="tie_word_embeddings: missing"):
        model_of(config, where)
    assert model_of(config, where, {"thinker.model.norm.weight": None}).tied  # type: ignore[dict-item]


def test_wrong_configuration_files(source: Path) -> None:
    (source / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="holds list; it must be an object"):
        omni_to_vl_conversion(source)
    (source / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        omni_to_vl_conversion(source)
    (source / "config.json").unlink()
    with pytest.raises(ConfigError, match="no such file"):
        omni_to_vl_conversion(source)
    with pytest.raises(ConfigError, match="no such directory"):
        omni_to_vl_conversion(source / "nowhere")


def test_small_files(source: Path) -> None:
    skipped = ("model.safetensors.index.json", "old.bin", ".gitattributes", "omniloom_conversion.json", "clip.mp4")
    for name in (*skipped, "LICENSE"):
        (source / name).write_text("x")
    names = set(carried_files(source))
    assert {"tokenizer.json", "README.md", "LICENSE", "chat_template.jinja"} <= names
    assert not names & {"model.safetensors", "config.json", *skipped}
    (source / "chat_template.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"chat_template\.json: has no chat_template"):
        carried_files(source)
