"""Sizes and rates as text for people."""

from __future__ import annotations


def nbytes_text(nbytes: float) -> str:
    """Return a size for people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(nbytes) < 1024 or unit == "TiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError("unreachable")


def rate_text(nbytes: float, seconds: float) -> str:
    """Return a rate for people: `2.1 GiB/s`."""
    return f"{nbytes_text(nbytes / seconds)}/s" if seconds > 0 else "-"
