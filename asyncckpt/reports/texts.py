"""Counts, sizes and rates as text."""

from __future__ import annotations

from collections.abc import Sequence

NAMES_MAX = 8
"""Most names that a message lists one by one."""


def counted(number: int, one: str, several: str) -> str:
    """Return a number with its noun: `1 leaf`."""
    return f"{number} {one if number == 1 else several}"


def few(names: Sequence[str], most: int = NAMES_MAX) -> str:
    """Return text that lists the first names, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def nbytes_text(nbytes: float) -> str:
    """Return a size as text: `1.5 GiB`."""
    if abs(nbytes) < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if abs(nbytes) < 1024:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1024:.1f} TiB"


def rate_text(nbytes: float, seconds: float) -> str:
    """Return a rate as text: `2.1 GiB/s`."""
    return f"{nbytes_text(nbytes / seconds)}/s" if seconds > 0 else "-"
