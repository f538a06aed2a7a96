"""`omniloom demo`: real clips, one of them broken, packed, shown, trained on and converted, in one folder.

OUT/clips/        the clips and their manifest clips.jsonl, copied from the package
OUT/pack.yaml     the configuration; `omniloom pack run OUT/pack.yaml` runs the same job
OUT/packed/       the dataset: shards, index, rows table, card
OUT/preview.html  the page that shows it

The steps stand in `jobs.demo_steps`, what training and conversion add in `jobs.demo_train`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer()


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for everything that the demo makes.")] = Path("demo_out"),
    workers: Annotated[int, typer.Option(min=1, help="Packing processes.")] = 2,
    pack_only: Annotated[bool, typer.Option("--pack-only", help="End after packing and its page.")] = False,
) -> None:
    """Pack real clips with speech, train a tiny Qwen3-Omni on them, stop and resume it, convert it there and back."""
    console = Console(highlight=False)
    what = "packing" if pack_only else "packing, training and conversion, two to four minutes"
    console.print(f"omniloom demo: {what}; everything goes to {out}", soft_wrap=True, markup=False)
    from jobs.demo_steps import run_demo  # noqa: PLC0415  # seconds to import, ten on a busy machine

    run_demo(console, out, workers, pack_only=pack_only)
