"""What a command has printed, and how it is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Ran(NamedTuple):
    """What a command that has ended leaves."""

    status: int
    out: str
    err: str


Run = Callable[..., Ran]
"""Runs the command line with these words; `answer` is what a person types."""
