"""Log-probabilities on a GPU, by the operations that training chooses there, against transformers on the same GPU."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.train import pseudo
from tests.train.data.hub import TOKENIZER
from tests.train.logprob_cases import BF16, FP32, MEDIA, agreement, dump_config, dumped, write_rows
from tests.train.models import families
from tests.train.models.checkpoints import laid_out, write
from train.models.omni_thinker import OmniThinker
from train.ops.registry import eager_ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
KINDS = {"text", "image", "video", "audio"}


@pytest.fixture(scope="module", autouse=True)
def _whole_numbers() -> Iterator[None]:
    """Convolutions in float32, not in TF32, which rounds to 10 bits; and no process group that stays."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before
    if dist.is_initialized():
        dist.destroy_process_group()


def aligned_omni(folder: Path) -> Path:
    """As `pseudo.make_omni`, of sizes that kernels for GPUs take."""
    shutil.copytree(TOKENIZER, folder)
    config = pseudo.thinker_config(moe_intermediate_size=40)
    config.audio_config.d_model = 48
    config.save_pretrained(folder)
    model = OmniThinker(config, eager_ops())
    families.randomise(model)
    write(folder, laid_out({name: parameter.detach() for name, parameter in model.named_parameters()}, "per-expert"))
    return folder


@pytest.mark.parametrize(
    ("fsdp", "mean", "most"), [(FP32, 1e-5, 1e-4), (BF16, 0.02, None)], ids=["float32", "bfloat16"]
)
def test_every_modality_equals_transformers(
    tmp_path: Path, fsdp: dict[str, Any], mean: float, most: float | None
) -> None:
    config = dump_config(
        aligned_omni(tmp_path / "model"), write_rows(tmp_path / "rows", 6), tmp_path, accelerator={"fsdp_config": fsdp}
    )
    found = agreement(
        dumped(config, tmp_path / "ours", features=True), dumped(config, tmp_path / "theirs", hub=True, features=True)
    )
    assert {group.name for group in found.groups if group.by == "media"} == set(MEDIA)
    groups = {group.name: group for group in found.groups if group.by == "modality"}
    assert groups.keys() == KINDS
    for group in groups.values():
        assert group.mean_abs <= mean and (most is None or group.max_abs <= most), group
    assert found.only_first == found.only_second == (0, 0)
    assert all(row.relative < (1e-4 if fsdp is FP32 else 5e-2) for row in found.features), found.features
