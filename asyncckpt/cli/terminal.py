"""Options, questions, errors and JSON shared by the commands."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from asyncckpt.cli import tables
from asyncckpt.errors import AsyncCheckpointError, UsageError

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def complain(error: AsyncCheckpointError) -> None:
    """Print the error on standard error, on one line."""
    text = " ".join(str(error).splitlines())
    print(f"asyncckpt: {tables.printable(text)}", file=sys.stderr)


def confirm(question: str, otherwise: str) -> None:
    """Ask; if the answer is no, print `otherwise` and exit with status 1."""
    if sys.stdin is None:  # closed
        raise UsageError("standard input is closed, so no question can be asked; pass --yes")
    if not typer.confirm(question):
        typer.echo(otherwise)
        raise typer.Exit(1)


def print_json(document: Any) -> None:
    """Print a JSON document."""
    typer.echo(json.dumps(document, indent=1, allow_nan=False))
