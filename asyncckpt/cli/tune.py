"""The command `tune`: measure a store, and print or plot the results."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Sequence
from typing import Annotated

import typer

import asyncckpt.blocking as blocking
from asyncckpt.cli import opening, tables
from asyncckpt.cli.opening import StorageOption, storage_options
from asyncckpt.cli.terminal import AsJson, Yes, confirm, print_json
from asyncckpt.cli.transfer import Memory, size_nbytes
from asyncckpt.errors import UsageError
from asyncckpt.reports import counted, nbytes_text, progress_bar, rate_text
from asyncckpt.reports.picture import INSTALL_LINE
from asyncckpt.stores.local.failures import reported
from asyncckpt.tune.measure import check_url
from asyncckpt.tune.recommend import MAX_NBYTES, MAX_S, TunePoint, TuneReport

TITLES = {"put": "writing", "get": "reading"}


def tune(
    url: Annotated[str, typer.Argument(metavar="URL", help="The location for checkpoints.")],
    max_bytes: Annotated[
        str,
        typer.Option(
            "--max-bytes",
            metavar="SIZE",
            help=f"Maximum bytes to move, both ways ({nbytes_text(MAX_NBYTES)}).",
        ),
    ] = "",
    max_seconds: Annotated[
        float, typer.Option("--max-seconds", help="Time limit; prints the results so far.")
    ] = MAX_S,
    memory: Memory = "",
    plot: Annotated[
        str, typer.Option("--plot", metavar="FILE", help="Save a plot, for example tune.png.")
    ] = "",
    yes: Yes = False,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Measure an object store and recommend options.

    Writes objects of several sizes below its own prefix, reads them, and removes them.
    """
    max_nbytes = size_nbytes("--max-bytes", max_bytes) or MAX_NBYTES
    memory_nbytes = size_nbytes("--memory", memory)
    options = storage_options(storage_option)
    check_url(url)
    if as_json and not yes:
        raise UsageError("tune --json does not ask: pass --yes")
    _check_plot(plot)
    if not yes:
        typer.echo(
            f"{tables.printable(opening.full_name(url))}: objects below asyncckpt-tune-… are "
            f"written, read and removed: at most {nbytes_text(max_nbytes)} in total, within "
            f"{max_seconds:g} s"
        )
        confirm("Go on?", "nothing was measured")
    with progress_bar("tune", transient=True) as progress:
        report = blocking.tune(
            url,
            max_nbytes=max_nbytes,
            max_s=max_seconds,
            host_memory_nbytes=memory_nbytes,
            storage_options=options,
            progress=progress,
        )
    if as_json:
        print_json({**dataclasses.asdict(report), "best_nbytes_per_s": report.best_nbytes_per_s})
    else:
        _show(report)
    if plot:
        with reported("writing the plot", plot):
            save_plot(report, plot)


def _show(report: TuneReport) -> None:
    for direction, title in TITLES.items():
        latency_s = report.put_latency_s if direction == "put" else report.get_latency_s
        typer.echo(f"{title} with {report.client}: {latency_s * 1e3:.0f} ms for a small request")
        tables.show([_table([point for point in report.points if point.direction == direction])])
        typer.echo("")
    typer.echo(
        f"target_data_file_nbytes={report.target_data_file_nbytes} "
        f"({nbytes_text(report.target_data_file_nbytes)}), concurrency={report.concurrency}; "
        f"for restoring concurrency={report.read_concurrency}"
    )
    typer.echo(f"because {report.reason}")
    for note in report.notes:
        typer.echo(tables.printable(note))


def _table(points: Sequence[TunePoint]) -> tables.Grid:
    streams = sorted({point.streams for point in points})
    rates = {(point.nbytes, point.streams): point.nbytes_per_s for point in points}
    return tables.Grid(
        [">size", *(f">{counted(count, 'stream', 'streams')}" for count in streams)],
        [
            [
                nbytes_text(nbytes),
                *(
                    rate_text(rates[nbytes, count], 1.0) if (nbytes, count) in rates else ""
                    for count in streams
                ),
            ]
            for nbytes in sorted({point.nbytes for point in points})
        ],
    )


# -------------------------------------------------------------------------------------- the plot


def _check_plot(path: str) -> None:
    """Check before measuring that a plot can be drawn and saved."""
    if not path:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"--plot needs the package matplotlib: {INSTALL_LINE}")
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {path}: pass a name in .png, .svg or .pdf", found=suffix)
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise UsageError(f"--plot {path}: there is no such directory", location=path)


def save_plot(report: TuneReport, path: str) -> None:
    """Plot the measurements: a line for each number of streams."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    subplots = figure.subplots(1, 2, sharey=True)
    for axes, (direction, title) in zip(subplots, TITLES.items(), strict=True):
        own = [point for point in report.points if point.direction == direction]
        for streams in sorted({point.streams for point in own}):
            line = sorted(
                (point.nbytes / 2**20, point.nbytes_per_s / 1e6)
                for point in own
                if point.streams == streams
            )
            axes.plot(*zip(*line, strict=True), marker="o", label=f"{streams}")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("size of a request (MiB)")
        axes.set_title(title)
        axes.grid(visible=True, alpha=0.3)
        if direction == "put":
            axes.set_ylabel("MB/s")
            axes.axvline(report.target_data_file_nbytes / 2**20, color="grey", linestyle=":")
        axes.legend(title="streams")
    figure.suptitle(f"{report.location} ({report.client})", parse_math=False)
    figure.savefig(path)
