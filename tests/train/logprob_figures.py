"""`python -m tests.train.logprob_figures FOLDER`: how far trainer and transformers are apart on a tiny Qwen3-Omni, in
float32 and bfloat16, in one process and divided; the table of docs/agreement.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests import dist
from tests.train import pseudo
from tests.train.logprob_cases import BF16, FP32, agreement, dump_config, dumped, write_rows
from train.config import OmniConfig

KINDS = ("text", "image", "video", "audio")
DTYPES = {"float32": FP32, "bfloat16": BF16}
ALONE = "one process"
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {"fsdp 2": {}, "sp 2": {"ulysses_size": 2}, "sp 2, ep 2": {"ulysses_size": 2, "ep_size": 2}},
    4: {
        "fsdp 2 x sp 2, ep 2": {"ulysses_size": 2, "ep_size": 2},
        "2 replicas x fsdp 2": {"dp_replicate_size": 2},
        "sp 4": {"ulysses_size": 4},
    },
}


def config(folder: Path, accelerator: dict[str, Any], model: str = "model") -> OmniConfig:
    sources = [
        {"path": str(folder / "rows/media"), "name": "media"},
        {"path": str(folder / "rows/text.jsonl"), "name": "text", "source_name": "openai_messages"},
    ]
    return dump_config(folder / model, sources, folder / "scratch", accelerator=accelerator)


def divided(folder: Path, world_size: int) -> None:
    """All layouts of so many ranks, by each of them."""
    for dtype, fsdp in DTYPES.items():
        for name, layout in LAYOUTS[world_size].items():
            dumped(config(folder, {"fsdp_config": fsdp, **layout}), folder / dtype / name)


def line(name: str, first: Path, second: Path) -> str:
    """Mean and greatest |d| of all tokens and of each modality."""
    found = {group.name: group for group in agreement(first, second).groups if group.by != "media"}
    cells = [f"{found[kind].mean_abs:.2g}, {found[kind].max_abs:.2g}" for kind in ("all", *KINDS)]
    return f"| {name} | " + " | ".join(cells) + " |"


def figures(folder: Path, count: int = 8) -> list[str]:
    """Lines of Markdown. count: rows of each kind with media; twice as many of text."""
    write_rows(folder / "rows", count)
    for model, chosen in (("model", 2), ("every", 8)):  # of 8 experts; sizes that kernels for 16 bits take
        pseudo.make_omni(folder / model, moe_intermediate_size=40, num_experts_per_tok=chosen)
        for dtype, fsdp in DTYPES.items():
            for name, hub in ((ALONE, False), ("transformers", True)):
                out = folder / (dtype if model == "model" else f"{dtype}-every") / name
                dumped(config(folder, {"fsdp_config": fsdp}, model), out, hub=hub)
    for world_size in LAYOUTS:
        dist.run(world_size, divided, folder, world_size)
    tokens = {
        group.name: group.count for group in agreement(*[folder / "float32" / ALONE] * 2).groups if group.by != "media"
    }
    lines = ["| | all | " + " | ".join(KINDS) + " |", "|---|---|---|---|---|---|"]
    lines.append("| tokens | " + " | ".join(str(tokens[kind]) for kind in ("all", *KINDS)) + " |")
    names = [ALONE, *(name for layouts in LAYOUTS.values() for name in layouts)]
    for dtype in DTYPES:
        reference = folder / dtype / "transformers"
        lines += [line(f"{dtype}, {name}", folder / dtype / name, reference) for name in names]
    every = folder / "bfloat16-every"
    lines.append(line("bfloat16, one process, all experts chosen", every / ALONE, every / "transformers"))
    exact = folder / "float32/transformers"
    lines.append(line("the trainer in bfloat16 from transformers in float32", folder / "bfloat16" / ALONE, exact))
    lines.append(line("transformers in bfloat16 from itself in float32", folder / "bfloat16/transformers", exact))
    return lines


if __name__ == "__main__":
    sys.stdout.write("\n".join(figures(Path(sys.argv[1]))) + "\n")
