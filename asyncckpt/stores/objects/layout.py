"""Keys of an object store, and recognition of our own.

::

    <root>/<name>/checkpoint.json                        commit record
    <root>/<name>/default/d/<save id>-<n>[.r<k>]         data, sent by the k-th try
    <root>/<name>/.asyncckpt-<save id>-fixed-<n>         content of one fixed name
    <root>/<name>/.asyncckpt-<save id>-x-<path>          mark of a shared attempt, exchanged file;
                                                         removed after the record is written
    <root>/<name>/default/manifest.ocdbt, …              fixed names, written after the record
    <root>/<name>/commit_success.txt                     Orbax's mark on Google's store, last
    <root>/.asyncckpt/probe-<token>                      a probe; removed at once
    <root>/.asyncckpt/error-<p>                          last error of process p, for the next job

The contents of fixed names have no directory of their own, because Orbax treats every directory of
a step as an item to restore.
"""

# Rule 1: only one attempt writes a name with its save id, and only one content to each name. So
#   deletion by save id removes no other attempt's bytes.
# Rule 2: a name without a save id belongs to no attempt. It is deleted only if the record of the
#   deleted save lists it.

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable

from asyncckpt.errors import UsageError
from asyncckpt.stores.paths import CONTROL, NOTE, note_name

LISTED_MAX = 1 << 20
"""Maximum entries of a listing: of a checkpoint, the control prefix, or the names below a root."""

SUCCESS = "commit_success.txt"
"""Mark that Orbax requires on Google's store, where it does not trust renames."""

KEY_MAX_NBYTES = 1024
"""Maximum length of a key on S3 and Google Cloud Storage, in bytes of UTF-8."""

KEY_TAIL_NBYTES = 128
"""Upper bound for our own paths below a checkpoint: `<database>/d/<save id>-<n>.r<k>`."""

_SAVE_ID = re.compile(r"[0-9a-f]{32}")
_PROBE = re.compile(rf"{re.escape(CONTROL)}/probe-[0-9a-f]{{32}}")
_NOTE = re.compile(f"{re.escape(CONTROL)}/{NOTE.pattern}")
_FIXED = re.compile(r"\.asyncckpt-([0-9a-f]{32})-fixed-[0-9]{1,9}")
_EXCHANGE = re.compile(r"\.asyncckpt-([0-9a-f]{32})-x-[A-Za-z0-9._-]{1,64}")
# One directory for the database: deeper data belong to a checkpoint of another root.
_DATA = re.compile(r"[^/]+/d/([0-9a-f]{32})-[0-9a-z-]{1,64}(\.r[0-9]{1,9})?")


def join(name: str, path: str) -> str:
    """Return the key of a checkpoint's path; with ``""`` of the checkpoint itself."""
    return f"{name}/{path}" if path else name


def check_save_id(save_id: str) -> None:
    """Raise `UsageError` unless the save id is 32 lower-case hex digits."""
    if not _SAVE_ID.fullmatch(save_id):
        raise UsageError(
            f"save id {save_id!r}: on object stores pass 32 lower-case hex digits "
            "(uuid.uuid4().hex), which mark the objects of the save",
            found=save_id,
        )


def check_key(url: str) -> None:
    """Raise `UsageError` if the keys of our own paths below `url` are too long for the store."""
    scheme, _, rest = url.partition("://")
    nbytes = len(rest.partition("/")[2].encode()) + KEY_TAIL_NBYTES
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
    """Return the path of the object that holds the exchanged file `path`."""
    return f"{CONTROL}-{save_id}-x-{path}"


def is_exchange(path: str) -> bool:
    """Return whether a path of a checkpoint holds an exchanged file."""
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
    """Return a unique key for a probe."""
    return f"{CONTROL}/probe-{uuid.uuid4().hex}"


def is_probe(key: str) -> bool:
    """Return whether an object is the leftover of a probe."""
    return _PROBE.fullmatch(key) is not None


def note_key(process: int) -> str:
    """Return the key of a process's last error."""
    return f"{CONTROL}/{note_name(process)}"


def is_note(key: str) -> bool:
    """Return whether an object is a process's last error."""
    return _NOTE.fullmatch(key) is not None
