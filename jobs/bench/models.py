"""Layers of Qwen3-Omni-30B-A3B at their real width on a GPU: how far ours and transformers' bfloat16 are from float32,
and the time of a layer with each attention backend.

    python -m jobs.bench.models [--quick] [--json FILE]

Two text layers, two blocks of each tower, one packed row of a text document and one with pictures and sound. The
reference is transformers in float32 with the same weights. Needs a CUDA device with about 60 GB.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeThinkerConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerForConditionalGeneration

from jobs.bench.claims import Claim, at_most, report
from train.models.inputs import ModelInputs
from train.models.omni_thinker import OmniThinker
from train.ops.registry import OPS, Device, bind_ops, resolve
from train.ops.segments import Segments

LAYERS = 2
GRID, NUM_MEL = (4, 32, 56), 830  # 1,792 merged patches and a second that is not whole
NOISE = 1.1  # how far beyond transformers' own bfloat16 error ours may be
VIDEO, AUDIO = 151656, 151675


def real_width() -> Any:
    """The thinker's configuration, with two layers of each part."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    text: dict[str, Any] = {
        "vocab_size": 152064, "hidden_size": 2048, "intermediate_size": 768, "num_hidden_layers": LAYERS,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "rope_parameters": rope,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "max_position_embeddings": 65536, "tie_word_embeddings": False,
    }  # fmt: skip
    vision: dict[str, Any] = {"depth": 2, "deepstack_visual_indexes": [0, 1], "out_hidden_size": 2048}
    sound: dict[str, Any] = {"encoder_layers": 2, "output_dim": 2048, "n_window": 50, "n_window_infer": 800}
    tokens: dict[str, Any] = {
        "video_token_id": VIDEO,
        "audio_token_id": AUDIO,
        "image_token_id": 151655,
        "position_id_per_seconds": 13,
    }
    return Qwen3OmniMoeThinkerConfig(text_config=text, vision_config=vision, audio_config=sound, **tokens)


def mixed_row(device: torch.device) -> tuple[ModelInputs, dict[str, Tensor]]:
    """A document of text and one with pictures and sound, for ours and as arguments for transformers."""
    generator = torch.Generator().manual_seed(3)
    pictures, sounds = GRID[0] * GRID[1] * GRID[2] // 4, 8 * 13 + 4
    lengths = [1021, 200 + pictures + sounds + 90]
    ids = torch.randint(0, 150_000, (sum(lengths),), generator=generator)
    first = lengths[0] + 200
    ids[first : first + pictures] = VIDEO
    ids[first + pictures : first + pictures + sounds] = AUDIO
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(3, -1).clone()
    positions[1, first : first + pictures] += torch.arange(pictures) % 28  # the three axes are told apart
    positions[2, first : first + pictures] += torch.arange(pictures) % 16
    labels = torch.cat([torch.cat([part[1:], torch.tensor([-100])]) for part in ids.split(lengths)])
    labels[labels >= 150_000] = -100
    patches = torch.randn(GRID[0] * GRID[1] * GRID[2], 1536, generator=generator)
    mel = torch.randn(128, NUM_MEL, generator=generator)
    rows = torch.arange(len(ids))
    inputs = ModelInputs(
        ids=ids.to(device), position_ids=positions.to(device), segments=Segments.from_lengths(lengths, device),
        num_valid=len(ids), labels=labels.to(device), patches=patches.to(device), grids=[GRID],
        mel=mel.to(device), mel_lengths=[NUM_MEL], vision_rows=rows[ids == VIDEO].to(device),
        audio_rows=rows[ids == AUDIO].to(device),
    )  # fmt: skip
    restart = torch.cat([torch.arange(n) for n in lengths])
    reference = {
        "input_ids": ids[None], "position_ids": torch.cat([restart[None], positions])[:, None],
        "pixel_values_videos": patches, "video_grid_thw": torch.tensor([GRID]),
        "input_features": mel[None], "feature_attention_mask": torch.ones(1, NUM_MEL, dtype=torch.int64),
    }  # fmt: skip
    return inputs, {name: value.to(device) for name, value in reference.items()}


def our_names(name: str) -> str:
    """Of a parameter of transformers 5.17 or 5.24."""
    name = name.replace("model.language_model.", "model.", 1)
    return name.replace("model.visual.", "visual.", 1).replace("model.audio_tower.", "audio_tower.", 1)


def run_reference(model: nn.Module, arguments: dict[str, Tensor], labels: Tensor) -> dict[str, Tensor]:
    """Logits and gradients by our names."""
    model.zero_grad(set_to_none=True)
    dtype = next(model.parameters()).dtype
    cast = {name: value.to(dtype) if value.is_floating_point() else value for name, value in arguments.items()}
    logits = model(**cast, use_cache=False).logits[0]
    F.cross_entropy(logits.float(), labels, ignore_index=-100).backward()
    found = {our_names(name): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {"logits": logits.detach()}


def run_ours(model: nn.Module, inputs: ModelInputs) -> dict[str, Tensor]:
    """The same of ours; the router's auxiliary loss left out."""
    model.zero_grad(set_to_none=True)
    found = model(inputs, logits=True)
    found.ce_loss.backward()
    result = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return result | {"logits": found.logits.detach()}


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> tuple[float, float, str]:
    """(relative error of the logits, of all gradients together, name of the worst gradient)."""
    total, norm, worst = 0.0, 0.0, (0.0, "")
    for name, want in exact.items():
        if name == "logits":
            continue
        difference = (found[name].float() - want.float()).norm().item()
        size = want.float().norm().item()
        total, norm = total + difference**2, norm + size**2
        worst = max(worst, (difference / (size + 1e-12), name))
    logits = (found["logits"].float() - exact["logits"]).norm() / exact["logits"].norm()
    return logits.item(), (total / norm) ** 0.5, worst[1]


def build_ours(config: Any, weights: dict[str, Tensor], device: Device, attention: str) -> OmniThinker:
    names = resolve({"attn_implementation": attention}, device, "bfloat16")
    with torch.device("cuda"):
        model = OmniThinker(config, bind_ops(names, device, "bfloat16")).bfloat16()
    model.load_state_dict(weights)
    return model


def median_ms(step: Callable[[], None], repeats: int) -> float:
    """Of CUDA events, after three runs."""
    for _ in range(3):
        step()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def layer_ms(model: OmniThinker, lengths: list[int], repeats: int) -> float:
    """Forward and backward pass of one text layer."""
    rows = sum(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(3, -1).cuda()
    ids = torch.zeros(rows, dtype=torch.int64, device="cuda")
    inputs = ModelInputs(ids, positions, Segments.from_lengths(lengths, torch.device("cuda")), rows)
    hidden = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        out, _ = model.decode(hidden, inputs)
        out.backward(upstream)

    return median_ms(step, repeats) / LAYERS


def reference_layer_ms(model: Any, lengths: list[int], repeats: int) -> float:
    """The same of transformers, with its experts by grouped_mm and its attention by sdpa."""
    rows = sum(lengths)
    restart = torch.cat([torch.arange(n) for n in lengths]).cuda()
    positions = restart.expand(4, 1, -1)
    hidden = torch.randn(1, rows, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(1, rows, 2048, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        out = model.get_decoder()(inputs_embeds=hidden, position_ids=positions, use_cache=False).last_hidden_state
        out.backward(upstream)

    return median_ms(step, repeats) / LAYERS


def measure(quick: bool) -> list[Claim]:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    config, device = real_width(), Device("cuda", torch.cuda.get_device_capability())
    inputs, arguments = mixed_row(torch.device("cuda"))
    assert inputs.labels is not None
    how: dict[str, Any] = {"attn_implementation": "sdpa"}
    with torch.device("cuda"):
        exact_model = Qwen3OmniMoeThinkerForConditionalGeneration._from_config(
            config, experts_implementation="eager", dtype=torch.float32, **how
        ).eval()
    weights = {our_names(name): p.detach().bfloat16() for name, p in exact_model.named_parameters()}
    for parameter in exact_model.parameters():
        parameter.data.copy_(parameter.data.bfloat16())
    exact = run_reference(exact_model, arguments, inputs.labels)
    peer = exact_model
    peer.zero_grad(set_to_none=True)
    for parameter in peer.parameters():  # not the buffers: frequencies stay in float32, as from_pretrained leaves them
        parameter.data = parameter.data.bfloat16()
    peer.set_experts_implementation("grouped_mm")
    theirs = errors(run_reference(peer, arguments, inputs.labels), exact)
    print(f"transformers bfloat16: logits {theirs[0]:.2e}, gradients {theirs[1]:.2e}, worst {theirs[2]}")
    lengths = [4096] * (1 if quick else 4)
    repeats = 3 if quick else 10
    peer_ms = reference_layer_ms(peer, lengths, repeats)
    del peer, exact_model
    claims = [Claim("transformers: a layer, forward and backward", round(peer_ms, 2), "ms", "", None, _rows(lengths))]
    for name in OPS["attention"].available(device, "bfloat16"):
        if name == "eager":
            continue  # whole score matrices
        torch.cuda.empty_cache()
        model = build_ours(config, weights, device, name)
        logits, gradients, worst = errors(run_ours(model, inputs), exact)
        print(f"{name}: logits {logits:.2e}, gradients {gradients:.2e}, worst {worst}")
        said = f"error to float32 / transformers' own; {gradients:.2e} of gradients"
        claims.append(at_most(f"{name}: logits", logits / theirs[0], NOISE, "x", said))
        claims.append(at_most(f"{name}: gradients", gradients / theirs[1], NOISE, "x", said))
        model.zero_grad(set_to_none=True)
        ours = layer_ms(model, lengths, repeats)
        ratio = f"{peer_ms / ours:.2f} x transformers; {_rows(lengths)}"
        claims.append(Claim(f"{name}: a layer, forward and backward", round(ours, 2), "ms", "", None, ratio))
        del model
    return claims


def _rows(lengths: list[int]) -> str:
    return f"{len(lengths)} documents of {lengths[0]} tokens, bfloat16, {torch.cuda.get_device_name()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter rows, fewer repeats")
    parser.add_argument("--json", type=Path, help="also write the claims here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("jobs.bench.models needs a CUDA device; there is none here", file=sys.stderr)
        return 2
    return 0 if report("layers at real width", measure(arguments.quick), arguments.json) else 1


if __name__ == "__main__":
    sys.exit(main())
