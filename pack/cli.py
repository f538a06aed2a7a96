"""`omniloom pack`: plan, run, status, merge, verify, preview, extract, rejects, retry-rejected, gc.

Errors are raised as OmniloomError; the root command prints them as one line and exits with their code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pack import job
from pack.config import PackConfig, PackFile
from pack.extract import extract
from pack.gc import collect_garbage
from pack.plan import PlanChange
from pack.plan_file import load_plan
from pack.reader import PackedDataset
from pack.readme import human_bytes, plural
from pack.rejects import final_rejects, read_plan_commits
from pack.report import bar, summary_table
from pack.status import read_status, status_lines
from pack.storage import Storage, open_storage
from schemas.errors import REJECT_REASONS, ConfigError
from schemas.strict import load_config

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Pack raw clips into verified audio/video shards.")
_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}

Target = Annotated[str, typer.Argument(metavar="CONFIG|DATASET", help="A YAML configuration, or an output of pack.")]
Dataset = Annotated[str, typer.Argument(metavar="DATASET|CONFIG", help="An output of pack, or its configuration.")]
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML configuration.")]


@app.command(context_settings=_OVERRIDES)
def run(config: ConfigPath, context: typer.Context) -> None:
    """Plan, pack, merge, verify and preview; goes on where it was stopped. Overrides: pack.video.fps=1 or
    --pack.video.fps 1."""
    settings = load_config(config, context.args, PackFile).pack
    done, change = job.run_job(settings)
    _say_change(change)
    _report(done, settings)


@app.command(context_settings=_OVERRIDES)
def plan(config: ConfigPath, context: typer.Context) -> None:
    """Freeze the manifest into partitions; packs nothing."""
    settings = load_config(config, context.args, PackFile).pack
    planned, change = job.plan_job(settings)
    _say_change(change, always=True)
    size = sum(partition.cost for partition in planned.partitions)
    typer.echo(
        f"{plural(planned.rows, 'row')} of {plural(len(planned.files), 'file')} in "
        f"{plural(len(planned.partitions), 'partition')}, about {human_bytes(size)}, "
        f"fingerprint {planned.fingerprint[:12]}"
    )


@app.command()
def status(dataset: Dataset, as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Where a job stands; works while it runs and after."""
    found = read_status(_storage(dataset))
    typer.echo(json.dumps(found.to_dict()) if as_json else "\n".join(status_lines(found)))


@app.command()
def merge(
    dataset: Dataset,
    allow_partial: Annotated[bool, typer.Option(help="Merge what is there although partitions are missing.")] = False,
) -> None:
    """Write index.json, dataset.json and README.md from the committed partitions."""
    storage = _storage(dataset)
    card = job.merge_job(storage, load_plan(storage), allow_partial)
    Console().print(summary_table(card, storage.location))


@app.command()
def verify(dataset: Dataset) -> None:
    """Read everything again: sizes, hashes, crcs, counts, one clock. Exit code 4 when something is wrong."""
    storage = _storage(dataset)
    found = job.verify_job(storage, load_plan(storage))
    for fault in found.faults[1:]:
        typer.echo(fault, err=True)
    job.check_verified(storage, found)
    typer.echo(
        f"verified: {plural(found.samples, 'sample')} of {plural(found.partitions, 'partition')}, "
        f"{human_bytes(found.bytes)}, no fault"
    )


@app.command()
def preview(
    dataset: Dataset,
    out: Annotated[
        Path | None, typer.Option(help="Where to write the page; default: preview.html in the dataset.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A checkpoint directory: also show each sample's tokens and which of them train."),
    ] = None,
) -> None:
    """Make one HTML page that shows samples: frames, sound, conversation, tokens, histograms."""
    storage = _storage(dataset)
    typer.echo(job.preview_job(storage, load_plan(storage).config, out, tokenizer))


@app.command("extract")
def extract_command(
    dataset: Dataset,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A folder for the files.")],
    ids: Annotated[list[str] | None, typer.Option("--id", help="Only this sample; may be repeated.")] = None,
) -> None:
    """Turn samples back into plain files: frames, sounds, sample.json."""
    packed = PackedDataset(_storage(dataset).location)
    with bar("extracting", len(packed), "samples") as told:
        count = extract(packed, out, ids or (), told.advance)
    typer.echo(f"{plural(count, 'sample')} in {out}")


@app.command()
def rejects(dataset: Dataset, as_json: Annotated[bool, typer.Option("--json", help="A JSON array.")] = False) -> None:
    """List the rejected rows: id, source, stage, reason, detail."""
    storage = _storage(dataset)
    planned = load_plan(storage)
    found = final_rejects(storage, planned, read_plan_commits(storage, planned))
    if as_json:
        typer.echo(json.dumps([reject.model_dump(mode="json") for reject in found], indent=1, ensure_ascii=False))
        return
    count = 0
    for count, reject in enumerate(found, start=1):  # noqa: B007  # counts what was listed
        source = f" [{reject.source}]" if reject.source else ""
        typer.echo(f"{reject.id}{source}  {reject.stage}  {reject.reason}: {reject.detail}")
    if not count:
        typer.echo("no rejected rows")


@app.command("retry-rejected", context_settings=_OVERRIDES)
def retry_rejected(
    target: Target,
    context: typer.Context,
    reason: Annotated[list[str] | None, typer.Option(help="Only rows rejected for this; may be repeated.")] = None,
) -> None:
    """Pack only the rejected rows again, for instance with files that are there now or with a longer rows.timeout_s."""
    if unknown := sorted(set(reason or ()) - REJECT_REASONS.keys()):
        raise ConfigError(f"--reason {unknown[0]}: no such reason; there are {', '.join(REJECT_REASONS)}")
    settings = _settings(target, context.args)
    done, count = job.retry_job(settings, reason or ())
    typer.echo(f"{plural(count, 'rejected row')} tried again" if count else "no rejected rows to try again")
    _report(done, settings)


@app.command()
def gc(
    dataset: Dataset,
    older_than_h: Annotated[
        float, typer.Option(help="Hours after which an attempt of another machine is dead.")
    ] = 24.0,
    dry_run: Annotated[bool, typer.Option(help="Only tell what would be removed.")] = False,
) -> None:
    """Remove dead attempts, partitions of other plans and uploads that lost a race."""
    removed = collect_garbage(_storage(dataset), older_than_h, dry_run)
    for item in removed:
        typer.echo(f"{item.name}  {human_bytes(item.bytes)}  {item.why}")
    verb = "would be removed" if dry_run else "removed"
    typer.echo(f"{len(removed)} {verb}, {human_bytes(sum(item.bytes for item in removed))}")


def _is_config(target: str) -> bool:
    return target.endswith((".yaml", ".yml"))


def _storage(target: str) -> Storage:
    """The output that a command is about: named itself, or by its configuration."""
    return open_storage(load_config(target, (), PackFile).pack.output if _is_config(target) else target)


def _settings(target: str, overrides: list[str]) -> PackConfig:
    """The configuration of a file with overrides, or the one an output was packed with."""
    if _is_config(target):
        return load_config(target, overrides, PackFile).pack
    if overrides:
        raise ConfigError(f"overrides ({overrides[0]}) need the configuration file, not {target}")
    storage = open_storage(target)
    config = load_plan(storage).config
    if relative := [root for root in config.rows.allowed_roots if "://" not in root and not Path(root).is_absolute()]:
        raise ConfigError(
            f"rows.allowed_roots has {relative[0]}, which is relative to where the job was started; name the "
            f"configuration instead of {target}"
        )
    return config.model_copy(update={"output": storage.location})  # it may have been given relative to another folder


def _say_change(change: PlanChange | None, always: bool = False) -> None:
    if change is None:
        if always:
            typer.echo("nothing changed since the last plan")
    elif change.kept or change.dropped:
        said = f"planned again: {change.kept:,} partitions kept, {change.new:,} new"
        if change.dropped:
            said += f", {change.dropped:,} of the former plan no longer used (`omniloom pack gc` removes them)"
        typer.echo(said)


def _report(done: job.Done, settings: PackConfig) -> None:
    storage = open_storage(settings.output)
    if done.nothing_to_do:
        typer.echo("nothing to do: every row is packed or rejected, merged and verified")
    Console().print(summary_table(done.card, storage.location))
    if done.card.totals.samples:
        typer.echo(f"preview: {storage.url(job.PREVIEW_FILE)}")
    job.check_threshold(done.card, settings)
