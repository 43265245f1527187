"""Files of a foreign checkpoint: their sizes, and their names in errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from asyncckpt.checkpoint.metadata import StoredFile, missing
from asyncckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from asyncckpt.flow.shield import leading_error
from asyncckpt.ports import CheckpointFiles

MAX_ENTRIES = 1 << 20
"""Names in one directory."""

CONCURRENCY = 8
"""Least reads of metadata in flight: enough to hide the hop to another thread."""

A = TypeVar("A")
R = TypeVar("R")


async def side_by_side(
    files: CheckpointFiles, work: Callable[[A], Awaitable[R]], items: Sequence[A]
) -> list[R]:
    """Do the work for all items, as many at a time as the store prefers; return results in order.

    The first failure is raised.
    """
    found: dict[int, R] = {}
    waiting = iter(enumerate(items))

    async def stream() -> None:
        for number, item in waiting:
            found[number] = await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(len(items), max(CONCURRENCY, files.capabilities.reads))):
                group.create_task(stream())
    except BaseExceptionGroup as errors:
        raise leading_error(errors) from None
    return [found[number] for number in range(len(items))]


@contextlib.contextmanager
def located(files: CheckpointFiles, path: str) -> Iterator[str]:
    """Yield the name of a file for errors; add location and file to those raised inside."""
    try:
        yield f"{files.location}/{path}" if path else files.location
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        error.location, error.file = files.location, path
        raise


async def stored_files(files: CheckpointFiles, paths: Iterable[str]) -> dict[str, StoredFile]:
    """Return the files by path, in the order of `paths`.

    Raises:
        CorruptCheckpointError: one is missing, not a regular file, or a symbolic link.
    """
    paths = list(paths)
    first = {path.rpartition("/")[0]: path for path in reversed(paths)}

    async def sizes_of(directory: str) -> dict[str, int]:
        try:
            entries = await files.entries(directory, max_entries=MAX_ENTRIES)
        except CheckpointNotFoundError as error:
            raise missing(files.location, first[directory]) from error
        return {entry.name: entry.nbytes for entry in entries if not entry.is_directory}

    sizes = dict(zip(first, await side_by_side(files, sizes_of, list(first)), strict=True))
    found: dict[str, StoredFile] = {}
    for path in paths:
        directory, _, name = path.rpartition("/")
        nbytes = sizes[directory].get(name)
        if nbytes is None:
            await _why_not(files, path)
            raise missing(files.location, path)
        found[path] = StoredFile(path, nbytes)
    return found


async def _why_not(files: CheckpointFiles, path: str) -> None:
    """Raise the store's error for a file that exists but was not listed, such as a link."""
    with contextlib.suppress(CheckpointNotFoundError):
        await files.read_into(path, 0, [])
