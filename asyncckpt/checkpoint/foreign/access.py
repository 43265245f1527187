"""The files of a foreign checkpoint: how large they are, and what errors call them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from asyncckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from asyncckpt.flow.shield import leading_error
from asyncckpt.ports import CheckpointFiles
from asyncckpt.stages.opened import StoredFile, missing

MAX_ENTRIES = 1 << 20
"""Names in one directory."""

CONCURRENCY = 8
"""Reads of metadata in flight, at least: enough to hide the hop to another thread."""

A = TypeVar("A")
R = TypeVar("R")


async def side_by_side(
    files: CheckpointFiles, work: Callable[[A], Awaitable[R]], items: Sequence[A]
) -> list[R]:
    """The results for all items, in their order; as many at a time as the store likes.

    Raises:
        …: the first failure.
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
    """Raises what the store has against a file that is there and was not listed, such as a link."""
    with contextlib.suppress(CheckpointNotFoundError):
        await files.read_into(path, 0, [])
