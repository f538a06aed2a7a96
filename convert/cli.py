"""`omniloom convert`: megatron-to-hf, omni-to-vl, vl-to-omni, omni-to-text, dcp-to-hf, hf-to-dcp, merge-lora, relayout,
inspect, verify.

Errors are raised as OmniloomError; the root command prints them as one line and exits with their code.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from convert.checks_cli import inspect_command, verify_command
from convert.directions import (
    omni_to_text_conversion,
    omni_to_vl_conversion,
    relayout_conversion,
    vl_to_omni_conversion,
)
from convert.job import Conversion, Options, bytes_to_read, casts, check_output, memory_needed, output_of, run
from convert.lora import merge_lora_conversion
from convert.megatron_to_hf import megatron_to_hf_conversion
from convert.output import finished_files
from convert.progress import Meter, gigabytes, shown, stoppable
from convert.shards import SHARD_BYTES
from convert.system_errors import stated
from convert.tensors import dtype_of
from convert.trainer import dcp_to_hf_conversion, hf_to_dcp_conversion
from convert.verify import verify_conversion
from schemas.errors import ConfigError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Translate checkpoints between formats.")

Source = Annotated[Path, typer.Argument(metavar="SOURCE", help="The checkpoint to convert.")]
Output = Annotated[Path, typer.Argument(metavar="OUTPUT", help="A directory that does not exist yet.")]
Base = Annotated[Path, typer.Option("--base", metavar="HF_DIR", help="The model that the source was trained from.")]
MaybeBase = Annotated[
    Path | None, typer.Option("--base", metavar="HF_DIR", help="The model that the source was trained from.")
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="bfloat16, float16 or float32; default: that of the base, else kept.")
]
FromMaster = Annotated[bool, typer.Option("--from-master", help="Take the optimizer's fp32 masters for weights.")]
Workers = Annotated[int, typer.Option("--workers", min=1, help="Threads that read and write.")]
Resume = Annotated[bool, typer.Option("--resume/--no-resume", help="Go on where an earlier run was stopped.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything and print the plan; write nothing.")]
Verify = Annotated[bool, typer.Option("--verify/--no-verify", help="Check the written files before they appear.")]
ShardSize = Annotated[str, typer.Option("--shard-size", help="Of a new weight file at most, such as 5GB or 500MB.")]
Layout = Annotated[
    str, typer.Option("--layout", help="Of fused experts: hub (input dimension first) or v5 (as transformers 5 saves).")
]
_SHARD_SIZE = f"{SHARD_BYTES // 10**9}GB"
_WORKERS = 4
_WRITTEN = (torch.bfloat16, torch.float16, torch.float32)


@app.command("megatron-to-hf")
def megatron_to_hf(
    source: Source,
    output: Output,
    base: Base,
    dtype: Dtype = None,
    from_master: FromMaster = False,
    keep_base_towers: Annotated[
        bool, typer.Option("--keep-base-towers", help="Ignore the checkpoint's own vision and audio towers.")
    ] = False,
    workers: Workers = _WORKERS,
    resume: Resume = True,
    dry_run: DryRun = False,
    verify: Verify = True,
    shard_size: ShardSize = _SHARD_SIZE,
) -> None:
    """Megatron-core torch_dist -> Hugging Face. SOURCE: an iter_* directory or its parent."""
    build = partial(
        megatron_to_hf_conversion,
        source,
        base,
        _dtype(dtype),
        from_master=from_master,
        keep_base_towers=keep_base_towers,
    )
    _convert(build, output, _options(workers, resume, shard_size), dry_run, verify)


@app.command("omni-to-vl")
def omni_to_vl(
    source: Source,
    output: Output,
    dtype: Dtype = None,
    layout: Layout = "hub",
    workers: Workers = _WORKERS,
    resume: Resume = True,
    dry_run: DryRun = False,
    verify: Verify = True,
    shard_size: ShardSize = _SHARD_SIZE,
) -> None:
    """Qwen3-Omni's thinker -> pseudo Qwen3-VL-MoE, for engines that serve Qwen3-VL."""
    build = partial(omni_to_vl_conversion, source, _dtype(dtype), _layout(layout, ("hub", "v5")))
    _convert(build, output, _options(workers, resume, shard_size), dry_run, verify)


@app.command("vl-to-omni")
def vl_to_omni(
    source: Source,
    output: Output,
    base: Base,
    dtype: Dtype = None,
    workers: Workers = _WORKERS,
    resume: Resume = True,
    dry_run: DryRun = False,
    verify: Verify = True,
) -> None:
    """Pseudo Qwen3-VL-MoE -> the Qwen3-Omni that it came from, with these weights in its thinker."""
    build = partial(vl_to_omni_conversion, source, base, _dtype(dtype))
    _convert(build, output, _options(workers, resume), dry_run, verify)


@app.command("omni-to-text")
def omni_to_text(
    source: Source,
    output: Output,
    dtype: Dtype = None,
    workers: Workers = _WORKERS,
    resume: Resume = True,
    dry_run: DryRun = False,
    verify: Verify = True,
    shard_size: ShardSize = _SHARD_SIZE,
) -> None:
    """Qwen3-Omni's thinker without its towers -> Qwen3-MoE."""
    build = partial(omni_to_text_conversion, source, _dtype(dtype))
    _convert(build, output, _options(workers, resume, shard_size), dry_run, verify)


@app.command("dcp-to-hf")
def dcp_to_hf(
    source: Source,
    output: Output,
    base: MaybeBase = None,
    dtype: Dtype = None,
    from_master: FromMaster = False,
    workers: Workers = _WORKERS,
    resume: Resume = True,
    dry_run: DryRun = False,
    verify: Verify = True,
    shard_size: ShardSize = _SHARD_SIZE,
) -> None:
    """A training checkpoint (torch DCP of FSDP2 / expert parallelism) -> Hugging Face. SOURCE: a step's directory, or
    the output directory of a run. Without --base the config.json beside the checkpoint is taken."""
    build = partial(dcp_to_hf_conversion, source, base, _dtype(dtype), from_master)
    _convert(build, output, _options(workers, resume, shard_size), dry_run, verify)


@app.command("hf-to-dcp")
def hf_to_dcp(
    source: Source,
    output: Output,
    dtype: Dtype = None,
    names: Annotated[
        str, typer.Option("--names", help="native (the trainer's) or transformers (its modules).")
    ] = "native",
    workers: Workers = _WORKERS,
    resume: Resume = True,
    dry_run: DryRun = False,
    verify: Verify = True,
) -> None:
    """Hugging Face -> a torch DCP that training of any world size loads."""
    build = partial(hf_to_dcp_conversion, source, names, _dtype(dtype))
    _convert(build, output, _options(workers, resume), dry_run, verify)


@app.command("merge-lora")
def merge_lora(
    source: Source,
    output: Output,
    base: Base,
    dtype: Dtype = None,
    workers: Workers = _WORKERS,
    resume: Resume = True,
    dry_run: DryRun = False,
    verify: Verify = True,
) -> None:
    """A PEFT LoRA adapter added to its base. SOURCE: the adapter's directory."""
    build = partial(merge_lora_conversion, source, base, _dtype(dtype))
    _convert(build, output, _options(workers, resume), dry_run, verify)


@app.command("relayout")
def relayout(
    source: Source,
    output: Output,
    layout: Annotated[str, typer.Option("--layout", help="Of the experts: per-expert, hub or v5.")],
    dtype: Dtype = None,
    workers: Workers = _WORKERS,
    resume: Resume = True,
    dry_run: DryRun = False,
    verify: Verify = True,
    shard_size: ShardSize = _SHARD_SIZE,
) -> None:
    """The same model with its experts stored another way."""
    build = partial(relayout_conversion, source, _layout(layout, ("per-expert", "hub", "v5")), _dtype(dtype))
    _convert(build, output, _options(workers, resume, shard_size), dry_run, verify)


app.command("inspect")(inspect_command)
app.command("verify")(verify_command)


def _dtype(name: str | None) -> torch.dtype | None:
    if name is not None and dtype_of(name) not in _WRITTEN:
        raise ConfigError(f"--dtype {name}: is no dtype that these models are loaded in; bfloat16, float16 or float32")
    return None if name is None else dtype_of(name)


def _layout(name: str, known: tuple[str, ...]) -> str:
    if name not in known:
        raise ConfigError(f"--layout {name}: unknown; known: {', '.join(known)}")
    return name


def _options(workers: int, resume: bool, shard_size: str = _SHARD_SIZE) -> Options:
    return Options(workers, resume, _bytes(shard_size))


def _bytes(text: str) -> int:
    """5GB, 500MB, 2GiB, 1000000."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if found is None or not float(found[1]):
        raise ConfigError(f"--shard-size {text}: is no size; write 5GB or 500MB")
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** " KMGT".index(found[2].upper() or " "))


def _convert(build: Callable[[], Conversion], output: Path, options: Options, dry_run: bool, verify: bool) -> None:
    """Plans a conversion, then runs it or prints the plan."""
    began = time.monotonic()
    verifier = partial(verify_conversion, workers=options.workers) if verify else None
    meter = Meter()
    done = False
    with stated(), stoppable(), shown(meter):
        conversion = build()
        done = dry_run and check_output(conversion, output, options)
        result = None if dry_run else run(conversion, output, options, meter.add, verifier, meter.begin)
    if result is None and not done:
        typer.echo("\n".join(plan_lines(conversion, output, options)))
        return
    if result is None or result.done_before:
        typer.echo(f"{output}: finished by an earlier run; nothing to do")
        return
    for warning in (*conversion.warnings, *(result.verified or {}).get("warnings", ())):
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(
        f"{output}: {gigabytes(result.bytes_written)} GB written in {time.monotonic() - began:.1f} s, "
        f"{gigabytes(result.bytes_read)} GB of the source read; tensors: {', '.join(count_words(conversion))}; "
        + ("verified" if verify else "not verified")
    )


def plan_lines(conversion: Conversion, output: Path, options: Options) -> list[str]:
    """What `--dry-run` prints."""
    sizes = output_of(conversion, options).sizes
    finished = finished_files(output)
    lines = [
        f"{conversion.direction}: {conversion.source} -> {output}",
        f"  read     {gigabytes(bytes_to_read(conversion))} GB of {len(conversion.reader.tensors)} source tensors",
        f"  write    {gigabytes(sum(sizes.values()))} GB in {len(sizes)} files"
        + (f", {len(finished)} of them finished by an earlier run" if finished else ""),
        f"  tensors  {', '.join(count_words(conversion))}",
        f"  memory   about {memory_needed(conversion, options) / 1e6:.0f} MB beside the libraries",
    ]
    lines += [f"  note     {note}" for note in conversion.notes]
    lines += [f"  warning  {warning}" for warning in conversion.warnings]
    lines += [f"  cast     {count} tensors {cast}" for cast, count in sorted(casts(conversion).items())]
    for what, names in (
        ("base", conversion.copies),
        ("drop", {**conversion.reader.skipped, **conversion.dropped}),
    ):
        lines += [f"  {what:<8} {count} tensors: {reason}" for reason, count in sorted(Counter(names.values()).items())]
    lines += [f"  slice    {name}: {count} elements: {why}" for name, (count, why) in conversion.sliced.items()]
    return lines


def count_words(conversion: Conversion) -> list[str]:
    """`138 made`, `231 from the base`, `45 dropped`."""
    dropped = len(conversion.dropped) + len(conversion.reader.skipped)
    words = [f"{len(conversion.recipes)} made"]
    words += [f"{len(conversion.copies)} from the base"] if conversion.copies else []
    return [*words, f"{dropped} dropped"] if dropped else words
