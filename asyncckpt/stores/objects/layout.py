"""Where things are below the prefix of an object store, and which names are ours.

::

    <root>/<name>/checkpoint.json                        the commit record
    <root>/<name>/default/d/<save id>-<n>[.r<k>]         data, of the k-th try to send them
    <root>/<name>/.asyncckpt-<save id>-fixed-<n>         contents of the fixed names
    <root>/<name>/default/manifest.ocdbt, …              fixed names, written after the record
    <root>/<name>/commit_success.txt                     Orbax's mark on Google's store, last
    <root>/.asyncckpt/probe-<token>                      an experiment; removed at once

The contents of the fixed names are an object and no directory beside `default`, because Orbax
takes every directory of a step for an item that it should restore.
"""

# Rule 1: a name that carries a save id is written by one attempt only, which never writes two
#   contents to it; whoever deletes by save id can therefore hit nobody else's bytes.
# Rule 2: what has no save id in its name is nobody's, and is deleted only where the contents of
#   the save that is being deleted say that it wrote such a name.

from __future__ import annotations

import re
import uuid

from asyncckpt.errors import UsageError
from asyncckpt.ports import RECORD_NAME

CONTROL = ".asyncckpt"
"""Below the root, for everything that belongs to no checkpoint; never listed as one."""

RECORD = RECORD_NAME

SUCCESS = "commit_success.txt"
"""What Orbax looks for on Google's store, where it does not trust renames."""

_SAVE_ID = re.compile(r"[0-9a-f]{32}")
_PROBE = re.compile(r"probe-[0-9a-f]{32}")
_FIXED = re.compile(r"\.asyncckpt-([0-9a-f]{32})-fixed-([0-9]{1,9})")
# One directory for the database: data of a checkpoint that lies deeper belong to another root.
_DATA = re.compile(r"[^/]+/d/([0-9a-f]{32})-[0-9a-z-]{1,64}(\.r[0-9]{1,9})?")


def join(name: str, path: str) -> str:
    """The key of a path of a checkpoint; with ``""`` the checkpoint itself."""
    return f"{name}/{path}" if path else name


def check_save_id(save_id: str) -> str:
    """The save id, by which names of ours can be told from all others.

    Raises:
        UsageError: it is not one.
    """
    if not _SAVE_ID.fullmatch(save_id):
        raise UsageError(
            f"save id {save_id!r}: on object stores pass 32 lower-case hex digits "
            "(uuid.uuid4().hex), by which its objects are recognised",
            found=save_id,
        )
    return save_id


def fixed_path(save_id: str, number: int) -> str:
    """Path in the checkpoint of the `number`-th object with contents of fixed names."""
    return f"{CONTROL}-{save_id}-fixed-{number}"


def fixed_owner(path: str) -> str | None:
    """The save id of an object with contents of fixed names, or None."""
    match = _FIXED.fullmatch(path)
    return match[1] if match else None


def fixed_number(path: str) -> int:
    """Which one of its save an object with contents of fixed names is; -1 for any other path."""
    match = _FIXED.fullmatch(path)
    return int(match[2]) if match else -1


def owner(path: str) -> str | None:
    """The save id of the attempt that wrote this path of a checkpoint; None if none of ours did."""
    match = _DATA.fullmatch(path) or _FIXED.fullmatch(path)
    return match[1] if match else None


def retried(key: str, attempt: int) -> str:
    """The key of the `attempt`-th try (from 0) to send an object."""
    return f"{key}.r{attempt}" if attempt else key


def probe_key() -> str:
    """A key for an experiment that nobody else makes."""
    return f"{CONTROL}/probe-{uuid.uuid4().hex}"


def is_probe(key: str) -> bool:
    """Whether an object is the leftover of an experiment."""
    control, _, name = key.partition("/")
    return control == CONTROL and _PROBE.fullmatch(name) is not None
