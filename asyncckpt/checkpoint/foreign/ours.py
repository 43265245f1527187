"""Files of asyncckpt checkpoints without a commit record, recognized by their names.

An object store may hold them before a commit, during a deletion, or after an aborted save. They may
include Orbax's files, but must not be read as an Orbax checkpoint.
"""

# Rule 1: only names are checked, because the contents may already be deleted.
# Rule 2: fixed-contents objects are deleted last (`stores/objects/remove.py`): they remain as long
#   as any other object of the checkpoint.

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable

from asyncckpt.errors import CheckpointNotFoundError
from asyncckpt.format.record import RECORD_NAME

_FIXED = re.compile(r"\.asyncckpt-[0-9a-f]{32}-fixed-[0-9]{1,9}")
"""In a checkpoint on an object store: fixed-contents objects (`stores/objects/layout.py`)."""

_DATA = re.compile(r"d/[0-9a-f]{32}-[0-9a-z-]{1,64}(\.r[0-9]{1,9})?")
"""In a database: data files, index and nodes, and retries of each (`save/upload.py`,
`save/commit.py`). Names of TensorStore have no dash."""


def is_our_leftover(names: Iterable[str]) -> bool:
    """Return whether a directory with these names is or was an asyncckpt checkpoint."""
    return any(map(_FIXED.fullmatch, names))


def is_our_data(path: str) -> bool:
    """Return whether only asyncckpt writes this path, relative to its database."""
    return _DATA.fullmatch(path) is not None


def without_record(location: str, *, is_database: bool) -> CheckpointNotFoundError:
    """Return the error for a checkpoint directory, or its database, without a record."""
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
