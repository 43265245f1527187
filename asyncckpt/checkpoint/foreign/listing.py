"""Files of a foreign checkpoint: sizes, reads of many small ranges, and names in errors."""

# Rule: nothing is read or allocated before the listing shows that it exists. Links are not listed:
#   the store refuses files that are reached through one.

from __future__ import annotations

import contextlib
import itertools
import posixpath
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from asyncckpt.checkpoint.foreign.ours import is_our_data, without_record
from asyncckpt.checkpoint.metadata import missing
from asyncckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.flow.shield import mapped
from asyncckpt.format.damage import path_fault
from asyncckpt.options import MAX_ENTRIES
from asyncckpt.planning.restore import coalesce
from asyncckpt.ports import CheckpointFiles

MAX_DEPTH = 320
"""Deepest directory: the depth of a tree plus the dimensions of a chunk's key."""

GAP_NBYTES = 64 << 10
"""Largest gap of unwanted bytes within one read."""

READ_NBYTES = 4 << 20
"""Longest read of several ranges."""

BATCH_NBYTES = 16 << 20
"""Approximate bytes of metadata in memory at a time."""

CONCURRENCY = 8
"""Least number of concurrent reads of metadata, to hide thread switches."""

Range = tuple[str, int, int]
"""File (relative to the checkpoint), first byte, length."""

A = TypeVar("A")
R = TypeVar("R")


async def concurrently(
    files: CheckpointFiles, work: Callable[[A], Awaitable[R]], items: Sequence[A]
) -> list[R]:
    """Return the results of `work` for all items, as many at a time as the store prefers."""
    return await mapped(work, items, max(CONCURRENCY, files.capabilities.reads))


def batches(items: Iterable[A], nbytes_of: Callable[[A], int]) -> Iterator[list[A]]:
    """Yield the items in batches of about `BATCH_NBYTES`."""
    batch: list[A] = []
    nbytes = 0
    for item in items:
        batch.append(item)
        nbytes += nbytes_of(item)
        if nbytes > BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """Regular files below one directory of a checkpoint.

    `nbytes_of` has the size of each file by its path, relative to the checkpoint.
    """

    files: CheckpointFiles
    directory: str
    nbytes_of: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.nbytes_of.values())

    def path(self, name: str) -> str:
        """Return the path of `name` in the directory."""
        return posixpath.join(self.directory, name)

    def has(self, name: str) -> bool:
        """Return whether the directory has a regular file `name`."""
        return self.path(name) in self.nbytes_of

    async def exists(self, name: str) -> bool:
        """Return whether the directory has a regular file `name`; raise if it is a link."""
        if not self.has(name):
            await refuse_link(self.files, self.path(name))
        return self.has(name)

    def refuse_ours(self) -> None:
        """Raise `CheckpointNotFoundError` if this is an asyncckpt checkpoint without its record."""
        prefix = self.path("d/")
        for path in self.nbytes_of:
            if path.startswith(prefix) and is_our_data(path[len(prefix) - 2 :]):
                raise without_record(self.files.location, is_database=not self.directory)

    def check_claimed(self, what: str, nbytes: int, *, beyond: int) -> None:
        """Check that ranges, which may overlap, take at most four times the files plus `beyond`."""
        stored = self.nbytes
        if nbytes > 4 * stored + beyond:
            raise damaged(
                self.files,
                None,
                f"{what} take {nbytes} bytes, the files that hold them {stored}; the checkpoint is "
                "damaged or hostile: use another",
                expected=stored,
                found=nbytes,
            )

    async def check(self, path: str, offset: int, nbytes: int) -> None:
        """Check that a range is inside its file."""
        size = self.nbytes_of.get(path)
        if size is None:
            await refuse_link(self.files, path)
            raise missing(self.files.location, path)
        if offset > size or nbytes > size - offset:
            raise damaged(
                self.files,
                path,
                f"{path} ends at byte {size}, but the metadata refers to bytes {offset} to "
                f"{offset + nbytes}; it is truncated or damaged",
                offset=offset,
                expected=offset + nbytes,
                found=size,
            )

    async def read(self, ranges: Sequence[Range], gap_nbytes: int = GAP_NBYTES) -> list[bytes]:
        """Read the bytes of every range; adjacent ranges are read together."""
        for path, offset, nbytes in ranges:
            await self.check(path, offset, nbytes)
        order = sorted(range(len(ranges)), key=ranges.__getitem__)
        in_order = [ranges[n] for n in order]
        groups = coalesce(
            np.array([offset for _, offset, _ in in_order], np.int64),
            np.array([nbytes for _, _, nbytes in in_order], np.int64),
            gap_nbytes=max(gap_nbytes, self.files.capabilities.read_gap_nbytes),
            limit_nbytes=READ_NBYTES,
            starts=np.array(
                [n == 0 or in_order[n - 1][0] != row[0] for n, row in enumerate(in_order)], np.bool_
            ),
        ).tolist()
        result = [b""] * len(ranges)

        async def read_run(run: tuple[int, int]) -> None:
            first, stop = run
            path, base, _ = in_order[first]
            end = max(offset + nbytes for _, offset, nbytes in in_order[first:stop])
            data = np.empty(end - base, np.uint8)
            try:
                await self.files.read_into(path, base, [data])
            except CheckpointNotFoundError as error:
                raise missing(self.files.location, path) from error
            for row in range(first, stop):
                at = in_order[row][1] - base
                result[order[row]] = data[at : at + in_order[row][2]].tobytes()

        runs = list(itertools.pairwise([*groups, len(order)]))
        await concurrently(self.files, read_run, runs)
        return result


async def refuse_link(files: CheckpointFiles, path: str) -> None:
    """Raise if the path is or contains a link."""
    with contextlib.suppress(CheckpointNotFoundError):
        await files.entries(path, max_entries=MAX_ENTRIES)


async def list_files(files: CheckpointFiles, directory: str) -> Listing:
    """List all regular files below a directory; links are neither listed nor followed.

    Raises:
        CheckpointNotFoundError: there is no such directory.
    """
    nbytes_of: dict[str, int] = {}
    count = 0

    async def list_one(path: str) -> list[str]:
        nonlocal count
        entries = await files.entries(path, max_entries=MAX_ENTRIES)
        count += len(entries)
        if count > MAX_ENTRIES or depth > MAX_DEPTH:
            raise damaged(
                files,
                path,
                f"more than {MAX_ENTRIES} files, or deeper than {MAX_DEPTH} directories; this is "
                "not a checkpoint, or a hostile one",
                expected=MAX_ENTRIES,
                found=count,
            )
        below: list[str] = []
        for entry in entries:
            inner = posixpath.join(path, entry.name)
            if path_fault(inner) is not None:
                continue
            if entry.is_directory:
                below.append(inner)
            else:
                nbytes_of[inner] = entry.nbytes
        return below

    level, depth = [directory], 0
    while level:
        found = await concurrently(files, list_one, level)
        level, depth = list(itertools.chain.from_iterable(found)), depth + 1
    return Listing(files, directory, dict(sorted(nbytes_of.items())))


async def list_some(files: CheckpointFiles, paths: Iterable[str]) -> Listing:
    """List these files, in the order of `paths`, by listing only their directories."""
    paths = list(paths)
    first = {posixpath.dirname(path): path for path in reversed(paths)}

    async def list_one(directory: str) -> dict[str, int]:
        try:
            entries = await files.entries(directory, max_entries=MAX_ENTRIES)
        except CheckpointNotFoundError as error:
            raise missing(files.location, first[directory]) from error
        return {posixpath.join(directory, e.name): e.nbytes for e in entries if not e.is_directory}

    nbytes_of: dict[str, int] = {}
    for sizes in await concurrently(files, list_one, list(first)):
        nbytes_of |= sizes
    for path in paths:
        if path not in nbytes_of:
            with contextlib.suppress(CheckpointNotFoundError):
                await files.read_into(path, 0, [])  # raises the reason, if there is one
            raise missing(files.location, path)
    return Listing(files, "", {path: nbytes_of[path] for path in paths})


# ----------------------------------------------------------------------------------------- errors


def place(files: CheckpointFiles, directory: str) -> str:
    """Return the name of a directory or file for errors."""
    return posixpath.join(files.location, directory) if directory else files.location


def damaged(
    files: CheckpointFiles,
    file: str | None,
    text: str,
    *,
    offset: int | None = None,
    expected: object = None,
    found: object = None,
) -> CorruptCheckpointError:
    """Return the error for damaged or hostile metadata; `text` follows the location."""
    return CorruptCheckpointError(
        f"{files.location}: {text}",
        file=file,
        offset=offset,
        location=files.location,
        expected=expected,
        found=found,
    )


@contextlib.contextmanager
def located(files: CheckpointFiles, directory: str = "") -> Iterator[None]:
    """Add the location to errors of parsers, whose files are relative to `directory`.

    An error without a file, or whose file is empty, is about the location itself.
    """
    try:
        yield
    except (CorruptCheckpointError, UnsupportedFormatError) as error:
        if error.location is None:
            error.location = files.location
            separator = "" if error.file == "" else ": "
            error.args = (f"{place(files, directory)}{separator}{error}",)
            if error.file is not None:
                error.file = posixpath.join(directory, error.file)
        raise
