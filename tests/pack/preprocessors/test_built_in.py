"""Which preprocessors are built in."""

import pytest

from pack.config import PackConfig
from schemas.errors import RegistryError
from schemas.registry import PREPROCESSOR_REGISTRY, load_preprocessors

load_preprocessors()


def test_the_visible_list():
    names = PREPROCESSOR_REGISTRY.names()  # other tests register theirs
    assert [n for n in names if PREPROCESSOR_REGISTRY.entry(n).where.startswith("pack.preprocessors.")] == [
        "LLaVA-Video-178K",
        "Video-R1",
        "VoiceAssistant",
        "avqa",
        "llava_instruct",
        "llava_pretrain",
        "llava_video",
        "openai_messages",
        "plain_sft",
        "qwen_omni_offline_av",
        "sharegpt4v_captioner",
        "sharegpt4v_captioner_sft",
        "sharegpt4v_pretrain",
        "sharegpt4v_sft",
        "tulu-3-sft-mixture",
        "video_r1",
        "voice_assistant",
    ]
    assert all(PREPROCESSOR_REGISTRY.entry(name).summary for name in PREPROCESSOR_REGISTRY.names())


def test_the_default_of_the_configuration_is_one():
    assert PackConfig(manifest="m", output="o").source_name in PREPROCESSOR_REGISTRY


@pytest.mark.parametrize("name", PREPROCESSOR_REGISTRY.names())
def test_mistyped_arguments_are_found_before_the_job(name):
    with pytest.raises(RegistryError, match="has no argument 'anser_frm'"):
        PREPROCESSOR_REGISTRY.check_arguments(name, ["anser_frm"])
