"""Which stored file paths are safe to open: relative, plain, inside the checkpoint."""

from __future__ import annotations

# Longest stored path in bytes; the OCDBT format allows 65,535, file systems 4,096.
MAX_PATH_NBYTES = 4096


def path_fault(path: str) -> str | None:
    """Why `path` may not be opened below a checkpoint, or None when it may.

    Safe paths are relative, joined by ``/``, and have no empty, ``.`` or ``..`` part, no backslash,
    no control character and at most 4,096 bytes of UTF-8.
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
