"""Progress bar, errors and JSON of every command."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from asyncckpt.cli import tables
from asyncckpt.errors import AsyncCheckpointError
from asyncckpt.reports import ProgressBar, progress_bar

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def complain(error: AsyncCheckpointError) -> None:
    """Print the error on standard error, on one line."""
    text = " ".join(str(error).splitlines())
    print(f"asyncckpt: {tables.printable(text)}", file=sys.stderr)


def bar(description: str) -> ProgressBar:
    """Return a progress bar on standard error where that is a terminal, gone when it ends."""
    return progress_bar(description, transient=True)


def print_json(document: Any) -> None:
    """Print the document as JSON."""
    typer.echo(json.dumps(document, indent=1, allow_nan=False))
