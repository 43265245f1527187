"""Counts, sizes and rates as text."""

from __future__ import annotations


def counted(number: int, one: str, several: str) -> str:
    """Return a number with its noun: `1 leaf`."""
    return f"{number} {one if number == 1 else several}"


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
