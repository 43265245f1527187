"""The files of a foreign checkpoint: how large they are, and what errors call them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from asyncckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from asyncckpt.ports import CheckpointFiles
from asyncckpt.stages.opened import StoredFile, missing

MAX_ENTRIES = 1 << 20
"""Names in one directory."""


@contextlib.contextmanager
def located(files: CheckpointFiles, path: str) -> Iterator[str]:
    """What to call a file in errors; those raised inside get to know location and file."""
    try:
        yield f"{files.location}/{path}" if path else files.location
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        error.location, error.file = files.location, path
        raise


async def stored_files(files: CheckpointFiles, paths: Iterable[str]) -> dict[str, StoredFile]:
    """The files by path, in the order of `paths`.

    Raises:
        CorruptCheckpointError: one is missing, no regular file, or a symbolic link.
    """
    sizes: dict[str, dict[str, int]] = {}
    found: dict[str, StoredFile] = {}
    for path in paths:
        directory, _, name = path.rpartition("/")
        if directory not in sizes:
            try:
                entries = await files.entries(directory, max_entries=MAX_ENTRIES)
            except CheckpointNotFoundError as error:
                raise missing(files.location, path) from error
            sizes[directory] = {e.name: e.nbytes for e in entries if not e.is_directory}
        nbytes = sizes[directory].get(name)
        if nbytes is None:
            await _why_not(files, path)
            raise missing(files.location, path)
        found[path] = StoredFile(path, nbytes)
    return found


async def _why_not(files: CheckpointFiles, path: str) -> None:
    """Raises what the store has against a file that is there and was not listed, such as a link."""
    with contextlib.suppress(CheckpointNotFoundError):
        await files.read_into(path, 0, [])
