"""bfloat16 parameters and averages with stochastic rounding against float32 ones: the losses of fine-tuning.

    python -m jobs.bench.rounding [--quick] [--steps N] [--out DIR] [--json FILE]

A small Qwen3 model of bytes is trained on this project's own pages in float32, then fine-tuned on other pages, from the
same weights with the same batches: in float32, and with bfloat16 parameters and averages rounded stochastically or to
the nearest value; by AdamW and by Muon. The model computes with a copy in the same dtype in all of them, so that what
is stored makes the whole difference. --out: a chart of the losses for each optimizer. On a GPU or a CPU.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from jobs.bench.claims import Claim, at_least, at_most, report
from schemas.strict import check_config
from train.chart import Curve, chart_file
from train.config_optimizer import OptimizerConfig
from train.models.inputs import ModelInputs
from train.models.spec import SPECS
from train.ops.registry import eager_ops
from train.ops.segments import Segments
from train.optim.build import make_optimizer
from train.optim.clip import clip_gradients
from train.optim.groups import parameter_groups
from train.optim.schedule import LrScheduler, Schedule

PAGES = Path(__file__).resolve().parents[2] / "docs"
LENGTH = 128  # bytes of a document
LEARN_LR, TUNE_LR = 2e-3, 5e-5
MOST_OFF, LEAST_STALL = 1.0, 30.0  # percent; the second says "stalls", and goes with the text and the rate
HALF = {"master_dtype": "bf16", "state_dtype": "bf16"}
WAYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, stochastic": HALF,
    "bf16, nearest": HALF | {"stochastic_rounding": False},
}
KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "adamw", "betas": [0.9, 0.999]},
    "Muon": {"type": "muon", "betas": [0.9, 0.999]},
}


@dataclass(frozen=True)
class Size:
    """width, layers: of the model; documents: of a step; learn, tune: steps of both trainings."""

    width: int = 128
    layers: int = 3
    documents: int = 16
    learn: int = 400
    tune: int = 500


QUICK = Size(width=64, layers=2, documents=4, learn=120, tune=120)


@dataclass(frozen=True)
class Text:
    """bytes as int64 [n], of pages that are learned first, fine-tuned on, and held out."""

    first: Tensor
    other: Tensor
    held: Tensor

    @classmethod
    def read(cls, device: torch.device) -> Text:
        """Pages in alphabetical order: half are learned first; of the others every tenth part is held out."""
        pages = [
            torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) for path in sorted(PAGES.glob("*.md"))
        ]
        half = len(pages) // 2
        parts = torch.cat(pages[half:]).split(2048)
        held = [part for number, part in enumerate(parts) if number % 10 == 5]
        other = [part for number, part in enumerate(parts) if number % 10 != 5]
        return cls(*(torch.cat(some).to(device, torch.int64) for some in (pages[:half], other, held)))


def batch(text: Tensor, starts: Tensor) -> ModelInputs:
    """Documents of LENGTH bytes from these places on."""
    rows = text[starts[:, None] + torch.arange(LENGTH + 1, device=text.device)]
    count = len(starts)
    position = torch.arange(LENGTH, device=text.device).repeat(count).expand(3, -1)
    segments = Segments.from_lengths([LENGTH] * count, text.device)
    return ModelInputs(rows[:, :-1].flatten(), position, segments, count * LENGTH, rows[:, 1:].flatten())


def drawn(text: Tensor, documents: int, step: int) -> ModelInputs:
    """The batch of a step."""
    generator = torch.Generator().manual_seed(step)
    return batch(text, torch.randint(len(text) - LENGTH - 1, (documents,), generator=generator).to(text.device))


class Run:
    """A model that computes with a copy of its parameters."""

    def __init__(self, size: Size, device: torch.device) -> None:
        config_class: Any = SPECS["qwen3"].config_class
        config = config_class(
            vocab_size=256, hidden_size=size.width, intermediate_size=3 * size.width, num_hidden_layers=size.layers,
            num_attention_heads=4, num_key_value_heads=2, head_dim=size.width // 4, tie_word_embeddings=False,
        )  # fmt: skip
        self.model: nn.Module = SPECS["qwen3"].build(config, eager_ops(device)).to(device)
        self.compute = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.device = device
        torch.manual_seed(0)
        for parameter in self.model.parameters():
            nn.init.ones_(parameter) if parameter.ndim == 1 else nn.init.normal_(parameter, std=0.02)

    def loss(self, inputs: ModelInputs) -> Tensor:
        copies = {name: parameter.to(self.compute) for name, parameter in self.model.named_parameters()}
        found: Tensor = functional_call(self.model, copies, (inputs,)).loss
        return found

    def train(self, text: Tensor, size: Size, steps: int, keys: dict[str, Any]) -> list[float]:
        """Loss of each step."""
        config = check_config({"lr_warmup_steps": 10, "weight_decay": 0.01} | keys, OptimizerConfig)
        optimizer = make_optimizer(self.model, parameter_groups(self.model, config), config, seed=7)
        scheduler = LrScheduler(optimizer, Schedule.of(config, steps))
        losses = []
        for step in range(steps):
            loss = self.loss(drawn(text, size.documents, step))
            loss.backward()
            clip_gradients(self.model.parameters(), config.max_grad_norm, self.device)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.detach())
        return [float(loss) for loss in losses]

    @torch.no_grad()
    def held_out(self, text: Tensor) -> float:
        starts = torch.arange(0, len(text) - LENGTH - 1, LENGTH, device=text.device)
        return float(torch.stack([self.loss(batch(text, some)) for some in starts.split(32)[:-1] or [starts]]).mean())


def claims(size: Size, out: Path | None, device: torch.device) -> list[Claim]:
    """Of both optimizers."""
    text, found = Text.read(device), []
    start = Run(size, device)
    start.train(text.first, size, size.learn, {"type": "adamw", "lr": LEARN_LR})
    weights = {name: parameter.detach().clone() for name, parameter in start.model.named_parameters()}
    before = start.held_out(text.held)
    for kind, keys in KINDS.items():
        held, curves = {}, []
        for way, dtypes in WAYS.items():
            run = Run(size, device)
            run.model.load_state_dict(weights)
            run.model.to(torch.bfloat16 if dtypes else torch.float32)
            losses = run.train(text.other, size, size.tune, {"lr": TUNE_LR} | keys | dtypes)
            held[way] = run.held_out(text.held)
            window = max(1, size.tune // 50)
            means = [sum(losses[at : at + window]) / window for at in range(0, size.tune - window + 1, window)]
            curves.append(Curve(way, [(number * window, mean) for number, mean in enumerate(means)]))
        found += _compare(kind, before, held, size)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            picture = chart_file(f"{kind}: loss of fine-tuning, by step", curves, from_zero=False)
            (out / f"rounding_{kind.lower()}.svg").write_text(picture, encoding="utf-8")
    return found


def _compare(kind: str, before: float, held: dict[str, float], size: Size) -> list[Claim]:
    said = f"{size.tune} steps from a held-out loss of {before:.4f}: "
    said += ", ".join(f"{way} {loss:.4f}" for way, loss in held.items())
    full = held["fp32"]
    off = abs(held["bf16, stochastic"] - full) / full * 100
    lost = (held["bf16, nearest"] - full) / (before - full) * 100
    kept = (held["bf16, stochastic"] - full) / (before - full) * 100
    return [
        at_most(f"{kind}: bf16 with stochastic rounding, loss off float32's", off, MOST_OFF, "%", said),
        at_least(f"{kind}: bf16 to the nearest, share of the progress that is lost", lost, LEAST_STALL, "%", said),
        Claim(f"{kind}: with stochastic rounding, share that is lost", round(kept, 2), "%", "", None, said),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps")
    parser.add_argument("--steps", type=int, help="of fine-tuning")
    parser.add_argument("--out", type=Path, help="folder for the charts")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else Size()
    if arguments.steps:
        size = Size(size.width, size.layers, size.documents, size.learn, arguments.steps)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return 0 if report("rounding", claims(size, arguments.out, device), arguments.json) else 1


if __name__ == "__main__":
    sys.exit(main())
