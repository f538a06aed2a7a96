"""Adapters of a model of transformers (`model.backend: transformers`) against those of the native one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel

from tests.train.lora.adapted import DENSE, EXPERTS, adapted, adapter_value, add, lora_config
from tests.train.lora.test_layers import documents, gradients
from tests.train.lora.test_peft import distance, logits_of, write
from tests.train.models import families
from tests.train.models.checkpoints import save_model
from train.lora.apply import adapter_names
from train.models.hub_model import HubModel
from train.models.inputs import text_inputs
from train.models.spec import build_foundation_model
from train.ops.registry import eager_ops
from train.parallel.loading import fill_from_hub, give_memory

KEYS = {"lora_modules": [*DENSE, *EXPERTS, "lm_head"], "rank_pattern": {"lm_head": 4}}


@pytest.fixture
def model(tmp_path: Path) -> HubModel:
    save_model("dense", tmp_path / "base")
    found = build_foundation_model(tmp_path / "base", eager_ops(), device="meta", backend="transformers")
    assert isinstance(found, HubModel)
    add(found, lora_config(**KEYS))
    give_memory(found, torch.device("cpu"))
    fill_from_hub(found, tmp_path / "base", show=False)
    found.restore_buffers()
    with torch.no_grad():
        for name in adapter_names(found):
            parameter = found.get_parameter(name)
            parameter.copy_(adapter_value(name, tuple(parameter.shape)))
    return found


def test_it_trains_as_the_native_one(model: HubModel) -> None:
    native, _ = adapted("dense", **KEYS)
    inputs = documents()
    with torch.no_grad():
        assert distance(model(inputs, logits=True).logits, native(inputs, logits=True).logits) < 1e-5
    families.assert_equal_gradients(gradients(model, inputs), gradients(native, inputs))


def test_peft_loads_its_adapter(model: HubModel, tmp_path: Path) -> None:
    write(model, tmp_path / "lora")
    inputs = text_inputs([torch.arange(30)])
    with torch.no_grad():
        expected = model(inputs, logits=True).logits
    theirs = PeftModel.from_pretrained(families.make_pair("dense").reference, tmp_path / "lora")
    assert distance(logits_of(theirs, inputs, {}), expected) < 1e-5
