"""Runs of commands, and their output."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Ran(NamedTuple):
    """Result of a command."""

    status: int
    out: str
    err: str


Run = Callable[..., Ran]
"""Runs the command line with these words; `answer` is typed by the user."""
