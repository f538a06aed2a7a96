"""Makes `jobs/assets/tokenizer` from the tokenizer.json of a Qwen3 model.

    python jobs/assets/make_tokenizer.py QWEN3/tokenizer.json [OUT]

The result is Qwen's byte-level BPE cut to its first merges (the most frequent ones; any text still encodes), with all
special tokens of Qwen3-VL and Qwen3-Omni behind them in their order. Ids therefore differ from the released models';
whoever uses the folder reads them from it. The processor settings are those of the released Qwen3-Omni.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

MERGES = 8000
# What Qwen3-Omni adds to Qwen3's special tokens, in the order of its ids.
OMNI_TOKENS = (
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
)
NAMED_TOKENS = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
PREPROCESSOR: dict[str, Any] = {
    "processor_class": "Qwen3OmniMoeProcessor",
    "image_processor_type": "Qwen2VLImageProcessor",
    "video_processor_type": "Qwen2VLVideoProcessor",
    "feature_extractor_type": "WhisperFeatureExtractor",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "feature_size": 128,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 300,
    "n_samples": 4800000,
    "nb_max_frames": 30000,
    "dither": 0.0,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
}
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- elif part.type == 'audio' -%}<|audio_start|><|audio_pad|><|audio_end|>
{%- else -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""


def cut_tokenizer(full: dict[str, Any]) -> dict[str, Any]:
    """The first MERGES merges and what they make; then the special tokens, Omni's last."""
    model = full["model"]
    by_id = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kept = by_id[: 256 + MERGES]  # 256 bytes, then one token per merge
    made = ["".join(pair) for pair in model["merges"][:MERGES]]
    if kept[256:] != made:
        raise SystemExit("the vocabulary is not 256 bytes followed by one token per merge, in the order of the merges")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"content": a["content"], "special": a["special"], **flags} for a in full["added_tokens"]]
    added += [{"content": token, "special": True, **flags} for token in OMNI_TOKENS]
    return {
        **full,
        "added_tokens": [{"id": len(kept) + i, **token} for i, token in enumerate(added)],
        "model": {
            **model,
            "vocab": {token: i for i, token in enumerate(kept)},
            "merges": [" ".join(pair) for pair in model["merges"][:MERGES]],
        },
    }


def tokenizer_config(tokenizer: dict[str, Any]) -> dict[str, Any]:
    added = {str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in tokenizer["added_tokens"]}
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "extra_special_tokens": NAMED_TOKENS,
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "processor_class": PREPROCESSOR["processor_class"],
        "split_special_tokens": False,
        "unk_token": None,
    }


def main(source: str, out: str) -> None:
    tokenizer = cut_tokenizer(json.loads(Path(source).read_text(encoding="utf-8")))
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    compact = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(compact + "\n", encoding="utf-8")
    for name, content in (("tokenizer_config", tokenizer_config(tokenizer)), ("preprocessor_config", PREPROCESSOR)):
        text = json.dumps(content, ensure_ascii=False, indent=1)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else str(Path(__file__).parent / "tokenizer"))
