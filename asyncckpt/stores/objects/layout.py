"""Keys of an object store, and the recognition of our own.

::

    <root>/<name>/checkpoint.json                        commit record
    <root>/<name>/default/d/<save id>-<n>[.r<k>]         data, sent by the k-th try
    <root>/<name>/.asyncckpt-<save id>-fixed-<n>         content of one fixed name
    <root>/<name>/.asyncckpt-<save id>-x-<path>          mark of a shared attempt, and what its
                                                         processes pass on; removed after the record
    <root>/<name>/default/manifest.ocdbt, …              fixed names, written after the record
    <root>/<name>/commit_success.txt                     Orbax's mark on Google's store, last
    <root>/.asyncckpt/probe-<token>                      an experiment; removed at once
    <root>/.asyncckpt/error-<p>                          the last error of process p, for the job
                                                         that continues the run

The contents of fixed names are not in a directory beside `default`, because Orbax takes every
directory of a step for an item to restore.
"""

# Rule 1: only one attempt writes a name with its save id, and never two contents to one name.
#   Deletion by save id therefore removes no other attempt's bytes.
# Rule 2: a name without a save id belongs to no attempt. It is deleted only if the record of the
#   deleted save lists it.

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable

from asyncckpt.errors import UsageError
from asyncckpt.ports import RECORD_NAME
from asyncckpt.stores.paths import CONTROL, NOTE, note_name

RECORD = RECORD_NAME

LISTED_MAX = 1 << 20
"""Objects listed at most: of a checkpoint, below the control prefix, or names below a root."""

SUCCESS = "commit_success.txt"
"""Mark that Orbax requires on Google's store, where it does not trust renames."""

KEY_MAX_NBYTES = 1024
"""Longest key of an object on S3 and Google Cloud Storage, in bytes of UTF-8."""

KEY_TAIL_NBYTES = 128
"""Longest path of our own below a checkpoint, generously: `<database>/d/<save id>-<n>.r<k>`."""

_SAVE_ID = re.compile(r"[0-9a-f]{32}")
_PROBE = re.compile(r"probe-[0-9a-f]{32}")
_FIXED = re.compile(r"\.asyncckpt-([0-9a-f]{32})-fixed-[0-9]{1,9}")
_EXCHANGE = re.compile(r"\.asyncckpt-([0-9a-f]{32})-x-[A-Za-z0-9._-]{1,64}")
# One directory for the database: data that lie deeper belong to a checkpoint of another root.
_DATA = re.compile(r"[^/]+/d/([0-9a-f]{32})-[0-9a-z-]{1,64}(\.r[0-9]{1,9})?")


def join(name: str, path: str) -> str:
    """Return the key of a path of a checkpoint; with ``""`` the checkpoint itself."""
    return f"{name}/{path}" if path else name


def check_save_id(save_id: str) -> None:
    """Raise `UsageError` unless the save id is 32 lower-case hex digits, unlike other names."""
    if not _SAVE_ID.fullmatch(save_id):
        raise UsageError(
            f"save id {save_id!r}: on object stores pass 32 lower-case hex digits "
            "(uuid.uuid4().hex), which mark the objects of the save",
            found=save_id,
        )


def check_key(url: str, path: str = "") -> None:
    """Check that an object's key, and those below it, are short enough for the store.

    Args:
        url: URL of the object or checkpoint.
        path: longest path below it; the library's own by default.

    Raises:
        UsageError: the key would exceed `KEY_MAX_NBYTES`.
    """
    scheme, _, rest = url.partition("://")
    nbytes = len(rest.partition("/")[2].encode()) + (len(path.encode()) or KEY_TAIL_NBYTES)
    if scheme.lower() in ("s3", "s3a", "gs", "gcs") and nbytes > KEY_MAX_NBYTES:
        raise UsageError(
            f"{url}: keys below it would have up to {nbytes} bytes, and the store allows "
            f"{KEY_MAX_NBYTES}; choose a shorter root or name",
            location=url,
            expected=KEY_MAX_NBYTES,
            found=nbytes,
        )


def fixed_path(save_id: str, number: int) -> str:
    """Return the path of the object with the content of an attempt's `number`-th fixed name."""
    return f"{CONTROL}-{save_id}-fixed-{number}"


def is_fixed(path: str) -> bool:
    """Return whether a path of a checkpoint is an object with the content of a fixed name."""
    return _FIXED.fullmatch(path) is not None


def exchange_path(save_id: str, path: str) -> str:
    """Return the path of the object that a process of an attempt passes on as `path`."""
    return f"{CONTROL}-{save_id}-x-{path}"


def is_exchange(path: str) -> bool:
    """Return whether a path of a checkpoint was exchanged by processes of an attempt."""
    return _EXCHANGE.fullmatch(path) is not None


def owner(path: str) -> str | None:
    """Return the save id of the attempt that wrote this path of a checkpoint, or None."""
    match = _DATA.fullmatch(path) or _FIXED.fullmatch(path) or _EXCHANGE.fullmatch(path)
    return match[1] if match else None


def retried(key: str, attempt: int) -> str:
    """Return the key of the `attempt`-th try (from 0) to send an object."""
    return f"{key}.r{attempt}" if attempt else key


def marks(paths: Iterable[str]) -> list[str]:
    """Return Orbax's marks of a checkpoint with these files: one per item, then the step's."""
    items = sorted({path.partition("/")[0] for path in paths if "/" in path})
    return [*(join(item, SUCCESS) for item in items), SUCCESS]


def probe_key() -> str:
    """Return a unique key for an experiment."""
    return f"{CONTROL}/probe-{uuid.uuid4().hex}"


def is_probe(key: str) -> bool:
    """Return whether an object is the leftover of an experiment."""
    control, _, name = key.partition("/")
    return control == CONTROL and _PROBE.fullmatch(name) is not None


def note_key(process: int) -> str:
    """Return the key of the last error of a process."""
    return f"{CONTROL}/{note_name(process)}"


def is_note(key: str) -> bool:
    """Return whether an object is the last error of a process."""
    control, _, name = key.partition("/")
    return control == CONTROL and NOTE.fullmatch(name) is not None
