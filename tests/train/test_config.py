from __future__ import annotations

from typing import Any

import pytest

from schemas.config_keys import describe_keys
from schemas.errors import ConfigError
from schemas.strict import check_config
from train.config import BatchConfig, DataConfig, ModelConfig, OpsImplementationConfig
from train.ops.registry import OPS


def data(**keys: Any) -> DataConfig:
    return check_config({"sources": [{"path": "packed"}], **keys}, DataConfig, "train.yaml")


def test_the_smallest_configuration_has_the_documented_defaults() -> None:
    found = data()
    source = found.sources[0]
    assert (source.label, source.weight, source.source_name) == ("packed", 1.0, None)
    assert (found.max_seq_len, found.lanes, found.dead_samples, found.processor_path) == (16384, 64, "fail", None)
    assert (found.dataloader.num_workers, found.dataloader.prefetch_factor) == (2, None)
    assert found.mm_configs.use_audio_in_video
    assert (found.cache.dir, found.cache.limit_gb) == (None, None)
    batch = BatchConfig()
    assert (batch.global_batch_size, batch.micro_batch_size, batch.num_train_epochs, batch.seed) == (64, 1, 1, 42)


def test_a_source_is_named_after_its_path() -> None:
    found = data(sources=[{"path": "s3://bucket/clips/"}, {"path": "chats.jsonl", "source_name": "openai_messages"}])
    assert [source.label for source in found.sources] == ["clips", "chats.jsonl"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"max_seqlen": 4}, "max_seqlen: unknown key; did you mean 'max_seq_len'"),
        ({"sources": []}, "sources"),
        ({"dead_samples": "skip"}, "dead_samples: is 'skip'"),
        ({"sources": [{"path": "a/x"}, {"path": "b/x"}]}, "several sources have the name 'x'; give each its own"),
        ({"sources": [{"path": "x", "weight": 0}]}, "sources.0.weight"),
        ({"sources": [{"path": "x", "source_args": {"a": 1}}]}, "source_name is missing"),
        ({"dataloader": {"num_workers": -1}}, "dataloader.num_workers"),
        ({"dataloader": {"start_method": "fork"}}, "dataloader.start_method"),
        ({"cache": {"limit_gb": 0}}, "cache.limit_gb"),
    ],
)
def test_mistakes_are_named(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        data(**keys)
    assert said in str(caught.value)


def test_the_model_section_has_the_documented_defaults() -> None:
    found = check_config({"model_path": "hub"}, ModelConfig, "train.yaml")
    assert (found.backend, found.config_path, found.trust_remote_code) == ("native", None, False)
    assert set(found.ops_implementation.model_dump().values()) == {"auto"}


def test_the_keys_are_those_of_the_operations_and_name_every_backend() -> None:
    assert set(OpsImplementationConfig.model_fields) == {entry.key for entry in OPS.values()}
    documented = {info.key: info.doc for info in describe_keys(OpsImplementationConfig)}
    for entry in OPS.values():
        missing = [name for name in entry.backends if name not in documented[entry.key]]
        assert not missing, f"{entry.key} does not say {missing}"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "needs model_path, or config_path"),
        ({"backend": "hf"}, "backend: is 'hf'"),
        ({"trust_remote_code": True}, "trust_remote_code is of backend: transformers"),
        ({"ops_implementation": {"attn": "sdpa"}}, "ops_implementation.attn: unknown key"),
        (
            {"ops_implementation": {"moe_implementation": "fused"}},
            "ops_implementation.moe_implementation: 'fused' is no",
        ),
        ({"ops_implementation": {"moe_implementation": "fused"}}, "write fused_triton; known: auto, fused_triton"),
        ({"ops_implementation": {"attn_implementation": "sdpaa"}}, "did you mean 'sdpa'?"),
    ],
)
def test_mistakes_of_the_model_section_are_named(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config({"model_path": "hub"} | keys if keys else {}, ModelConfig, "train.yaml")
    assert said in str(caught.value)
