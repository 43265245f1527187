"""The commands of the command line, and their exit statuses."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Annotated

import typer

from asyncckpt.arguments import ProgressCallback
from asyncckpt.cli import documents, gc, opening, tables, transfer, tune
from asyncckpt.cli.opening import StorageOption, storage_options
from asyncckpt.cli.terminal import AsJson, Yes, complain, confirm, print_json
from asyncckpt.errors import (
    AsyncCheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StoreError,
    UnsupportedFormatError,
    UsageError,
)
from asyncckpt.format.record import RECORD_NAME
from asyncckpt.reports import CheckpointInfo, Damage, VerifyReport, counted, nbytes_text
from asyncckpt.reports.progress import progress_bar
from asyncckpt.session.steps import foreign_steps
from asyncckpt.stores.claims import claim_text
from asyncckpt.stores.paths import below
from asyncckpt.version import VERSION

Verified = VerifyReport | AsyncCheckpointError

app = typer.Typer(
    name="asyncckpt",
    help="Inspect, verify, compare, convert and delete checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def run(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status (see `asyncckpt.cli.main`)."""
    try:
        app(args=list(arguments), prog_name="asyncckpt")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except AsyncCheckpointError as error:
        complain(error)
        return 2 if isinstance(error, UsageError) else 1
    return 0


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"asyncckpt {VERSION}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Inspect, verify, compare, convert and delete checkpoints."""


@app.command("ls")
def list_steps(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="Directory or URL of a run.")],
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """List the steps of a run."""
    with opening.Opened(root, storage_options(storage_option)) as run:
        looked = opening.inspect_steps(run)
        infos = [found for found in looked if isinstance(found, CheckpointInfo)]
        errors = [found for found in looked if isinstance(found, AsyncCheckpointError)]
        for error in errors:
            complain(error)
        if as_json:
            print_json([documents.summary(info) for info in infos])
        elif infos:
            tables.show([tables.listing(infos, tables.terminal_width())])
            # A run without claimed steps has no claims to look up.
            if any(info.epoch for info in infos) and (claim := opening.last_claim(run)):
                text = f"claim {claim.epoch}: {claim_text(claim)}"
                typer.echo(f"\n{tables.printable(text)}")
        elif not errors:
            typer.echo(tables.printable(f"no steps in {root}{run.at_store(foreign_steps)}"))
    if errors:
        raise typer.Exit(1)


@app.command()
def show(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A checkpoint, or a run (its newest step).")
    ],
    with_timeline: Annotated[
        bool, typer.Option("--timeline", help="Show when each stage of the save was busy.")
    ] = False,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Show leaves, shapes, dtypes and files."""
    options = storage_options(storage_option)
    info = opening.inspect_location(path, options, timeline=with_timeline)
    if as_json:
        spans = {"timeline": documents.timeline(info)} if with_timeline else {}
        print_json({**documents.details(info), **spans})
    elif not with_timeline:
        tables.show([tables.heading(info), tables.leaves(info), tables.files(info)])
    elif info.timeline.spans:
        bars = tables.gantt(info.timeline, tables.terminal_width())
        tables.show([tables.heading(info), bars])
    else:
        typer.echo(f"{tables.printable(info.location)} has no timeline")


@app.command()
def verify(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A checkpoint, or a run (all its steps).")
    ],
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Read and check every byte.

    Exit status 1 with a list of the damaged leaves, or if a checkpoint cannot be read; 2 if this
    release does not read the format.
    """
    options = storage_options(storage_option)
    with progress_bar("verify", transient=True) as progress:
        found = _verified(path, options, progress)
    reports = [report for report in found if isinstance(report, VerifyReport)]
    errors = [error for error in found if isinstance(error, AsyncCheckpointError)]
    if as_json:
        print_json(
            {
                "ok": all(report.ok for report in reports) and not errors,
                "checkpoints": [documents.verification(report) for report in reports],
            }
        )
    else:
        for report in reports:
            typer.echo(f"{tables.printable(report.location)}: {report.outcome}")
        damaged = [report for report in reports if not report.ok]
        if damaged:
            tables.show([tables.damages(damaged)])
    for error in errors:
        complain(error)
    unread = all(isinstance(error, UnsupportedFormatError) for error in errors)
    if not unread or not all(report.ok for report in reports):
        raise typer.Exit(1)
    if errors:
        raise typer.Exit(2)


app.command()(transfer.diff)
app.command()(transfer.convert)
app.command()(transfer.export)


@app.command("rm")
def remove(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Steps: ROOT/STEP.")],
    yes: Yes = False,
    storage_option: StorageOption = None,
) -> None:
    """Remove steps of a run."""
    options = storage_options(storage_option)
    places = {opening.removable(path): path for path in paths}
    with contextlib.ExitStack() as opened:
        roots = {root for root, _ in places}
        runs = {root: opened.enter_context(opening.Opened(root, options)) for root in roots}
        for (root, step), path in places.items():
            opening.check_removable(runs[root], step, path)
        if not yes:
            for (root, step), path in places.items():
                typer.echo(f"{tables.printable(path)}  {_summary(runs[root], step)}")
            count = "this checkpoint" if len(places) == 1 else f"these {len(places)} checkpoints"
            confirm(f"Remove {count}?", "nothing was removed")
        for (root, step), path in places.items():
            runs[root].delete(step)
            typer.echo(f"removed {tables.printable(path)}")


app.command()(gc.gc)
app.command()(tune.tune)


def _summary(run: opening.Opened, step: int) -> str:
    try:
        info = run.inspect(step)
    except CorruptCheckpointError:
        return "(damaged)"
    except UnsupportedFormatError:
        return "(of a newer release)"
    size = nbytes_text(info.stored_nbytes)
    return f"{tables.time_text(info)}  {counted(len(info.leaves), 'leaf', 'leaves')}  {size}"


def _verified(path: str, options: opening.Options, progress: ProgressCallback) -> list[Verified]:
    try:
        opened, step = opening.open_checkpoint(path, options)
        with opened:
            return [_verify(opened, step, path, progress)]
    except CheckpointNotFoundError:
        with opening.Opened(path, options) as run:
            steps = opening.candidates(run)
            if not steps:
                raise
            reports = [_listed_step(run, step, progress) for step in steps]
    found = [report for report in reports if report is not None]
    if not found:
        raise CheckpointNotFoundError(
            f"{path}: all steps were deleted during the verification", location=path
        )
    return found


def _listed_step(run: opening.Opened, step: int, progress: ProgressCallback) -> Verified | None:
    """Verify a step of a run; print a message and return None if it was deleted since listed."""
    location = below(run.location, str(step))
    with contextlib.suppress(CheckpointNotFoundError):
        return _verify(run, step, location, progress)
    try:
        if step not in opening.candidates(run):
            text = f"{location}: deleted since the steps were listed; skipped"
            complain(CheckpointNotFoundError(text, location=location))
            return None
        # A replaced step can be read now.
        return _verify(run, step, location, progress)
    except (CheckpointNotFoundError, StoreError) as error:
        return error


def _verify(
    opened: opening.Opened, step: int | None, location: str, progress: ProgressCallback
) -> Verified:
    """Verify a step of a run, or a single checkpoint (None).

    So that other steps are still verified, an unreadable record is reported as damage, and errors
    of the store and for a newer format are returned.
    """
    try:
        return opened.verify(step, progress=progress)
    except CorruptCheckpointError as error:
        damage = Damage(None, error.file or RECORD_NAME, error.offset, str(error))
        return VerifyReport(opening.full_name(location), step, (damage,), 0, 0, 0.0)
    except (StoreError, UnsupportedFormatError) as error:
        return error
