"""The command `gc`: show and remove leftovers of saves that never ended."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer

import asyncckpt.blocking as blocking
from asyncckpt.arguments import check_age
from asyncckpt.cli import opening, tables
from asyncckpt.cli.opening import StorageOption, storage_options
from asyncckpt.cli.terminal import AsJson, Yes, confirm, print_json
from asyncckpt.errors import UsageError
from asyncckpt.reports import counted

LEFTOVERS = ("leftover", "leftovers")

LISTED = 50
"""Names listed before the question; `--json` prints all."""

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([hdw])", re.IGNORECASE)
_UNIT_S = {"h": 3600.0, "d": 24 * 3600.0, "w": 7 * 24 * 3600.0}


def gc(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="Directory or URL of a run.")],
    older_than: Annotated[
        str,
        typer.Option("--older-than", metavar="AGE", help="For example 7d or 3w; a week at least."),
    ] = "7d",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be removed.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
    storage_option: StorageOption = None,
) -> None:
    """Remove old leftovers of saves that never ended.

    Checkpoints and files of other programs are never touched.
    """
    older_than_s = _seconds(older_than)
    options = storage_options(storage_option)
    if as_json and not (yes or dry_run):
        raise UsageError("gc --json does not ask: pass --dry-run, or --yes to remove")
    opening.check_directory(root)

    collect = partial(
        blocking.collect_garbage, root, older_than_s=older_than_s, storage_options=options
    )
    if not (yes or dry_run):
        found = collect(dry_run=True)
        _show(root, found, older_than)
        if not found:
            return
        confirm(f"Remove {counted(len(found), *LEFTOVERS)}?", "nothing was removed")
    found = collect(dry_run=dry_run)
    if as_json:
        print_json(
            {
                "root": opening.full_name(root),
                "older_than_s": older_than_s,
                "dry_run": dry_run,
                "leftovers": found,
            }
        )
    elif dry_run:
        _show(root, found, older_than)
    else:
        typer.echo(f"removed {counted(len(found), *LEFTOVERS)}")


def _show(root: str, found: Sequence[str], older_than: str) -> None:
    if not found:
        typer.echo(f"no leftovers older than {older_than} in {tables.printable(root)}")
        return
    for name in found[:LISTED]:
        typer.echo(tables.printable(name))
    if len(found) > LISTED:
        typer.echo(f"… and {len(found) - LISTED} more")


def _seconds(text: str) -> float:
    """Return the seconds of an age such as 36h, 7d or 2w."""
    found = _AGE.fullmatch(text.strip())
    if found is None:
        raise UsageError(
            f"--older-than {text}: pass hours, days or weeks, for example 7d", found=text
        )
    seconds = float(found[1]) * _UNIT_S[found[2].lower()]
    check_age(seconds, f"--older-than {text}")
    return seconds
