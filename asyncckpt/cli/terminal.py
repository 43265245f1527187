"""Progress bar, errors and JSON of every command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from asyncckpt.cli import tables
from asyncckpt.errors import AsyncCheckpointError
from asyncckpt.reports import Progress

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def complain(error: AsyncCheckpointError) -> None:
    """Print the error on standard error, on one line."""
    text = " ".join(str(error).splitlines())
    print(f"asyncckpt: {tables.printable(text)}", file=sys.stderr)


@contextmanager
def bar(description: str) -> Iterator[Callable[[Progress], None]]:
    """Show a progress bar on standard error where that is a terminal."""
    console = tables.console(sys.stderr)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(description, total=None)

        def moved(state: Progress) -> None:
            shown.update(task, completed=state.done_nbytes, total=state.total_nbytes)

        yield moved


def print_json(document: Any) -> None:
    """Print the document as JSON."""
    typer.echo(json.dumps(document, indent=1, allow_nan=False))
