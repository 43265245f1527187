"""The last error of each process, in small files for the job that continues the run."""

# Rule: notes are a courtesy: failures to write, read or remove one are ignored.

from __future__ import annotations

import contextlib
import os
import time

from asyncckpt.stores.local.posix import checked_regular, listing, open_regular
from asyncckpt.stores.paths import NOTE, NOTE_NBYTES, Layout, note_name


def keep_note(layout: Layout, process: int, note: bytes | None) -> None:
    """Replace the note of a process, or remove it (None). Blocking."""
    path = os.path.join(layout.control, note_name(process))
    with contextlib.suppress(OSError):
        if note is None:
            os.unlink(path)
            return
        with contextlib.suppress(FileExistsError):
            os.mkdir(layout.control)  # not the root: without one there is no run to continue
        # O_NONBLOCK: opening a FIFO would wait for a reader.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(checked_regular(os.open(path, flags, 0o600)), "wb") as file:
            file.write(note)


def take_notes(layout: Layout) -> list[bytes]:
    """Remove all notes; return them by process. Blocking."""
    notes: list[bytes] = []
    for path in _paths(layout):
        with contextlib.suppress(OSError):
            with open(open_regular(path), "rb") as file:
                notes.append(file.read(NOTE_NBYTES))
            os.unlink(path)
    return notes


def collect_notes(layout: Layout, older_than_s: float, *, dry_run: bool) -> list[str]:
    """Remove old notes; return their names. Blocking."""
    found: list[str] = []
    for path in _paths(layout):
        with contextlib.suppress(OSError):
            if time.time() - os.lstat(path).st_mtime >= older_than_s:
                if not dry_run:
                    os.unlink(path)
                found.append(os.path.basename(path))
    return found


def _paths(layout: Layout) -> list[str]:
    with contextlib.suppress(OSError):
        names = filter(NOTE.fullmatch, listing(layout.control))
        return [os.path.join(layout.control, name) for name in names]
    return []
