"""The last error of each process, in small objects for the job that continues the run."""

from __future__ import annotations

from asyncckpt.stores.objects.context import OBJECTS_MAX
from asyncckpt.stores.objects.layout import CONTROL, is_note, note_key
from asyncckpt.stores.objects.requests.requests import Requests

NOTE_NBYTES = 64 << 10
"""Longest note that is read."""


async def keep_note(requests: Requests, process: int, note: bytes | None) -> None:
    """Replace the note of a process; remove it with None."""
    if note is None:
        await requests.delete([note_key(process)])
    else:
        await requests.replace(note_key(process), note)


async def take_notes(requests: Requests) -> list[bytes]:
    """Remove all notes; return them by process."""
    listed = await requests.list(CONTROL, recursive=True, limit=OBJECTS_MAX)
    keys = sorted((one.key for one in listed if is_note(one.key)), key=lambda key: (len(key), key))
    notes = [await requests.read(key, max_nbytes=NOTE_NBYTES) for key in keys]
    await requests.delete(keys)
    return [note for note in notes if note is not None]
