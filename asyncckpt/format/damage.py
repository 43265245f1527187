"""Errors for bytes that cannot be read, and the check of stored file paths."""

from __future__ import annotations

from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError

MAX_PATH_NBYTES = 4096
"""Longest stored path; the OCDBT format allows 65,535 bytes, file systems 4,096."""


def corrupt(
    what: str,
    reason: str,
    *,
    file: str,
    offset: int | None = None,
    expected: object = None,
    found: object = None,
) -> CorruptCheckpointError:
    """Return the error for damage at byte `offset` of `file`."""
    at = "" if offset is None else f", byte {offset}"
    return CorruptCheckpointError(
        f"{file}{at}: {what} is damaged: {reason}; restore another step or copy",
        file=file,
        offset=offset,
        expected=expected,
        found=found,
    )


def unsupported(
    text: str, *, file: str, offset: int | None = None, expected: object, found: object
) -> UnsupportedFormatError:
    """Return the error for intact bytes in `file` that this release does not read."""
    at = "" if offset is None else f", byte {offset}"
    return UnsupportedFormatError(
        f"{file}{at}: {text}", file=file, offset=offset, expected=expected, found=found
    )


def path_fault(path: str) -> str | None:
    """Return why `path` must not be opened below a checkpoint, or None if it is safe.

    A safe path is relative, joined by ``/``, has no empty, ``.`` or ``..`` part, no backslash or
    control character, and at most 4,096 bytes of UTF-8.
    """
    if not path:
        return "is empty"
    if path.startswith("/"):
        return "is absolute"
    if "\\" in path:
        return "has a backslash"
    if not path.isprintable() and any(ord(c) < 32 or ord(c) == 127 for c in path):
        return "has a control character"
    for part in path.split("/"):
        if not part:
            return "has an empty part"
        if part in (".", ".."):
            return f"has a part {part!r}"
    try:
        nbytes = len(path.encode())
    except UnicodeEncodeError:
        return "is not valid Unicode"
    return f"is longer than {MAX_PATH_NBYTES} bytes" if nbytes > MAX_PATH_NBYTES else None
