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
from asyncckpt.checkpointer.pending import PendingSave

__all__ = [
    "Checkpointer",
    "PendingSave",
    "inspect",
    "restore",
    "restore_into",
    "save",
    "verify",
]
