"""The commands `convert`, `diff` and `export`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated, Literal

import typer

import asyncckpt.blocking as blocking
from asyncckpt.cli import documents, tables
from asyncckpt.cli.opening import StorageOption, storage_options
from asyncckpt.cli.terminal import AsJson, complain, print_json
from asyncckpt.errors import AsyncCheckpointError, UsageError
from asyncckpt.options import LeafOptions, RestoreOptions, SaveOptions
from asyncckpt.reports import ConvertReport, counted, progress_bar
from asyncckpt.spec import DTYPES

_SIZE = re.compile(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)

Source = Annotated[
    str, typer.Argument(metavar="SRC", help="A checkpoint, a file, or a run (its newest step).")
]
Target = Annotated[str, typer.Argument(metavar="DST", help="Where to write.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace DST atomically, a directory as a whole.")
]
Zstd = Annotated[bool, typer.Option("--zstd", help="Compress the chunks.")]
Memory = Annotated[
    str, typer.Option("--memory", metavar="SIZE", help="Staging memory, for example 512MiB.")
]
Casts = Annotated[
    list[str] | None,
    typer.Option(
        "--cast", metavar="FROM=TO", help="Store arrays of one dtype as another; repeatable."
    ),
]


def convert(
    source: Source,
    destination: Target,
    to: Annotated[
        Literal["asyncckpt", "safetensors"] | None,
        typer.Option("--to", help="Format of DST; by default from its suffix."),
    ] = None,
    overwrite: Overwrite = False,
    zstd: Zstd = False,
    cast: Casts = None,
    max_file_size: Annotated[
        str,
        typer.Option(
            "--max-file-size", metavar="SIZE", help="Size of the files of a safetensors set."
        ),
    ] = "",
    memory: Memory = "",
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Convert a checkpoint to asyncckpt or safetensors.

    DST in .safetensors is one file; ROOT/STEP becomes a step of a run.
    """
    with progress_bar("convert", transient=True) as progress:
        report = blocking.convert(
            source,
            destination,
            to=to,
            overwrite=overwrite,
            max_file_nbytes=size_nbytes("--max-file-size", max_file_size),
            options=_options(zstd, memory, cast or ()),
            storage_options=storage_options(storage_option),
            progress=progress,
        )
    _show(report, as_json)


def export(
    source: Source,
    destination: Target,
    orbax: Annotated[
        bool, typer.Option("--orbax", help="For Orbax, which reads no leaves in pieces.")
    ] = False,
    overwrite: Overwrite = False,
    zstd: Zstd = False,
    memory: Memory = "",
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Make a copy that Orbax can restore."""
    if not orbax:
        raise UsageError("export: pass --orbax, the only format so far")
    with progress_bar("export", transient=True) as progress:
        report = blocking.export(
            source,
            destination,
            to="orbax",
            overwrite=overwrite,
            options=_options(zstd, memory),
            storage_options=storage_options(storage_option),
            progress=progress,
        )
    _show(report, as_json)


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, a file, or a run.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another to compare with A.")],
    bitwise: Annotated[
        bool,
        typer.Option(
            "--bitwise", help="Compare bits: NaNs with different bits differ, as do 0.0 and -0.0."
        ),
    ] = False,
    limit: Annotated[
        int, typer.Option("--limit", min=0, help="Leaves listed in the tables; 0 for all.")
    ] = 50,
    memory: Memory = "",
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Compare two checkpoints.

    Exit status 1 if they differ, 2 if they cannot be compared.
    """
    try:
        options = RestoreOptions(host_memory_nbytes=size_nbytes("--memory", memory))
        with progress_bar("diff", transient=True) as progress:
            report = blocking.diff(
                first,
                second,
                bitwise=bitwise,
                options=options,
                storage_options=storage_options(storage_option),
                progress=progress,
            )
    except AsyncCheckpointError as error:
        complain(error)
        raise typer.Exit(2) from None
    if as_json:
        print_json(documents.difference(report))
    else:
        if report.changed:
            tables.show([tables.changes(report, limit)])
        for paths, place in ((report.only_first, "first"), (report.only_second, "second")):
            for path in paths[: limit or None]:
                typer.echo(f"only in the {place}: {tables.printable(path)}")
            if limit and len(paths) > limit:
                typer.echo(f"only in the {place}: {len(paths) - limit} more")
        for note in report.notes:
            typer.echo(tables.printable(note))
        found = "equal" if report.equal else f"{len(report.changed)} differ"
        typer.echo(f"{counted(report.leaf_count, 'leaf', 'leaves')} in both, {found}")
    if not report.equal:
        raise typer.Exit(1)


def _show(report: ConvertReport, as_json: bool) -> None:
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    typer.echo(tables.printable(str(report)))
    for note in report.notes:
        typer.echo(tables.printable(note))


def _options(zstd: bool, memory: str, casts: Sequence[str] = ()) -> SaveOptions:
    wanted: dict[str, LeafOptions] = {}
    for cast in casts:
        before, separator, after = cast.partition("=")
        if not separator or before not in DTYPES or after not in DTYPES:
            raise UsageError(
                f"--cast {cast}: pass FROM=TO with two of {', '.join(DTYPES)}", found=cast
            )
        wanted[before] = LeafOptions(dtype=after)
    return SaveOptions(
        compression="zstd" if zstd else None,
        host_memory_nbytes=size_nbytes("--memory", memory),
        leaf_options=(lambda _, spec: wanted.get(spec.dtype)) if wanted else None,
    )


def size_nbytes(option: str, text: str) -> int | None:
    """Return the bytes of a size such as 5GB (decimal) or 5GiB (binary); None if empty."""
    if not text:
        return None
    found = _SIZE.fullmatch(text.strip())
    nbytes = 0
    if found is not None:
        number, unit, binary = found.groups()
        base = 1024 if binary else 1000
        nbytes = int(float(number) * base ** " KMGT".index(unit.upper() or " "))
    if not nbytes:
        raise UsageError(f"{option} {text}: pass a size, for example 500MB or 2GiB", found=text)
    return nbytes
