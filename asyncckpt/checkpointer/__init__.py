"""Saving and restoring: `Checkpointer` and the one-shot functions; the composition root."""

from __future__ import annotations

from asyncckpt.checkpointer.api import (
    Checkpointer,
    inspect,
    restore,
    restore_into,
    save,
    verify,
)
from asyncckpt.checkpointer.collecting import collect_garbage
from asyncckpt.checkpointer.pending import PendingSave
from asyncckpt.checkpointer.transfer import convert, diff, export

__all__ = [
    "Checkpointer",
    "PendingSave",
    "collect_garbage",
    "convert",
    "diff",
    "export",
    "inspect",
    "restore",
    "restore_into",
    "save",
    "verify",
]
