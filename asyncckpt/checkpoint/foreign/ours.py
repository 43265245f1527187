"""What is left of our own checkpoints where there is no commit record, told by its names.

Object stores keep a checkpoint without its record for a while: before it is committed, while it is
deleted, after a save that never ended. It has Orbax's files then, or some of them, and is taken for
no checkpoint of Orbax all the same.
"""

# Rule 1: names decide, never contents, which may be gone already.
# Rule 2: what carries our contents of fixed names keeps them until all else is deleted
#   (`stores/objects/remove.py`): as long as anything is left of a checkpoint, so are they.

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable

from asyncckpt.errors import CheckpointNotFoundError
from asyncckpt.format.record import RECORD_NAME

_FIXED = re.compile(r"\.asyncckpt-[0-9a-f]{32}-fixed-[0-9]{1,9}")
"""In a checkpoint: contents of fixed names, on object stores only (`stores/objects/layout.py`)."""

_DATA = re.compile(r"d/[0-9a-f]{32}-[0-9a-z-]{1,64}(\.r[0-9]{1,9})?")
"""In a database: data (`stages/upload.py`), the index with the nodes (`checkpointer/saves.py`), and
each of them sent again. TensorStore's own names have no dash."""


def is_our_leftover(names: Iterable[str]) -> bool:
    """Whether a directory with these names is a checkpoint of ours, or was."""
    return any(map(_FIXED.fullmatch, names))


def is_our_data(path: str) -> bool:
    """Whether a path, relative to its database, is one that only we write."""
    return _DATA.fullmatch(path) is not None


def without_record(location: str, *, is_database: bool) -> CheckpointNotFoundError:
    """The error for a location that has our names and no record.

    Args:
        location: as it was named by the caller.
        is_database: it is the directory of a database, and not of a checkpoint.
    """
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
