"""Leftovers of asyncckpt checkpoints without a commit record, recognized by their names.

An object store may hold them before a commit, during a deletion, or after an aborted save. They may
include Orbax's files, but must not be read as a checkpoint of Orbax.
"""

# Rule 1: only names are checked, because contents may already be deleted.
# Rule 2: objects with fixed contents are deleted last (`stores/objects/remove.py`): they remain as
#   long as anything of a checkpoint does.

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable

from asyncckpt.errors import CheckpointNotFoundError
from asyncckpt.format.record import RECORD_NAME

_FIXED = re.compile(r"\.asyncckpt-[0-9a-f]{32}-fixed-[0-9]{1,9}")
"""In a checkpoint: contents of fixed names, only on object stores (`stores/objects/layout.py`)."""

_DATA = re.compile(r"d/[0-9a-f]{32}-[0-9a-z-]{1,64}(\.r[0-9]{1,9})?")
"""In a database: data files, the index and nodes, and retries of each (`save/upload.py`,
`save/commit.py`). TensorStore's own names have no dash."""


def is_our_leftover(names: Iterable[str]) -> bool:
    """Return whether a directory with these names is or was an asyncckpt checkpoint."""
    return any(map(_FIXED.fullmatch, names))


def is_our_data(path: str) -> bool:
    """Return whether a path, relative to its database, is one that only asyncckpt writes."""
    return _DATA.fullmatch(path) is not None


def without_record(location: str, *, is_database: bool) -> CheckpointNotFoundError:
    """Return the error for the directory of a checkpoint, or of its database, without a record."""
    here = location.rstrip("/")
    what, next_step = "an asyncckpt checkpoint", "restore another step"
    if is_database:
        what = f"the database of {what}"
        next_step = f"where {posixpath.dirname(here)} has the record, name that directory"
    return CheckpointNotFoundError(
        f"{here}: this is {what}, but its commit record {RECORD_NAME} is missing: it was never "
        f"committed, was deleted, or lost its record, and is not restored without; {next_step}",
        location=location,
        expected=RECORD_NAME,
        found="nothing",
    )
