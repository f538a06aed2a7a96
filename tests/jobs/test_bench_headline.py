"""What the headline benchmark does by itself: data that it draws, the model it describes, how it reads a profile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml

from jobs.bench.headline_data import make_data
from jobs.bench.headline_parts import FAST
from jobs.bench.headline_profile import group_of, watched_of
from jobs.bench.headline_setup import DOCUMENTS, QUICK_DOCUMENTS, Phase, Run, parse_setting, run_config, write_model
from schemas.strict import check_config
from train.config import OmniConfig
from train.models.spec import build_foundation_model
from train.ops.registry import Device, bind_ops, resolve


def test_drawn_documents_have_their_tokens(tmp_path: Path) -> None:
    found = make_data(tmp_path, "4k", quick=True)
    wanted = QUICK_DOCUMENTS["4k"]
    assert found["documents"] == wanted.count
    assert wanted.tokens - 3 <= found["total"] <= wanted.tokens
    assert found["video"] + found["audio"] == wanted.media_tokens
    assert make_data(tmp_path, "4k", quick=True) == found  # not drawn again


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_real_documents_are_mostly_pictures_and_sound(kind: str) -> None:
    document = DOCUMENTS[kind]
    share = document.media_tokens / document.tokens
    assert 0.45 < share < 0.5 if kind.endswith("half") else 0.9 < share < 1


def test_model_has_the_size_of_the_released_one(tmp_path: Path) -> None:
    device = Device("cpu")
    folder = write_model(tmp_path, 48, quick=False)
    model = build_foundation_model(folder, bind_ops(resolve({}, device, "float32"), device, "float32"), device="meta")
    sizes = {"text": 0, "towers": 0}
    for name, parameter in model.named_parameters():
        sizes["towers" if name.startswith(("visual.", "audio_tower.")) else "text"] += parameter.numel()
    assert sizes["text"] == pytest.approx(30.53e9, rel=1e-3)
    assert sizes["towers"] == pytest.approx(1.2e9, rel=0.05)


def test_settings_reach_the_configuration(tmp_path: Path) -> None:
    settings = dict(parse_setting(text) for text in ("train.accelerator.ep_size=2", "train.freeze_vit=true"))
    run = Run("full", "train", True, 2, 3, str(tmp_path), str(tmp_path), settings=settings)
    phase = Phase("some", "4k", 1024, 4, 1, 1)
    config = run_config(Run.from_json(run.to_json()), phase)
    assert (config.train.accelerator.ep_size, config.train.freeze_vit) == (2, True)
    assert config.train.global_batch_size == 8
    with pytest.raises(ValueError, match="KEY=VALUE"):
        parse_setting("train.freeze_vit")


def test_the_documented_configuration_is_that_of_the_figures(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/training.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page.partition("## The 30B on two GPUs")[2].partition("\n## ")[0], re.S)
    shown = check_config(yaml.safe_load(text), OmniConfig)
    run = Run("full", "train", False, 2, 48, str(tmp_path), str(tmp_path), settings=FAST)
    timed = run_config(run, Phase("some", "4k", 16384, 8, 1, 1))
    for part in ("accelerator", "gradient_checkpointing", "memory", "global_batch_size", "micro_batch_size"):
        assert getattr(shown.train, part) == getattr(timed.train, part), part
    other = {"lr_decay_style", "weight_decay"}  # a training's own
    assert shown.train.optimizer.model_dump(exclude=other) == timed.train.optimizer.model_dump(exclude=other)
    assert (shown.data.max_seq_len, shown.data.dataloader) == (timed.data.max_seq_len, timed.data.dataloader)
    assert shown.train.logging.log_steps == timed.train.logging.log_steps


def test_profile_counts_gaps_and_groups() -> None:
    def kernel(name: str, start: float, length: float) -> dict[str, object]:
        return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": length}

    events = [
        kernel("gate_up_kernel", 0, 1000),
        kernel("ncclDevKernel_AllGather_RING_LL", 500, 1000),
        kernel("nvjet_tst_128x256", 3000, 1000),
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1500, "dur": 1500},
    ]
    found = watched_of(events, torch.device("cuda"))
    assert found.communication.span == 4.0
    assert found.communication.exposed == 0.5
    assert found.idle == 1.5
    assert "products of experts" in found.table
    assert "aten::mm" not in found.table


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("weight_gradient_kernel", "products of experts"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "communication"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<>", "copies and casts"),
        ("_symmetric_kernel", "optimizer"),
        ("_scale_kernel", "optimizer"),
        ("key_gradients_kernel", "attention"),
        ("query_gradient_kernel", "attention"),
        ("forward_kernel", "attention"),
        ("_forward_kernel", "norms, rope, loss"),
        ("weight_gradient_kernel", "products of experts"),
        ("void at::native::vectorized_elementwise_kernel<4>", "element-wise"),
        ("Memcpy DtoD (Device -> Device)", "copies and casts"),
    ],
)
def test_kernels_have_their_groups(name: str, group: str) -> None:
    assert group_of(name) == group
